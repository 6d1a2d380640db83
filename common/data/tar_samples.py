"""Samples in a tar as WebDataset writes them: where the image lies, and the label. Only headers and labels are read.

Members whose names are alike up to the first dot are a sample. Nothing is extracted, so a name may hold anything; links,
sparse files and devices are no images.
"""

import io
import json
import re
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from common.data.images import SUFFIXES
from common.files import SMALL

_KEY = re.compile(r"(?P<key>(?:.*/)?[^./][^./]*)\.(?P<kind>[^/]+)", re.DOTALL)
_MAX_HEADERS = 2**16  # bytes of the headers of a member
_LABELS = ("cls", "label", "labels", "class", "class_id", "category")  # in a sample's JSON, the first that it has


@dataclass
class Sample:
    key: str
    image: tarfile.TarInfo | None = None
    label: Any = None  # a text, a list of texts, or a whole JSON
    group: str | None = None  # of the JSON: samples of a group are held out together


class _Headers:
    """A tar as `tarfile` reads it, which takes the headers of a member into memory whatever their size."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.seek = file.seek
        self.tell = file.tell
        self.bytes_left = _MAX_HEADERS  # for the headers of the next member

    def read(self, size: int) -> bytes:
        self.bytes_left -= size
        if self.bytes_left < 0:
            raise ValueError(f"its headers have more than {_MAX_HEADERS:,} bytes")
        return self._file.read(size)


def members(file: BinaryIO, end: int) -> Iterator[tarfile.TarInfo]:
    """The members of a tar of `end` bytes, and of tars behind it, as `cat a.tar b.tar` makes them.

    Raises ValueError if it is no tar, cut off or damaged.
    """
    at = 0
    try:
        while at < end or at == 0:
            file.seek(at)
            headers = _Headers(file)
            with tarfile.open(fileobj=cast(BinaryIO, headers), mode="r:", errors="surrogateescape") as tar:
                while member := tar.next():
                    headers.bytes_left = _MAX_HEADERS
                    vars(tar)["members"].clear()  # it would keep all of them
                    at = member.offset
                    if not 0 <= member.size <= end - member.offset_data or tar.offset <= at:
                        raise ValueError(f"it says that it has {member.size} bytes, and the shard ends before")
                    yield member
                    at = tar.offset
            file.seek(at)
            block = file.read(tarfile.BLOCKSIZE)
            if block.strip(b"\0"):  # `tarfile` takes a damaged header for the end
                raise ValueError("no header of a tar: cut off, or damaged")
            while block and not block.strip(b"\0"):
                at += len(block)
                block = file.read(tarfile.BLOCKSIZE)
    except (tarfile.TarError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"the member at byte {at}: {error}") from None


def samples(file: BinaryIO, end: int, image: str, label: str, whole: bool, group: str = "") -> Iterator[Sample]:
    """The samples of a tar of `end` bytes, in its order. `image` names the kind of member that has the image, such as jpg;
    `label` that of the label, or its key in a sample's JSON, `group` another key there. With `whole` all of the JSON is the
    label.

    Raises ValueError as `members`, and for a sample with several images.
    """
    sample = Sample("")
    for member in members(file, end):
        named = _KEY.fullmatch(member.name)
        if not named or not member.isreg() or member.issparse():
            continue
        if named["key"] != sample.key:
            if sample.key:
                yield sample
            sample = Sample(named["key"])
        kind = named["kind"].lower()
        if kind == image if image else f".{kind.rpartition('.')[2]}" in SUFFIXES:
            if sample.image:
                several = f"{sample.image.name} and {member.name} could each be the image"
                raise ValueError(f"{several}; name the kind of file with --image_column, such as jpg")
            sample.image = member
        elif (kind == (label or "cls") and not whole) or (kind == "json" and (group or sample.label is None)):
            if member.size > SMALL:
                raise ValueError(f"{member.name} has {member.size} bytes, the limit is {SMALL}")
            file.seek(member.offset_data)
            content = file.read(member.size)
            try:
                found = json.loads(content) if kind == "json" else content.decode().strip()
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{member.name} is not readable: {type(error).__name__}") from None
            if group and isinstance(found, dict) and found.get(group) is not None:
                sample.group = str(found[group])
            if kind == "json" and sample.label is not None:
                continue
            found = found if whole else _label(found, label, member.name)
            sample.label = sample.label if found is None else found
    if sample.key:
        yield sample


def name_in(header: bytes) -> str:
    """The name of the member whose headers these are; "" if they are none."""
    with suppress(ValueError):
        return next(members(io.BytesIO(header), 2**63)).name
    return ""


def _label(found: Any, named: str, where: str) -> str | list[str] | None:
    """The label that was found in a member; None if a JSON has none. Raises ValueError."""
    if isinstance(found, dict):
        found = found.get(named or next((name for name in _LABELS if name in found), ""))
    if found is None or found == "":
        return None
    items = found if isinstance(found, list) else [found]
    if not all(isinstance(item, str | int) for item in items):
        raise ValueError(f"{where} has the label {str(found)[:40]}, which is no number, text or list of these")
    texts = [item if isinstance(item, str) else str(int(item)) for item in items]
    return texts if isinstance(found, list) else texts[0]
