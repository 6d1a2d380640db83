"""How does what is written outlive a loss of power, whole or not at all?

A name must not reach the disk before the content that it stands for. So content is synced first, then it gets its name, and
then the folder that holds the name is synced.
"""

import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """Return when the file or folder is on the disk; of a folder, the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Return when the folder is on the disk with all that it holds."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def make_folder(path: Path) -> None:
    """Make the folder and those above it that are missing, durably."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file durably: a reader, and a start after a power loss, sees the old or the new one, whole."""
    draft = path.with_name(f".{path.name}.tmp")
    remove(draft)
    try:
        with draft.open("xb") as file:  # x: a link that somebody has put there meanwhile is not followed
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace_folder(final: Path, draft: Path) -> None:
    """Put the folder `draft`, which `sync_folder` has synced and which lies beside `final`, durably into its place.

    At some moment there is no `final`: then the old one is `.NAME.old`, and the new one still `draft`.
    """
    old = final.with_name(f".{final.name}.old")
    if os.path.lexists(final):
        remove(old)
        final.rename(old)
    draft.rename(final)
    sync(final.parent)
    remove(old)


def remove(path: Path) -> None:
    """Remove what has this name, if anything has: a folder with all in it, of a link just the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        path.unlink()
