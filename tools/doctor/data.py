"""Data: whether all machines see the run folder and the same data, and how fast the run folder's disk is."""

import contextlib
import hashlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from common.files import walk
from tools.doctor.finding import Finding
from tools.doctor.trial import config_of
from tools.doctor.world import World

LIMIT_S = 60.0
MOST_FILES, LISTED_S = 200_000, 5.0  # what is compared of a data folder
WRITTEN = 16 * 2**20  # bytes
SLOW_WRITE = 20e6  # bytes per second
SLOW_SYNC_S = 0.2
IN_MEMORY = ("tmpfs", "ramfs")
ASIDE_S = 5.0  # how long a network file system may take to show a new file
_GIB = 2**30


def folders(world: World) -> list[Finding]:
    """Rows for the run folder and the data folder of the recipe, as all machines see them; on rank 0."""
    config = config_of(world)
    data = getattr(config, "data", "")
    return [*run_folder(world, Path(config.output_dir)), *(data_folder(world, data) if data else [])]


# --- the run folder


def run_folder(world: World, folder: Path) -> list[Finding]:
    """One machine writes there, and the others look."""
    token = folder / f".doctor-{os.getpid()}-{time.time_ns()}"
    made = [path for path in [folder, *folder.parents] if not path.exists()] if world.is_main else []
    mine: dict[str, Any] = {}
    try:
        if world.is_main:
            mine = attempt(lambda: written(folder, token))
        path = world.exchange(str(token))[0]
        if world.is_local_main and not world.is_main:
            mine = {"seen": await_file(Path(path), ASIDE_S), "kind": kind_of(folder)}
        found = [(world.name(rank), one) for rank, one in enumerate(world.exchange(mine)) if one]
    finally:
        if world.is_main:
            with contextlib.suppress(OSError):
                token.unlink(missing_ok=True)
                for path in made:  # deepest first
                    path.rmdir()
    return [judged_run_folder(folder, found)] if world.is_main else []


def written(folder: Path, token: Path) -> dict:
    """How fast the disk of `folder` writes; leaves the file `token`."""
    folder.mkdir(parents=True, exist_ok=True)
    block, began = os.urandom(2**20), time.perf_counter()
    with token.open("wb", buffering=0) as file:
        for _ in range(WRITTEN // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        rate = WRITTEN / (time.perf_counter() - began)
        syncs = []
        for _ in range(5):
            file.write(b"token")
            began = time.perf_counter()
            os.fsync(file.fileno())
            syncs.append(time.perf_counter() - began)
        file.truncate(8)
        os.fsync(file.fileno())
    free = psutil.disk_usage(str(folder)).free
    return {"kind": kind_of(folder), "bytes_per_s": rate, "sync_s": statistics.median(syncs), "free": free}


def await_file(path: Path, limit: float) -> bool:
    """Whether `path` is there within `limit` seconds; a network file system may show it late."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        if path.parent.is_dir() and path.name in os.listdir(path.parent):  # listing asks the server
            return True
        time.sleep(0.1)
    return False


def judged_run_folder(folder: Path, found: Sequence[tuple[str, dict]]) -> Finding:
    """The row of the run folder: what each machine has found, the main one first."""
    check, (_, first) = "data: run folder", found[0]
    if "error" in first:
        return Finding(check, "failed", f"{folder}: {first['error']}", "name an --output_dir that you may write to")
    text = (
        f"{folder} ({first['kind']}): {first['bytes_per_s'] / 1e6:,.0f} MB/s written, {1000 * first['sync_s']:.2g} ms per "
        f"fsync, {first['free'] / _GIB:,.1f} GiB free"
    )
    figures = {name: first[name] for name in ("kind", "bytes_per_s", "sync_s", "free")}
    if blind := [name for name, one in found[1:] if not one["seen"]]:
        way_out = (
            f"{', '.join(blind)}: the files of {found[0][0]} are not there; name an --output_dir that all machines see, or "
            "copy its checkpoints before a start elsewhere"
        )
        return Finding(check, "warning", text, way_out, figures=figures)
    text += f", seen by {len(found)} machines" if len(found) > 1 else ""
    if first["kind"] in IN_MEMORY:
        return Finding(check, "warning", text, "it lies in memory, and is lost with the machine", figures=figures)
    if first["bytes_per_s"] < SLOW_WRITE or first["sync_s"] > SLOW_SYNC_S:
        way_out = "slow: checkpoints wait for it; take a faster disk, or a larger --checkpoint_every"
        return Finding(check, "warning", text, way_out, figures=figures)
    return Finding(check, "ok", text, figures=figures)


# --- the data


def data_folder(world: World, data: str) -> list[Finding]:
    """Compare the folder on all machines."""
    path = Path(data)
    mine: dict[str, Any] = {}
    if world.is_local_main:
        mine = attempt(lambda: listed(path)) if path.exists() else {"missing": True}
    found = [(world.name(rank), one) for rank, one in enumerate(world.exchange(mine)) if one]
    if all("missing" in one for _, one in found) and not path.is_absolute():
        note = Finding("data: files", "ok", f"{data}: no folder, the recipe finds it by its name")
        return [note] if world.is_main else []
    return [judged_files(path, found)] if world.is_main else []


def listed(path: Path) -> dict:
    """The files of a data folder: how many, and a digest of their names and of some of their sizes."""
    digest, names, until, whole = hashlib.blake2b(digest_size=8), 0, time.monotonic() + LISTED_S, True
    for entry in files_of(path):
        digest.update(os.fsencode(os.path.relpath(entry, path)))
        if names % 64 == 0:
            digest.update(str(os.stat(entry).st_size).encode())
        names += 1
        if names == MOST_FILES or time.monotonic() > until:
            whole = names == MOST_FILES
            break
    return {"files": names, "digest": digest.hexdigest(), "whole": whole, "kind": kind_of(path)}


def files_of(path: Path):
    """Paths of the files below `path`, in an order that is the same on all machines; a file itself."""
    if path.is_file():
        yield str(path)
        return
    for _, entries in walk(path):
        yield from (entry.path for entry in entries if entry.is_file())


def judged_files(path: Path, found: Sequence[tuple[str, dict]]) -> Finding:
    """The row of the data folder."""
    check = "data: files"
    if bad := [f"{name}: {one.get('error', 'nothing is there')}" for name, one in found if "digest" not in one]:
        return Finding(check, "failed", f"{path}: {', '.join(bad)}", "put the data there, or name them by --data")
    first = found[0][1]
    figures = {name: {key: one[key] for key in ("files", "digest", "kind")} for name, one in found}
    more = "" if all(one["whole"] for _, one in found) else f" listed in {LISTED_S:.0f} s"
    text = f"{path} ({first['kind']}): {first['files']:,} files{more}"
    if more:
        return Finding(check, "ok", f"{text}, not compared" if len(found) > 1 else text, figures=figures)
    if len({one["digest"] for _, one in found}) > 1:
        counts = ", ".join(f"{one['files']:,} files on {name}" for name, one in found)
        way_out = "names or sizes differ: copy the data again (rsync), or name a folder that all machines see"
        return Finding(check, "failed", f"{path}: {counts}", way_out, figures=figures)
    text += f", the same on {len(found)} machines" if len(found) > 1 else ""
    return Finding(check, "ok", text, figures=figures)


def attempt(function: Callable[[], dict]) -> dict:
    """What `function` returns, or the error of a disk."""
    try:
        return function()
    except OSError as error:
        return {"error": error.strerror or str(error)}


def kind_of(path: Path) -> str:
    """The kind of file system that `path` lies on, or will: ext4, nfs4, tmpfs, ..."""
    real = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"
