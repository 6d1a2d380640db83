"""Resume: chooses the checkpoint that a run resumes from, and checks that it belongs to this run."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from common.checkpoints.state import TrainingState
from common.checkpoints.store import Checkpoint, Checkpoints, Damaged, get_step, verify
from common.config import recipe_source
from common.config.recipe_source import Source
from common.distributed.collectives import all_or_none, broadcast_object, gather_objects, is_main
from common.errors import Refused
from common.files import check_regular

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def choose_checkpoint(
    resume: str,
    checkpoints: Checkpoints,
    identity: dict,
    log: Callable[..., None],
    recipe: Source | None = None,
    allow_changed_source: bool = False,
) -> Checkpoint | None:
    """The verified checkpoint that `--resume` selects, or None for a new run, on every rank.

    A collective: rank 0 decides. `identity` is the run's: its configuration and the fingerprint of
    its data; `recipe` is the present source. Raises `Refused` on every rank: for `never` if there
    are checkpoints; for a path that is no whole checkpoint, or an older one of this folder; for
    another identity; for another source unless `allow_changed_source`; and if a machine lacks that
    checkpoint, has another of its name, or has a newer one.
    """
    host = socket.gethostname()
    steps = [get_step(path) for path in checkpoints.list_paths()]
    newest_by_rank = gather_objects((host, max(steps, default=0)))
    main_host = newest_by_rank[0][0]
    checkpoint = None
    with all_or_none("choosing a checkpoint"):
        _check_newest_on_main(checkpoints, newest_by_rank)
        if is_main():
            checkpoint = _find_checkpoint(resume, checkpoints, log)
        if checkpoint:
            _check_identity(checkpoint, identity)
            _check_source(checkpoint, recipe, allow_changed_source, log)
    content = None
    if checkpoint:
        content = (str(checkpoint.path), checkpoint.record, checkpoint.read_manifest())
    content = broadcast_object(content)
    if not content:
        return None
    path, record, manifest = content
    checkpoint = Checkpoint(Path(path), record)
    with all_or_none("looking for the checkpoint"):
        if checkpoint.read_manifest() != manifest:
            raise Refused(
                f"{checkpoint.path}: {host} does not have the one that {main_host} resumes from: "
                f"name an --output_dir that all machines see, or copy {checkpoints.folder} from "
                f"{main_host}"
            )
    return checkpoint


def _check_newest_on_main(
    checkpoints: Checkpoints, newest_by_rank: Sequence[tuple[str, int]]
) -> None:
    """Raise `Refused` if a machine has a newer checkpoint than the main process's.

    `newest_by_rank` has the host and the step of its newest checkpoint, 0 if it has none.
    """
    main_host, main_newest = newest_by_rank[0]
    newer_by_host = {host: newest for host, newest in newest_by_rank if newest > main_newest}
    if newer_by_host:
        newer = ", ".join(f"{host} has step {step}" for host, step in newer_by_host.items())
        newest_on_main = f"step {main_newest}" if main_newest else "none"
        raise Refused(
            f"{checkpoints.folder}: {newer}, but {main_host}, which writes, has {newest_on_main}: "
            "name an --output_dir that all machines see, start with the address of one that has "
            f"it, or copy it to {main_host}"
        )


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
        files = _verify_named(path, "--eval_only").load_tensors()
    shapes = {}
    for file, tensors in files.items():
        shapes[file] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    TrainingState(model).check(shapes, str(path))
    model.load_state_dict(files.get("ema", files["model"]))


def check_weights(model: torch.nn.Module, file: Path) -> None:
    """Raise `Refused` for a tensor of another kind than the model's, or with values that are not finite.

    Loading would convert another kind, as int8 for floats, without a word. Names that the model
    does not have are for the loader to judge.
    """
    if not file.is_file():
        return
    state = model.state_dict()
    with safe_open(file, "pt") as weights:
        for name in weights.keys() & state.keys():
            tensor = weights.get_tensor(name)
            model_dtype = state[name].dtype
            if not _is_convertible(tensor.dtype, model_dtype):
                raise Refused(
                    f"{file}: {name} is {tensor.dtype}, where the model has {model_dtype}; copy "
                    "the folder again"
                )
            if tensor.dtype in _FLOATS and not tensor.isfinite().all():
                raise Refused(
                    f"{file}: {name} has numbers that are not finite; copy the folder again, or "
                    "take another"
                )


def _is_convertible(dtype: torch.dtype, model_dtype: torch.dtype) -> bool:
    """True for two types of floats, and for the same type."""
    if dtype in _FLOATS:
        return model_dtype.is_floating_point
    if model_dtype.is_floating_point:  # such as a float of 8 bits
        return False
    return dtype == model_dtype


def _find_checkpoint(
    resume: str, checkpoints: Checkpoints, log: Callable[..., None]
) -> Checkpoint | None:
    """The checkpoint that `--resume` selects on the main process."""
    checkpoints.remove_drafts()
    if resume == "auto":
        return checkpoints.find_newest(log)
    if resume != "never":
        return _find_named(Path(resume), checkpoints, log)
    paths = checkpoints.list_paths()
    if paths:
        raise Refused(
            f"--resume never: {checkpoints.folder.parent} holds {paths[0].name}; give this run "
            "another --name, or remove that folder"
        )
    return None


def compare_identities(recorded: dict, current: dict) -> list[str]:
    """How the identities of two runs differ, for people. A flag that is off is as if it were not there."""
    differences = []
    for key in sorted(recorded.keys() | current.keys()):
        if recorded.get(key) == current.get(key):
            continue
        if not recorded.get(key) and not current.get(key):  # off in both
            continue
        recorded_value = recorded.get(key, "(absent)")
        current_value = current.get(key, "(absent)")
        differences.append(f"{key} {recorded_value!s:.100} there, {current_value} here")
    return differences


def _check_identity(checkpoint: Checkpoint, identity: dict) -> None:
    differences = compare_identities(checkpoint.record.get("identity") or {}, identity)
    if differences:
        raise Refused(
            f"{checkpoint.path} belongs to another run: {'; '.join(differences)}; give this run "
            "another --name"
        )


def _check_source(
    checkpoint: Checkpoint, recipe: Source | None, is_allowed: bool, log: Callable[..., None]
) -> None:
    """Log how the recipe's source has changed since `checkpoint` was made.

    Raises `Refused` if it has, unless `is_allowed`.
    """
    recorded = checkpoint.record.get("source") or {}
    changes = recipe_source.diff_sources(recorded, recipe if recipe else {})
    if not changes:
        return
    log(*changes)
    if not is_allowed:
        run = checkpoint.path.parent.parent
        raise Refused(
            f"{checkpoint.path} was made by another source of {next(iter(recorded), 'the recipe')}"
            ", see the changes above: give this run another --name, add --allow_changed_source if "
            f"they are meant, or put the source back ({run / recipe_source.FOLDER} has the code of "
            "its newest start)"
        )
    log(
        f"resuming {checkpoint.path} with a changed source, as --allow_changed_source says: the "
        "changes are shown above"
    )


def _find_named(
    path: Path, checkpoints: Checkpoints, log: Callable[..., None]
) -> Checkpoint | None:
    """The checkpoint that `--resume` names; if the run has branched off from it, the run's newest."""
    checkpoint = _verify_named(path, "--resume")
    paths = checkpoints.list_paths()
    if not paths or paths[0].resolve() == path.resolve() or get_step(paths[0]) < checkpoint.step:
        return checkpoint
    if path.resolve().parent != checkpoints.folder.resolve():
        # The run branched off there, and now resumes from its own checkpoints.
        return checkpoints.find_newest(log)
    raise Refused(
        f"--resume {path}: {checkpoints.folder.parent} has continued to {paths[0].name}; to "
        "branch off give another --name"
    )


def _verify_named(path: Path, flag: str) -> Checkpoint:
    """The checkpoint that the value of a flag names. Raises `Refused` if it is not whole."""
    if not (path / "manifest.json").is_file():
        problem = "no manifest.json is in it" if path.exists() else "nothing is there"
        raise Refused(
            f"{flag} {path}: no checkpoint, {problem}; name a folder such as "
            "RUN/checkpoints/step_00000200"
        )
    try:
        return verify(path)
    except Damaged as error:
        raise Refused(f"{flag} {path}: not a whole checkpoint ({error})") from None
