"""How do tests get a disk that is full or read-only?"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mount(*words: object) -> None:
    """As root, or by the sudo without a password that hosts of public CI have."""
    for prefix in ([], ["sudo", "-n"]):
        done = shutil.which((prefix or ["mount"])[0]) and subprocess.run(
            [*prefix, *map(str, words)], capture_output=True
        )
        if done and done.returncode == 0:
            return
    if "CI" in os.environ:
        pytest.fail(f"{' '.join(map(str, words))} is not possible here")
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
