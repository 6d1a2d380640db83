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
from common.detection.data.file_stats import FileStats
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
    """A folder in a known format: named splits that can be read, see `common.data.data_spec.DataSplits`."""

    identity: (
        object  # its `repr` names everything that the annotations depend on, besides the files
    )
    split_texts: dict[str, str]  # name of each split -> how messages call it
    origins: dict[str, Path]  # of each split, the file or folder with its annotations
    # Name, classes of the first split.
    read_split: Callable[[str, tuple[str, ...] | None, FileStats], AnnotatedImages]
    stats: FileStats = field(
        default_factory=FileStats
    )  # of all files that are read or searched for

    def read(self, names: Sequence[str]) -> list[AnnotatedImages]:
        sources: list[AnnotatedImages] = []
        class_names = None
        for name in names:
            sources.append(self.read_split(name, class_names, self.stats))
            class_names = sources[0].classes
        return sources


@contextmanager
def refuse_unreadable(file: str | os.PathLike, kind: str) -> Iterator[None]:
    """Turn errors of a block that reads a file into `Refused`.

    FileNotFoundError and PermissionError remain.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise Refused(f"{file}: can't be read: {error.strerror}") from None
    except (ValueError, RecursionError, ParseError) as error:
        raise Refused(f"{file}: not readable as {kind}: {error}") from None


def read_text_file(file: str | os.PathLike) -> str:
    """The content of a text file. Raises `Refused`."""
    with refuse_unreadable(file, "text"):
        return read_text(file, MEDIUM)


def describe_unknown_format(path: Path) -> str:
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


def format_relative(root: Path, path: Path) -> str:
    """How messages call a split of a folder."""
    return "all images" if path == root else os.path.relpath(path, root)


def is_image_name(name: str) -> bool:
    return has_image_suffix(name) and not is_junk(name)


def has_pairs(images: Path, annotations: Path, suffix: str) -> bool:
    """True if a file in `annotations` has this suffix and the name of an image."""
    stems = {file.stem for file in images.glob("*") if is_image_name(file.name)}
    return any(file.stem in stems for file in annotations.glob(f"*{suffix}"))


def drop_repeated(title: str, names: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The names of a list, each once, in their order; and a note if some are repeated."""
    unique_names = list(dict.fromkeys(names))
    notes = Notes(title, "lines")
    num_repeated = len(names) - len(unique_names)
    if num_repeated:
        repeated, _ = Counter(names).most_common(1)[0]
        notes.change("name an image again, which is read once", repeated, num_repeated)
    return unique_names, notes.format_lines(len(names))
