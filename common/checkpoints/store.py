"""Store of checkpoints: finds and verifies them, and saves new ones without endangering the old.

A checkpoint is a folder `step_00000200/` of safetensors and JSON files, which can't execute code.
It is written under another name, synced, given a manifest of sizes and hashes, and then renamed. So
a folder with that name is complete.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from common.checkpoints.state import Tensors
from common.durable import remove, replace_folder, sync, sync_folder
from common.errors import Refused
from common.files import MEDIUM, open_regular, read_text

_MANIFEST = "manifest.json"
AUDIT_FOLDER = "audit"  # in a run folder: the checkpoint that --keep_for_audit keeps
# What reading damaged JSON and safetensors files, and using what is in them, may raise.
READ_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    SafetensorError,
)


class Damaged(Exception):
    """A checkpoint has changed since it was written; the text says which file and how."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete, verified checkpoint folder."""

    path: Path
    # Content of record.json: step, best result, configuration, numbers of the training state, ...
    record: dict

    @property
    def step(self) -> int:
        """Number of optimizer steps before the checkpoint was made."""
        return self.record["step"]

    def read_manifest(self) -> str:
        """The text of the manifest: sizes and hashes of the files. "" if it does not exist here."""
        path = self.path / _MANIFEST
        return read_text(path, MEDIUM) if path.is_file() else ""

    def read_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """File -> tensor -> shape, read from the file headers only."""
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for path in self.path.glob("*.safetensors"):
            shapes[path.stem] = {}
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                for name in names:
                    shapes[path.stem][name] = tuple(file.get_slice(name).get_shape())
        return shapes

    def load_tensors(self) -> dict[str, Tensors]:
        """File -> tensor -> value."""
        return {path.stem: load_file(path) for path in self.path.glob("*.safetensors")}


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, in `folder`; used only by the main process."""

    folder: Path
    keep: int = 2

    def list_paths(self) -> list[Path]:
        """Folders with the name of a complete checkpoint, newest first."""
        if not self.folder.is_dir():
            return []
        paths = [path for path in self.folder.iterdir() if _is_checkpoint_folder(path)]
        return sorted(paths, key=get_step, reverse=True)

    def find_newest(self, log: Callable[[str], None]) -> Checkpoint | None:
        """The newest intact checkpoint; damaged ones that are newer are logged and renamed."""
        damaged = []
        for path in self.list_paths():
            try:
                checkpoint = verify(path)
            except Damaged as error:
                log(f"checkpoint {path} is damaged ({error}): trying the one before it")
                damaged.append(path)
                continue
            # So that the step can be saved again, and `keep` does not count it.
            for damaged_path in damaged:
                renamed = damaged_path.with_suffix(".damaged")
                remove(renamed)
                damaged_path.rename(renamed)
            return checkpoint
        if damaged:
            raise Refused(
                f"{self.folder}: all {len(damaged)} checkpoints are damaged; "
                "put a copy back, or start a new run with another --name"
            )
        return None

    def save(self, record: dict, files: dict[str, Tensors]) -> Path:
        """Save the checkpoint of step `record["step"]` durably, then remove the oldest beyond `keep`.

        Raises OSError if the disk is full or read-only; then the new checkpoint is removed and the
        old ones are intact.
        """
        final = self.folder / f"step_{record['step']:08d}"
        if final.exists():  # saved before a resume; the same step has the same bits
            return final
        draft = self.folder / f".{final.name}.tmp"
        remove(draft)
        try:
            if not self.folder.is_dir():
                # Without parents: a run folder that was removed must not come back.
                self.folder.mkdir()
                sync(self.folder.parent)
            draft.mkdir()
            for name, tensors in files.items():
                _save_tensors(tensors, draft / f"{name}.safetensors")
            (draft / "record.json").write_text(json.dumps(record, indent=1))
            (draft / _MANIFEST).write_text(json.dumps(compute_digests(draft), indent=1))
            sync_folder(draft)
            replace_folder(final, draft)
        except BaseException:
            remove(draft)
            raise
        for path in self.list_paths()[self.keep :]:
            with contextlib.suppress(OSError):
                # Its name never stands for half of it.
                remove(path.rename(self.folder / f".{path.name}.tmp"))
        return final

    def link(self, checkpoint: Path) -> None:
        """Keep `checkpoint`, of another folder, here too.

        By hard links, which take no room while both exist.
        """
        self.folder.mkdir(exist_ok=True)
        draft = self.folder / f".{checkpoint.name}.tmp"
        remove(draft)
        shutil.copytree(checkpoint, draft, copy_function=os.link)
        sync_folder(draft)
        replace_folder(self.folder / checkpoint.name, draft)

    def remove_drafts(self) -> None:
        """Remove unfinished checkpoints of killed processes."""
        for draft in self.folder.glob(".step_*.tmp"):
            remove(draft)


def _is_checkpoint_folder(path: Path) -> bool:
    if not re.fullmatch(r"step_\d{8,}", path.name):
        return False
    return path.is_dir()


def get_step(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step_"))


def verify(path: Path) -> Checkpoint:
    """Read all files in `path` and compare them with the manifest. Raises `Damaged` for any difference."""
    try:
        manifest = json.loads(read_text(path / _MANIFEST, MEDIUM))
        compare(path, manifest, {_MANIFEST})
        checkpoint = Checkpoint(path, json.loads(read_text(path / "record.json", MEDIUM)))
        if not isinstance(checkpoint.step, int):
            raise Damaged("record.json names no step")
        checkpoint.read_shapes()  # a file with the right hash may still be no safetensors file
        return checkpoint
    except READ_ERRORS as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None


def compute_digests(folder: Path) -> dict[str, dict]:
    """Sizes and hashes of the files in `folder`, by name."""
    return {path.name: _compute_digest(path) for path in sorted(folder.iterdir())}


def compare(folder: Path, digests: dict[str, dict], besides: Set[str] = frozenset()) -> None:
    """Raise `Damaged` or OSError if the files in `folder` don't have these sizes and hashes.

    Files that `besides` names are not compared.
    """
    for name, digest in digests.items():
        if Path(name).name != name:
            raise Damaged(f"{name} is no file of it")
        size = (folder / name).stat().st_size
        if size != digest["bytes"]:
            raise Damaged(f"{name} has {size} bytes, {digest['bytes']} were written")
        if _compute_digest(folder / name) != digest:
            raise Damaged(f"{name} is not what was written: its hash differs")
    extra = {file.name for file in folder.iterdir()} - digests.keys() - besides
    if extra:
        raise Damaged(f"{', '.join(sorted(extra))} was not written with it")


def _save_tensors(tensors: Tensors, path: Path) -> None:
    # safetensors refuses tensors that share memory (tied weights) and strided ones (channels_last).
    addresses: set[int] = set()
    plain_tensors = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        plain_tensors[name] = tensor.clone() if address in addresses else tensor
        addresses.add(address)
    try:
        save_file(plain_tensors, path)
        # Safetensors makes the file readable only for its owner.
        path.chmod(path.parent.stat().st_mode & 0o666)
    except SafetensorError as error:  # such as "No space left on device"
        raise OSError(str(error)) from None


def _compute_digest(path: Path) -> dict:
    """{"bytes": size, "sha256": hash} of a file."""
    with open_regular(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": sha256}
