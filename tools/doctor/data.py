"""Data: whether all machines see the run folder, and how fast its disk is."""

import contextlib
import os
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from common.errors import Refused
from tools.doctor.finding import GIB, Finding, judged
from tools.doctor.rehearsal import config_of
from tools.doctor.world import World

LIMIT_S = 30.0  # of the check
WRITTEN = 16 * 2**20  # bytes
SLOW_WRITE = 20e6  # bytes per second
SLOW_SYNC_S = 0.2
ASIDE_S = 5.0  # how long a network file system may take to show a new file


def run_folder(world: World) -> list[Finding]:
    """The row of the run folder, or of where it will be made: one machine writes, the others look. Raises `Refused`."""
    folder = Path(config_of(world).output_dir)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    token, written = there / f".doctor-{os.getpid()}-{time.time_ns()}", dict[str, Any]()
    try:
        if world.is_main:
            written = _written(token)
        path = Path(world.exchange(str(token))[0])
        is_blind = world.is_local_main and not _is_seen(path)
        blind = [world.name(rank) for rank, one in enumerate(world.exchange(is_blind)) if one]
    except OSError as error:
        raise Refused(f"{folder}: {error.strerror}: name an --output_dir that you may write to") from None
    finally:
        if world.is_main:
            with contextlib.suppress(OSError):
                token.unlink(missing_ok=True)
    return [judged_run_folder(folder, written, blind, world.name(0))] if world.is_main else []


def _written(token: Path) -> dict:
    """How fast the disk writes; leaves the file `token`."""
    block, times = os.urandom(2**20), []
    with token.open("wb", buffering=0) as file:
        for blocks in [WRITTEN // len(block), *[0] * 5]:
            began = time.perf_counter()
            for _ in range(blocks):
                file.write(block)
            file.write(b"token")
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
        file.truncate(8)
    free = psutil.disk_usage(str(token)).free
    rate, sync = WRITTEN / times[0], statistics.median(times[1:])
    return {"bytes_per_s": rate, "sync_s": sync, "free": free}


def _is_seen(path: Path) -> bool:
    """True if `path` is there within some seconds; a network file system may show it late."""
    until = time.monotonic() + ASIDE_S
    while time.monotonic() < until:
        if path.parent.is_dir() and path.name in os.listdir(path.parent):  # listing asks the server
            return True
        time.sleep(0.1)
    return False


def judged_run_folder(folder: Path, written: dict, blind: list[str], main: str) -> Finding:
    """The row: how the rank `main` has written it, and the machines that do not see that."""
    is_slow = written["bytes_per_s"] < SLOW_WRITE or written["sync_s"] > SLOW_SYNC_S
    elsewhere = "name an --output_dir that all machines see, or copy its checkpoints before a start elsewhere"
    return judged(
        "data: run folder",
        f"{folder}: {written['bytes_per_s'] / 1e6:,.0f} MB/s written, {1000 * written['sync_s']:.2g} "
        f"ms per fsync, {written['free'] / GIB:,.1f} GiB free",
        (blind != [], "warning", f"{', '.join(blind)}: the files of {main} are not there; {elsewhere}"),
        (is_slow, "warning", "slow: checkpoints wait for it; take a faster disk, or a larger --checkpoint_every"),
    )
