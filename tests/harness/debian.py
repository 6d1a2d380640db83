"""Programs and data of Debian packages, installed for the tests that need them, where somebody has
asked for that.
"""

import fcntl
import os
import shutil
import subprocess

import pytest

SYSTEM_TESTS = "VISION_RECIPES_SYSTEM_TESTS"


def require_package(name: str) -> None:
    """Install a Debian package if it is missing and VISION_RECIPES_SYSTEM_TESTS=1 allows it;
    otherwise the test is skipped.
    """
    if not shutil.which("apt-get"):
        pytest.skip(f"needs the Debian package {name}, and this is not a Debian system")
    query = ["dpkg-query", "--show", "--showformat", "${db:Status-Status}", name]
    if subprocess.run(query, capture_output=True, text=True).stdout == "installed":
        return
    if os.environ.get(SYSTEM_TESTS) != "1" or os.getuid():
        pytest.skip(
            f"needs the Debian package {name}: install it, or run the tests as root with "
            f"{SYSTEM_TESTS}=1"
        )
    with open(__file__, "rb") as lock:  # apt refuses to run twice at the same time, as tests do
        fcntl.flock(lock, fcntl.LOCK_EX)
        for args in (["update"], ["install", "--yes", "--no-install-recommends", name]):
            done = subprocess.run(["apt-get", "--quiet"] + args, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(
                    f"needs the Debian package {name}, which can't be installed: "
                    f"{done.stderr.strip()[-200:]}"
                )
