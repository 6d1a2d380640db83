"""Listing of the images to predict: files, folders, globs, and lists of these in a file or on
stdin, in the order given.
"""

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


def listing(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files that `words` name, each once, and notes about what was left out.

    A word is a file, a folder (with all folders in it), a glob, @FILE (a list), or - (a list on
    stdin). A list has one file or folder per line, or separated by NUL, as `find -print0` writes
    it. Of a folder, the images are taken (`is_image_file`); a file that is named is always taken.
    Raises `Refused` if there is nothing to predict.
    """
    title = f"{' '.join(words):.200}"
    skipped = Notes(title, "images")
    found = [file for word in words for file in _of_word(word, skipped)]
    files = [*dict.fromkeys(found)]
    notes = list(skipped.format_lines(len(found) + skipped.num_left_out, UNREAD_ADVICE))
    if not files:
        raise Refused("; ".join([f"{title}: no image is there", *notes]))
    if len(files) < len(found):
        notes.append(
            f"{len(found) - len(files):,} files were named more than once, and are predicted once"
        )
    return files, notes


def _of_word(word: str, skipped: Notes) -> Iterator[str]:
    if word == "-" or (word.startswith("@") and not os.path.lexists(word)):
        yield from _of_list(word.removeprefix("@"), skipped)
    elif os.path.lexists(word) or not glob.has_magic(word):
        yield from _of_path(word, skipped)
    else:
        matches = match_files(word)
        if not matches:
            raise Refused(f"{word}: no file matches")
        for match in matches:
            yield from _of_path(match, skipped)


def _of_list(name: str, skipped: Notes) -> Iterator[str]:
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise Refused(f"{name}: {error.strerror}; it should list images, one per line") from None
    lines = (
        content.split(b"\0")
        if b"\0" in content
        else (line.rstrip(b"\r") for line in content.split(b"\n"))
    )
    for line in filter(None, lines):
        yield from _of_path(os.fsdecode(line), skipped)


def _of_path(path: str, skipped: Notes) -> Iterator[str]:
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
