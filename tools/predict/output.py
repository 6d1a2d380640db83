"""Output of predictions: in the order of the images, into a file that appears when it is complete."""

import contextlib
import errno
import fcntl
import os
import sys
from pathlib import Path
from typing import BinaryIO, NoReturn

from common.durable import sync
from common.errors import Refused
from common.process import drop_output
from tools.predict.rows import Format

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK


class Output:
    """Writes texts of images by index, in order. A context manager; only the main process has one.

    A file is written as `.NAME.tmp` beside it and renamed at the end, so that half of it is never
    taken for all. A path that is a pipe or a device is written to directly. Raises `Refused`.
    """

    def __init__(self, path: str, overwrite: bool):
        self._waiting: dict[int, bytes] = {}
        self._next = 0
        self._is_empty = True
        self._path = Path(path).resolve() if path != "-" else None
        self._draft: Path | None = None
        if self._path is None:
            self._file: BinaryIO = sys.stdout.buffer
            return
        if self._path.is_dir():
            raise Refused(f"--output {path}: is a folder; name a file in it")
        if self._path.is_file() and not overwrite:
            raise Refused(f"--output {path}: exists; name another, or add --overwrite")
        try:
            if self._path.exists() and not self._path.is_file():
                self._file = self._path.open("wb")
                return
            self._draft = self._path.with_name(f".{self._path.name}.tmp")
            self._file = os.fdopen(os.open(self._draft, _FLAGS, 0o666), "r+b")
            if not self._draft.is_file():  # in a shared folder, another user's FIFO
                raise FileExistsError(0, f"{self._draft} is no file")
        except OSError as error:
            raise Refused(f"--output {path}: {error.strerror}; name another file") from None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refused(
                f"--output {path}: another process writes it; name another file"
            ) from None
        self._file.truncate()  # what a process that was killed has left

    def __enter__(self) -> "Output":
        return self

    def start(self, form: Format) -> None:
        """Write the head of `form`, whose texts follow."""
        self._form = form
        self._write(form.head)

    def add(self, index: int, text: bytes) -> None:
        """Write the text of an image, after the texts of all images before it."""
        self._waiting[index] = text
        while self._next in self._waiting:
            text = self._waiting.pop(self._next)
            if text:
                if not self._is_empty:
                    self._write(self._form.separator)
                self._write(text)
                self._is_empty = False
            self._next += 1

    def flush(self) -> None:
        """Show readers what has been written."""
        self._write("", flush=True)

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self._write(self._form.tail, flush=True)
        try:
            if self._draft and self._path and kind is None:
                os.fsync(self._file.fileno())
                self._draft.replace(self._path)
                sync(self._path.parent)
        except OSError as error:
            self._fail(error)
        if self._draft:
            self._draft.unlink(missing_ok=True)
        if self._path:
            with contextlib.suppress(OSError):  # of a full disk, which has been said
                self._file.close()

    def _write(self, text: str | bytes, flush: bool = False) -> None:
        try:
            self._file.write(text if isinstance(text, bytes) else text.encode())
            if flush:
                self._file.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        drop_output(self._file)
        if error.errno == errno.EPIPE:  # the reader has seen enough, such as `head`
            sys.exit(0)
        raise Refused(
            f"--output {self._path or 'stdout'}: {error.strerror}; what was written is incomplete"
        ) from None
