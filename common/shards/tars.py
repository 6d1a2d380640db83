"""Samples in a tar as WebDataset writes them: where the image lies, and the label. Only headers and
labels are read.

Members whose names are alike up to the first dot are a sample. Nothing is extracted, so a name may
hold anything; links, sparse files and devices are no images.
"""

import io
import json
import re
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, cast

from common.data.images import SUFFIXES
from common.files import SMALL

_NAME = re.compile(r"(?P<key>(?:.*/)?[^./][^./]*)\.(?P<kind>[^/]+)", re.DOTALL)
_MAX_HEADERS = 2**16  # bytes of the headers of a member
# In a sample's JSON, the first that it has.
_LABELS = ("cls", "label", "labels", "class", "class_id", "category")


class TarFormat(NamedTuple):
    """Which members of a sample are read, and which keys of its JSON."""

    image: str  # kind of the member that has the image, such as jpg; "" for any kind of image
    # Kind of the member that has the label, or its key in the JSON; "" for the usual ones.
    label: str
    group: str = ""  # key in the JSON: samples with the same value are held out together
    has_json_labels: bool = False  # True if the label is all of the JSON

    @property
    def label_kind(self) -> str:
        """The extension of the files that hold labels."""
        return self.label if self.label else "cls"

    def is_image(self, kind: str) -> bool:
        if self.image:
            return kind == self.image
        return f".{kind.rpartition('.')[2]}" in SUFFIXES

    def is_label(self, kind: str) -> bool:
        return not self.has_json_labels and kind == self.label_kind


@dataclass
class Sample:
    key: str
    image: tarfile.TarInfo | None = None
    label: Any = None  # a text, a list of texts, or a whole JSON
    group: str | None = None


class _LimitedHeaders:
    """A tar for `tarfile`, which would take the headers of a member into memory whatever their size."""

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


def read_samples(file: BinaryIO, end: int, tar_format: TarFormat) -> Iterator[Sample]:
    """The samples of a tar of `end` bytes, in its order.

    Raises ValueError as `read_members`, and for a sample with several images or a label that can't be read.
    """
    sample = Sample("")
    for member in read_members(file, end):
        name = _NAME.fullmatch(member.name)
        if not name or not member.isreg() or member.issparse():
            continue
        if name["key"] != sample.key:
            if sample.key:
                yield sample
            sample = Sample(name["key"])
        kind = name["kind"].lower()
        if tar_format.is_image(kind):
            if sample.image:
                problem = f"{sample.image.name} and {member.name} could each be the image"
                raise ValueError(
                    f"{problem}; name the kind of file with --image_column, such as jpg"
                )
            sample.image = member
        elif kind == "json":
            if sample.label is None or tar_format.group or tar_format.is_label(kind):
                _add_json(sample, tar_format, member.name, _read_content(file, member, kind))
        elif tar_format.is_label(kind):
            _add_label(sample, tar_format, member.name, _read_content(file, member, kind))
    if sample.key:
        yield sample


def read_members(file: BinaryIO, end: int) -> Iterator[tarfile.TarInfo]:
    """The members of a tar of `end` bytes, and of tars behind it, as `cat a.tar b.tar` makes them.

    Raises ValueError if it is no tar, cut off or damaged.
    """
    position = 0
    try:
        while position < end or position == 0:
            file.seek(position)
            headers = _LimitedHeaders(file)
            with tarfile.open(
                fileobj=cast(BinaryIO, headers), mode="r:", errors="surrogateescape"
            ) as tar:
                while member := tar.next():
                    headers.bytes_left = _MAX_HEADERS
                    vars(tar)["members"].clear()  # it would keep all of them
                    position = member.offset
                    if not 0 <= member.size <= end - member.offset_data or tar.offset <= position:
                        raise ValueError(
                            f"it says that it has {member.size} bytes, and the shard ends before"
                        )
                    yield member
                    position = tar.offset
            start = position
            position = _skip_zeros(file, start)
            if position == start:  # the file ends before `end`
                return
    except (tarfile.TarError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"the member at byte {position}: {error}") from None


def _skip_zeros(file: BinaryIO, position: int) -> int:
    """The position behind the empty blocks that end a tar. Raises ValueError if there is another
    block first.
    """
    file.seek(position)
    block = file.read(tarfile.BLOCKSIZE)
    if block.strip(b"\0"):  # `tarfile` takes a damaged header for the end
        raise ValueError("no header of a tar: cut off, or damaged")
    while block and not block.strip(b"\0"):
        position += len(block)
        block = file.read(tarfile.BLOCKSIZE)
    return position


def read_name(header: bytes) -> str:
    """The name of the member whose headers these are; "" if they are none."""
    with suppress(ValueError):
        for member in read_members(io.BytesIO(header), 2**63):
            return member.name
    return ""


# ---- labels


def _read_content(file: BinaryIO, member: tarfile.TarInfo, kind: str) -> Any:
    """The JSON of a member, or its text. Raises ValueError."""
    if member.size > SMALL:
        raise ValueError(f"{member.name} has {member.size} bytes, the limit is {SMALL}")
    file.seek(member.offset_data)
    content = file.read(member.size)
    try:
        return json.loads(content) if kind == "json" else content.decode().strip()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{member.name} is not readable: {type(error).__name__}") from None


def _add_json(sample: Sample, tar_format: TarFormat, name: str, content: Any) -> None:
    """Set the group of a sample from its JSON, and its label unless it has one. Raises ValueError."""
    if tar_format.group and isinstance(content, dict) and content.get(tar_format.group) is not None:
        sample.group = str(content[tar_format.group])
    if sample.label is None:
        _add_label(sample, tar_format, name, content)


def _add_label(sample: Sample, tar_format: TarFormat, name: str, content: Any) -> None:
    """Set the label of a sample from the content of a member, if there is one in it. Raises ValueError."""
    label = content if tar_format.has_json_labels else _find_label(content, tar_format.label, name)
    if label is not None:
        sample.label = label


def _find_label(content: Any, key: str, name: str) -> str | list[str] | None:
    """The label in the content of the member `name`; None if a JSON has none. Raises ValueError."""
    if isinstance(content, dict):
        if not key:
            key = next((label for label in _LABELS if label in content), "")
        content = content.get(key)
    if content is None or content == "":
        return None
    items = content if isinstance(content, list) else [content]
    if not all(isinstance(item, str | int) for item in items):
        raise ValueError(
            f"{name} has the label {str(content)[:40]}, which is no number, text or list of these"
        )
    texts = [item if isinstance(item, str) else str(int(item)) for item in items]
    return texts if isinstance(content, list) else texts[0]
