"""Folders with annotations in files: code that all formats share."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree.ElementTree import ParseError

from common.data.images import has_image_suffix
from common.data.notes import Notes
from common.detection.data.annotated import AnnotatedImages
from common.detection.data.stamps import Stamps
from common.errors import Refused
from common.files import MEDIUM, is_junk, read_text

# What files and folders of other formats are called, in the data or one folder below.
_OTHER_FORMATS = {
    "ann": "Supervisely",
    "label_2": "KITTI",
    "labelTxt": "DOTA",
    "annotations.xml": "CVAT for images",
    "*annotations*.csv": "Open Images, or of another CSV file of boxes",
    "*createml.json": "CreateML",
    "SegmentationClass": "masks in Pascal VOC",
    "*.tfrecord*": "TFRecord",
    "*.json": "LabelMe, or of COCO with names that do not say train or val",
}


@dataclass
class Folder:
    """A folder in a known format: named parts that can be read, see `common.data.data_spec.DataSplits`."""

    what: object  # its `repr` names everything that the annotations depend on, besides the files
    labels: dict[str, str]  # name of each part -> how messages call it
    origins: dict[str, Path]  # of each part, the file or folder with its annotations
    # Name, classes of the first part.
    read_part: Callable[[str, tuple[str, ...] | None, Stamps], AnnotatedImages]
    stamps: Stamps = field(default_factory=Stamps)  # of all files that are looked at

    def read(self, names: Sequence[str]) -> list[AnnotatedImages]:
        sources: list[AnnotatedImages] = []
        for name in names:
            sources.append(
                self.read_part(name, sources[0].classes if sources else None, self.stamps)
            )
        return sources


@contextmanager
def refusing(file: str | os.PathLike, kind: str) -> Iterator[None]:
    """A block that reads a file, whose errors become `Refused`; not FileNotFoundError and PermissionError."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise Refused(f"{file}: can't be read: {error.strerror}") from None
    except (ValueError, RecursionError, ParseError) as error:
        raise Refused(f"{file}: not readable as {kind}: {error}") from None


def text_of(file: str | os.PathLike) -> str:
    """The content of a text file."""
    with refusing(file, "text"):
        return read_text(file, MEDIUM)


def describe_unread(path: Path) -> str:
    """What is at a path at which no format was recognised."""
    if not path.exists():
        return "nothing is there"
    for pattern, name in _OTHER_FORMATS.items():
        if any(path.glob(pattern)) or any(path.glob(f"*/{pattern}")):
            advice = "convert it, as FiftyOne or Datumaro can"
            return f"in the format of {name}, which is not read: {advice}"
    names = sorted(file.name for file in path.glob("*"))
    contents = f" ({', '.join(names[:5])})" if names else ""
    return f"a folder or file{contents} of a kind that is not known"


def name_below(root: Path, path: Path) -> str:
    """How messages call a part of a folder."""
    return "all images" if path == root else os.path.relpath(path, root)


def is_image(name: str) -> bool:
    return has_image_suffix(name) and not is_junk(name)


def has_pairs(images: Path, annotations: Path, suffix: str) -> bool:
    """True if a file in `annotations` has this suffix and the name of an image."""
    stems = {file.stem for file in images.glob("*") if is_image(file.name)}
    return any(file.stem in stems for file in annotations.glob(f"*{suffix}"))


def drop_repeated(title: str, listed: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The names of a list, each once, in their order; and a note if some are repeated."""
    names = list(dict.fromkeys(listed))
    lines = Notes(title, "lines")
    if len(names) < len(listed):
        repeated, _ = Counter(listed).most_common(1)[0]
        lines.change("name an image again, which is read once", repeated, len(listed) - len(names))
    return names, lines.format_lines(len(listed))
