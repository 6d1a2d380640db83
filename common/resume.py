"""From which checkpoint does a run go on, and is it this run's?"""

from collections.abc import Callable
from pathlib import Path

import torch

from common.checkpoint import Checkpoint, Checkpoints, Damaged, verify
from common.errors import Refused
from common.state import TrainingState


def choose(resume: str, checkpoints: Checkpoints, mine: dict, say: Callable[[str], None]) -> Checkpoint | None:
    """The verified checkpoint that `--resume` means, or None for a new start; the main process decides for all.

    `mine` is the run's identity: its configuration and the fingerprint of its data. Raises `Refused` for `never` where there
    are checkpoints, for a path that is not a whole checkpoint or older than what the folder has, and for another identity.
    """
    checkpoints.sweep()
    there, run = checkpoints.paths(), checkpoints.folder.parent
    if resume == "never":
        if there:
            raise Refused(
                f"--resume never: {run} holds {there[0].name}; give this run another --name, or remove that folder"
            )
        return None
    found = checkpoints.newest(say) if resume == "auto" else _named(Path(resume), there, run)
    if found:
        theirs = found.record["identity"]
        differing = [
            f"{key} {theirs.get(key, '(absent)')} there, {mine.get(key, '(absent)')} here"
            for key in sorted(theirs.keys() | mine.keys())
            if theirs.get(key) != mine.get(key)
        ]
        if differing:
            raise Refused(f"{found.path} belongs to another run: {'; '.join(differing)}; give this run another --name")
    return found


def load_model(model: torch.nn.Module, path: Path) -> None:
    """Load a checkpoint's weights into `model`, the moving average where it has one. Raises `Refused` for another model's."""
    found = _whole(path)
    TrainingState(model).check(found.shapes(), str(path))
    files = found.tensors()
    model.load_state_dict(files.get("ema", files["model"]))


def _named(path: Path, there: list[Path], run: Path) -> Checkpoint:
    found = _whole(path)
    if there and there[0].resolve() != path.resolve() and int(there[0].name.removeprefix("step_")) >= found.step:
        raise Refused(f"--resume {path}: {run} has gone on to {there[0].name}; to branch off give another --name")
    return found


def _whole(path: Path) -> Checkpoint:
    try:
        return verify(path)
    except Damaged as error:
        raise Refused(f"{path}: not a whole checkpoint ({error})") from None
