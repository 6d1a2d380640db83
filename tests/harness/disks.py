"""Disks that are full or read-only, and disks that lose their power."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


def mount(*args: object) -> None:
    """As root, or by the sudo without a password that hosts of public CI have."""
    command = list(map(str, args))
    for argv in (command, ["sudo", "-n"] + command):
        if shutil.which(argv[0]) and subprocess.run(argv, capture_output=True).returncode == 0:
            return
    if "CI" in os.environ:
        pytest.fail(f"{' '.join(command)} is not possible here")
    pytest.skip("needs the right to mount a file system")


@contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of `size` bytes at `folder`."""
    folder.mkdir()
    mount("mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "none", folder)
    try:
        yield folder
    finally:
        mount("umount", "-l", folder)


@contextmanager
def limit_file_size(size: int = 0) -> Iterator[None]:
    """No file that this process writes may grow beyond `size` bytes: as on a full disk, writing
    raises OSError.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@dataclass(frozen=True)
class Ext4:
    """An ext4 in the file `image`, mounted at `folder`: what is in the image has reached the disk,
    and nothing else.

    Mounted so that little reaches it unasked: no commit within five minutes, and no content written
    for the sake of a rename.
    """

    folder: Path
    image: Path
    counters: Path  # of its block device

    def writes(self) -> tuple[str, ...]:
        """Changes with every write to the disk."""
        fields = self.counters.read_text().split()
        return fields[4], fields[6], fields[8]  # writes, sectors written, on their way

    def photograph(self, copy: Path) -> tuple[str, ...]:
        """What a power loss at this moment would leave, into a file."""
        while True:
            before = self.writes()
            subprocess.run(["cp", "--sparse=always", self.image, copy], check=True)
            if before == self.writes() and before[2] == "0":  # else of several moments
                return before


@contextmanager
def ext4(scratch: Path, size: str) -> Iterator[Ext4]:
    """A disk of `size` bytes with an ext4, of which photographs can be taken."""
    make = shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if not make and "CI" in os.environ:
        pytest.fail("no mkfs.ext4 here")
    if not make:
        pytest.skip("needs mkfs.ext4 (e2fsprogs)")
    owner = f"root_owner={os.getuid()}:{os.getgid()}"
    with disk(scratch / "memory", "1g") as memory:  # where what the file system syncs costs nothing
        subprocess.run([make, "-q", "-F", "-E", owner, memory / "image", size], check=True)
        with _mounted(
            memory / "image", scratch / "disk", "loop,noauto_da_alloc,commit=300"
        ) as folder:
            major = os.major(folder.stat().st_dev)
            minor = os.minor(folder.stat().st_dev)
            yield Ext4(folder, memory / "image", Path(f"/sys/dev/block/{major}:{minor}/stat"))


@contextmanager
def after_power_loss(photograph: Path) -> Iterator[Path]:
    """The folder that a photograph of a disk is mounted at, as by the machine's next start."""
    with disk(photograph.with_suffix(".memory"), "1g") as memory:
        subprocess.run(["cp", "--sparse=always", photograph, memory], check=True)
        with _mounted(
            memory / photograph.name, photograph.with_suffix(".mounted"), "loop"
        ) as folder:
            yield folder


@contextmanager
def _mounted(image: Path, folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    mount("mount", "-o", options, image, folder)
    try:
        yield folder
    finally:
        mount("umount", "-l", folder)
