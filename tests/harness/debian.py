"""Programs and data of Debian packages, installed for the tests that need them."""

import fcntl
import os
import shutil
import subprocess

import pytest


def require_package(name: str) -> None:
    """Install a Debian package if it is missing. The test is skipped where that can't be done."""
    if not shutil.which("apt-get"):
        pytest.skip(f"needs the Debian package {name}, and this is not a Debian system")
    query = ["dpkg-query", "--show", "--showformat", "${db:Status-Status}", name]
    if subprocess.run(query, capture_output=True, text=True).stdout == "installed":
        return
    if os.getuid():
        pytest.skip(f"needs the Debian package {name}: apt-get install {name}")
    with open(__file__, "rb") as lock:  # apt refuses to run twice at the same time, as tests do
        fcntl.flock(lock, fcntl.LOCK_EX)
        for words in (["update"], ["install", "--yes", "--no-install-recommends", name]):
            done = subprocess.run(["apt-get", "--quiet", *words], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"needs the Debian package {name}, which can't be installed: {done.stderr.strip()[-200:]}")
