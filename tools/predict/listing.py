"""Listing of the images to predict: files, folders, globs, and lists of these in a file or on stdin."""

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from common.data.images import UNREAD_ADVICE, has_image_suffix, is_image_file
from common.data.notes import Notes
from common.errors import Refused
from common.files import match_files, walk


def list_images(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """List the files that `args` name, in their order and each once, and notes about what was left out.

    An argument is a file, a folder (with all folders in it), a glob, @FILE (a list), or - (a list on
    stdin). A list has one file or folder per line, or separated by NUL, as `find -print0` writes
    it. Of a folder, the images are taken (`is_image_file`); a file that is named is always taken.
    Raises `Refused` if there is nothing to predict.
    """
    title = f"{' '.join(args):.200}"
    skipped = Notes(title, "images")
    matches: list[str] = []
    for arg in args:
        matches += _list_argument(arg, skipped)
    files = list(dict.fromkeys(matches))
    notes = list(skipped.format_lines(len(matches) + skipped.num_left_out, UNREAD_ADVICE))
    if not files:
        raise Refused("; ".join([f"{title}: no image is there", *notes]))
    num_repeated = len(matches) - len(files)
    if num_repeated:
        notes.append(f"{num_repeated:,} files were named more than once, and are predicted once")
    return files, notes


def _list_argument(arg: str, skipped: Notes) -> Iterator[str]:
    if arg == "-" or (arg.startswith("@") and not os.path.lexists(arg)):
        yield from _read_list(arg.removeprefix("@"), skipped)
    elif os.path.lexists(arg) or not glob.has_magic(arg):
        yield from _list_path(arg, skipped)
    else:
        matches = match_files(arg)
        if not matches:
            raise Refused(f"{arg}: no file matches")
        for match in matches:
            yield from _list_path(match, skipped)


def _read_list(name: str, skipped: Notes) -> Iterator[str]:
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise Refused(f"{name}: {error.strerror}; it should list images, one per line") from None
    if b"\0" in content:
        lines = content.split(b"\0")
    else:
        lines = [line.rstrip(b"\r") for line in content.split(b"\n")]
    for line in lines:
        if line:
            yield from _list_path(os.fsdecode(line), skipped)


def _list_path(path: str, skipped: Notes) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    try:
        for entry in chain.from_iterable(entries for _, entries in walk(path)):
            if entry.is_dir():
                continue
            if has_image_suffix(entry.name) or (
                entry.is_file() and is_image_file(entry.path, skipped)
            ):
                yield entry.path
    except OSError as error:
        raise Refused(
            f"{error.filename}: {error.strerror}; make it readable, or name other folders"
        ) from None
