"""Durable writes: after a power loss a file or folder is there completely, or not at all.

A name must not reach the disk before its content. So the content is synced first, then renamed into
place, and then the folder that holds the name is synced.
"""

import csv
import io
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from common.errors import escape_csv_cell


def sync(path: Path) -> None:
    """Return when the file is on the disk; for a folder, when the names in it are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Return when the folder and everything in it are on the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def make_folder(path: Path) -> None:
    """Create the folder and its missing parents, durably."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file durably.

    A reader, also after a power loss, sees the complete old or the complete new file.
    """
    with replacing(path) as file:
        file.write(content)


def write_csv(path: Path, rows: Iterable[Sequence]) -> None:
    """Replace a CSV file durably, a row at a time: memory does not hold them all."""
    with replacing(path) as file:
        text = io.TextIOWrapper(file, "utf-8", "backslashreplace", newline="")
        writer = csv.writer(text)
        for row in rows:
            writer.writerow(map(escape_csv_cell, row))
        text.detach()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A block that writes a file, which replaces `path` at its end; see `replace_file`."""
    draft = path.with_name(f".{path.name}.tmp")
    remove(draft)
    try:
        with draft.open("xb") as file:  # x: never write through a link that somebody else created
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace_folder(final: Path, draft: Path) -> None:
    """Replace the folder `final` durably by `draft`, a folder beside it that `sync_folder` has synced.

    For a moment there is no `final`: then the old folder is named `.NAME.old` and the new one is
    still `draft`.
    """
    old = final.with_name(f".{final.name}.old")
    if os.path.lexists(final):
        remove(old)
        final.rename(old)
    draft.rename(final)
    sync(final.parent)
    remove(old)


def remove(path: Path) -> None:
    """Remove the file, the folder with its content, or the link (not its target) at `path`, if any."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        path.unlink()
