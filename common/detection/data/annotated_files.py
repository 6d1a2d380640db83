"""Sources of image files with annotations in files of their own."""

import os
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from common.data.source import name_of, path_of
from common.data.splits import draws_of
from common.detection.data.annotated import Annotations, FixedImages
from common.detection.data.box_checks import FoundBoxes, check
from common.detection.data.image_headers import headers_of_files
from common.detection.data.stamps import Stamps
from common.errors import Refused
from common.files import MEDIUM, read_text


@dataclass(frozen=True, eq=False)
class AnnotatedFiles(FixedImages):
    """Image files below a folder, with their boxes. Satisfies `Annotated`."""

    root: str
    paths: pa.LargeBinaryArray  # below root; bytes, since a file name may be invalid text
    byte_counts: np.ndarray  # int64[N] size of each file
    origin: str = ""

    @cached_property
    def fingerprint(self) -> str:
        return self.hash(self.paths, self.byte_counts)

    def name(self, index: int) -> str:
        return name_of(self.root, self.paths, index)

    def content(self, index: int) -> str:
        return path_of(self.root, self.paths, index)

    def part(self, rows: np.ndarray) -> "AnnotatedFiles":
        return replace(
            self, **self.columns_of(rows), paths=self.paths.take(pa.array(rows)), byte_counts=self.byte_counts[rows]
        )

    def draws(self, key: int) -> np.ndarray:
        """uint64[N] random numbers, each a function of its image's path and `key` alone."""
        return draws_of(self.paths, key)


def text_of(file: str | os.PathLike) -> str:
    """The content of a text file. Raises `Refused` if it is no text, FileNotFoundError or PermissionError."""
    try:
        return read_text(file, MEDIUM)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise Refused(f"{file}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"{file}: not readable as text: {error}") from None


def read_files(found: FoundBoxes, root: str, paths: pa.LargeBinaryArray, stamps: Stamps) -> AnnotatedFiles:
    """Check the boxes against the files. Raises `Refused` if files are missing, or as `box_checks.check` does."""
    stamps.take(root, paths)
    headers = headers_of_files(root, paths)
    annotations = check(found, headers)
    columns = {field.name: getattr(annotations, field.name) for field in fields(Annotations)}
    return AnnotatedFiles(**columns, root=root, paths=paths, byte_counts=headers[:, 3])
