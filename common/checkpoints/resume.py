"""Resume: chooses the checkpoint that a run resumes from, and checks that it belongs to this run."""

import socket
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from common.checkpoints.state import TrainingState
from common.checkpoints.store import Checkpoint, Checkpoints, Damaged, verify
from common.config.recipe_source import FOLDER, Source, difference
from common.distributed.collectives import all_or_none, broadcast_object, gather_objects, is_main
from common.errors import Refused
from common.files import check_regular


def choose_together(
    resume: str,
    checkpoints: Checkpoints,
    mine: dict,
    say: Callable[..., None],
    recipe: Source | None = None,
    allow_changed_source: bool = False,
) -> Checkpoint | None:
    """The verified checkpoint that `--resume` selects, or None for a new run, on every rank. A
    collective: rank 0 decides.

    `mine` is the run's identity: its configuration and the fingerprint of its data; `recipe` is the
    present source. Raises `Refused` on every rank: for `never` if there are checkpoints; for a path
    that is no whole checkpoint, or an older one of this folder; for another identity; for another
    source unless `allow_changed_source`; and if a machine lacks that checkpoint, has another of its
    name, or has a newer one.
    """
    host, newest = socket.gethostname(), [path.name for path in checkpoints.paths()[:1]]
    of_ranks = gather_objects((host, newest))
    with all_or_none("choosing a checkpoint"):
        main_host, on_main = of_ranks[0]
        if ahead := {there: names[0] for there, names in of_ranks if names > on_main}:
            raise Refused(
                f"{checkpoints.folder}: "
                f"{', '.join(f'{there} has {name}' for there, name in ahead.items())}, but "
                f"{main_host}, which writes, has {on_main[0] if on_main else 'none'}: name an "
                "--output_dir that all machines see, start with the address of one that has it, "
                f"or copy it to {main_host}"
            )
        found = _found(resume, checkpoints, say) if is_main() else None
        if found:
            _check_identity(found, mine)
            _check_source(found, recipe or {}, allow_changed_source, say)
    chosen = broadcast_object(found and (str(found.path), found.record, found.manifest()))
    if not chosen:
        return None
    found, manifest = Checkpoint(Path(chosen[0]), chosen[1]), chosen[2]
    with all_or_none("looking for the checkpoint"):
        if found.manifest() != manifest:
            raise Refused(
                f"{found.path}: {host} does not have the one that {main_host} resumes from: name "
                f"an --output_dir that all machines see, or copy {checkpoints.folder} from "
                f"{main_host}"
            )
    return found


def load_model(model: torch.nn.Module, path: Path) -> None:
    """Load the weights of a checkpoint into `model`; if it has a moving average, the averaged weights.

    `path` may also be the exported folder of a custom nn.Module. Raises `Refused` if the weights
    are of another model.
    """
    if (path / "config.json").is_file():
        check_regular(path)
        files = {"model": load_file(path / "model.safetensors")}
        check_weights(model, path / "model.safetensors")
    else:
        files = _whole(path, "--eval_only").tensors()
    shapes = {
        file: {name: tuple(tensor.shape) for name, tensor in files[file].items()} for file in files
    }
    TrainingState(model).check(shapes, str(path))
    model.load_state_dict(files.get("ema", files["model"]))


def check_weights(model: torch.nn.Module, file: Path) -> None:
    """Raise `Refused` for a tensor of another kind than the model's, as int8 for floats, and for
    numbers that are not finite.

    Loading would convert them without a word. Names that the model does not have are for the loader to judge.
    """
    if not file.is_file():
        return
    state = model.state_dict()
    with safe_open(file, "pt") as found:
        for name in found.keys() & state.keys():
            tensor, mine = found.get_tensor(name), state[name]
            is_number = tensor.dtype in (
                torch.float64,
                torch.float32,
                torch.float16,
                torch.bfloat16,
            )
            if is_number != mine.is_floating_point() or not (
                is_number or tensor.dtype == mine.dtype
            ):
                raise Refused(
                    f"{file}: {name} is {tensor.dtype}, where the model has {mine.dtype}; copy "
                    "the folder again"
                )
            if is_number and not tensor.isfinite().all():
                raise Refused(
                    f"{file}: {name} has numbers that are not finite; copy the folder again, or "
                    "take another"
                )


def _found(resume: str, checkpoints: Checkpoints, say: Callable[..., None]) -> Checkpoint | None:
    checkpoints.sweep()
    there = checkpoints.paths()
    if resume == "never" and there:
        run = checkpoints.folder.parent
        raise Refused(
            f"--resume never: {run} holds {there[0].name}; give this run another --name, or "
            "remove that folder"
        )
    if resume == "never":
        return None
    return checkpoints.newest(say) if resume == "auto" else _named(Path(resume), checkpoints, say)


def compare_identities(recorded: dict, current: dict) -> list[str]:
    """How the identities of two runs differ, in words. A flag that is off is as if it were not there."""
    differing = []
    for key in sorted(recorded.keys() | current.keys()):
        is_off = not recorded.get(key) and not current.get(key)
        if recorded.get(key) != current.get(key) and not is_off:
            there = recorded.get(key, "(absent)")
            differing.append(f"{key} {there!s:.100} there, {current.get(key, '(absent)')} here")
    return differing


def _check_identity(found: Checkpoint, mine: dict) -> None:
    differing = compare_identities(found.record.get("identity") or {}, mine)
    if differing:
        raise Refused(
            f"{found.path} belongs to another run: {'; '.join(differing)}; give this run another "
            "--name"
        )


def _check_source(
    found: Checkpoint, recipe: Source, allowed: bool, say: Callable[..., None]
) -> None:
    """Log how the recipe's source has changed since `found` was made. Raises `Refused` if it has,
    unless `allowed`.
    """
    theirs = found.record.get("source") or {}
    changes = difference(theirs, recipe)
    if not changes:
        return
    say(*changes)
    if not allowed:
        raise Refused(
            f"{found.path} was made by another source of {next(iter(theirs), 'the recipe')}, see "
            "the changes above: give this run another --name, add --allow_changed_source if they "
            f"are meant, or put the source back ({found.path.parent.parent / FOLDER} has the code "
            "of its newest start)"
        )
    say(
        f"resuming {found.path} with a changed source, as --allow_changed_source says: the "
        "changes are shown above"
    )


def _named(path: Path, checkpoints: Checkpoints, say: Callable[..., None]) -> Checkpoint | None:
    found, there = _whole(path, "--resume"), checkpoints.paths()
    if (
        not there
        or there[0].resolve() == path.resolve()
        or int(there[0].name.removeprefix("step_")) < found.step
    ):
        return found
    if path.resolve().parent != checkpoints.folder.resolve():
        # The run branched off there, and now resumes from its own checkpoints.
        return checkpoints.newest(say)
    raise Refused(
        f"--resume {path}: {checkpoints.folder.parent} has continued to {there[0].name}; to "
        "branch off give another --name"
    )


def _whole(path: Path, flag: str) -> Checkpoint:
    if not (path / "manifest.json").is_file():
        found = "no manifest.json is in it" if path.exists() else "nothing is there"
        raise Refused(
            f"{flag} {path}: no checkpoint, {found}; name a folder such as "
            "RUN/checkpoints/step_00000200"
        )
    try:
        return verify(path)
    except Damaged as error:
        raise Refused(f"{flag} {path}: not a whole checkpoint ({error})") from None
