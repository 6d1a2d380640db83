"""The annotation cache holds what the data hold or is not used: after changes, damage, kills and concurrent starts."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.detection.data import annotation_cache, coco_files, stamps
from common.detection.data.folders import Folder
from common.detection.data.sources import Spec, load
from common.errors import Refused
from tests.harness.annotations import annotation, check_same, coco, picture, voc, yolo
from tests.harness.disks import disk
from tests.harness.launching import ROOT

KILLED = """
import os, signal, sys
from common.detection.data import sources, stamps
stamps._COARSEST = 0.0
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sources.load(sources.Spec(sys.argv[1], seed=0, val_share=0.25))
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """The folder of the indices; files that were written just now count as settled."""
    monkeypatch.setenv(annotation_cache.PLACE, str(tmp_path / "index"))
    monkeypatch.setattr(stamps, "_COARSEST", 0.0)
    return tmp_path / "index"


def read(root: Path, masks: bool = False, seed: int = 0):
    return load(Spec(str(root), seed=seed, val_share=0.25, masks=masks))


@pytest.fixture
def only_index(monkeypatch):
    """Called, it leaves nothing that could read the data themselves."""

    def leave() -> None:
        monkeypatch.setattr(Folder, "read", lambda *_: pytest.fail("the data were read again"))

    return leave


def changed(file: Path, change) -> None:
    """`change()`, again until the time of `file` has moved: clocks of file systems tick slowly."""
    before = file.stat() if file.exists() else None
    change()
    while file.exists() and before and file.stat().st_ctime_ns == before.st_ctime_ns:
        change()


EIGHT = {"ids": range(1, 9), "annotations": [annotation(number, [1, 1, 5, number]) for number in range(1, 9)]}
FOLDERS = {
    "COCO": lambda root: coco(coco(root), "val"),
    "COCO without a part to evaluate on": lambda root: coco(root, **EIGHT),
    "VOC": voc,
    "YOLO": yolo,
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_later_start_finds_what_an_earlier_one_found_without_reading_it(tmp_path, place, only_index, kind):
    root = FOLDERS[kind](tmp_path / "data")
    first = read(root)
    (file,) = place.iterdir()
    only_index()
    for mine, its in zip(first, read(root), strict=True):
        check_same(mine, its)
    assert [*place.iterdir()] == [file]


def test_outlines_stay_in_the_file_and_are_the_same(tmp_path, place, only_index):
    shapes = [
        {"segmentation": [[1, 2, 11, 2, 11, 10], [3.25, 4, 5, 6, 7, 8]]},
        {"segmentation": {"counts": [100, 20, 1080], "size": [30, 40]}},
        {"segmentation": {"counts": "PPYo0", "size": [30, 40]}},
        {},
    ]
    boxes = [annotation(number, [1, 2, 10, 8], **shape) for number in (4, 25) for shape in shapes]
    coco(coco(tmp_path, annotations=boxes), "val", annotations=boxes)
    first, boxes_only = read(tmp_path, masks=True), read(tmp_path)
    assert len([*place.iterdir()]) == 2 and boxes_only[0].masks is None and first[0].notes
    only_index()
    for mine, its in zip(first, read(tmp_path, masks=True), strict=True):
        check_same(mine, its)
        assert mine.rles(1) == its.rles(1)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(place) in line]
    assert len(mapped) == 1 and mapped[0].split()[1].startswith("r--")  # its pages are shared


def spoil(file: Path) -> None:
    """What `rsync --times` may do."""
    before = file.stat()
    file.write_bytes(bytes(before.st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = {
    "a box": (coco, "train.json", lambda f: f.write_text(f.read_text().replace("[1, 2, 10, 8]", "[1, 2, 10, 9]"))),
    "an image": (coco, "train/4.jpg", lambda f: picture(f, (40, 30), (0, 0, 9, 9))),
    "an image, its size and time kept": (coco, "train/4.jpg", lambda f: spoil(f)),
    "a box of VOC": (voc, "Annotations/a.xml", lambda f: f.write_text(f.read_text().replace(">5<", ">4<"))),
    "a list of VOC": (voc, "ImageSets/Main/train.txt", lambda f: f.write_text("d\na\nb\n")),
    "a part of VOC": (
        voc,
        "ImageSets/Main/trainval.txt",
        lambda f: (f.write_text("a\n"), f.with_name("test.txt").touch()),
    ),
    "a box of YOLO": (yolo, "labels/train/a.txt", lambda f: f.write_text("1 0.5 0.5 0.5 0.4\n1 .25 .5 .5 1\n")),
    "boxes where there were none": (yolo, "labels/train/b.txt", lambda f: f.write_text("0 0.5 0.5 0.5 0.4\n")),
    "an image of YOLO more": (yolo, "images/train/new/e.jpg", picture),
    "a class of YOLO": (yolo, "data.yaml", lambda f: f.write_text(f.read_text().replace("cat", "cow"))),
}


@pytest.mark.parametrize("case", CHANGES)
def test_whatever_changes_is_read_anew(tmp_path, monkeypatch, case):
    make, name, change = CHANGES[case]
    root = make(tmp_path / "data")
    if make is coco:
        coco(root, "val")
    read(root)
    changed(root / name, lambda: change(root / name))
    again = read(root)
    monkeypatch.setenv(annotation_cache.PLACE, os.devnull)
    for mine, its in zip(read(root), again, strict=True):
        check_same(mine, its)


def test_what_is_refused_today_is_refused_with_an_index_too(tmp_path):
    coco(coco(tmp_path), "val")
    read(tmp_path)
    (tmp_path / "train/4.jpg").rename(tmp_path / "4.jpg")
    with pytest.raises(Refused, match="1 of 3 annotated images are missing"):
        read(tmp_path)
    (tmp_path / "4.jpg").rename(tmp_path / "train/4.jpg")
    read(tmp_path)
    picture(tmp_path / "10.jpg", (20, 10))  # a place that comes before the folder
    with pytest.raises(Refused, match="annotated images are missing"):
        read(tmp_path)
    (tmp_path / "10.jpg").unlink()
    with pytest.raises(Refused, match="masks are learnt from"):
        load(Spec(str(voc(tmp_path / "voc")), seed=0, val_share=0.25)) and read(tmp_path / "voc", masks=True)


def test_what_was_held_out_by_another_seed_is_another_index(tmp_path, place):
    coco(tmp_path, ids=range(40), annotations=[annotation(number, [1, 1, 5, 5]) for number in range(40)])
    held = [read(tmp_path, seed=seed)[1].image_ids.tolist() for seed in (0, 1, 0)]
    assert held[0] == held[2] != held[1] and len([*place.iterdir()]) == 2


def test_files_as_young_as_a_coarse_clock_are_not_indexed(tmp_path, place, monkeypatch):
    monkeypatch.setattr(stamps, "_COARSEST", 3600.0)
    read(coco(coco(tmp_path / "data"), "val"))
    assert not place.exists()


@pytest.mark.parametrize("damage", ["a bit", "the end", "all", "behind it"])
def test_a_damaged_index_is_made_anew(tmp_path, place, only_index, damage):
    root = coco(coco(tmp_path / "data"), "val")
    first = read(root)
    (file,) = place.iterdir()
    whole = file.read_bytes()
    middle = len(whole) // 2
    a_bit = whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :]
    damaged = {"a bit": a_bit, "the end": whole[:-5], "all": b"", "behind it": whole + b"x"}
    file.write_bytes(damaged[damage])
    check_same(first[0], read(root)[0])
    assert file.read_bytes() == whole
    only_index()
    check_same(first[0], read(root)[0])


@pytest.mark.parametrize("where", [os.devnull, "/proc/none"])
def test_without_a_place_to_write_the_data_are_read(tmp_path, monkeypatch, where):
    monkeypatch.setenv(annotation_cache.PLACE, where)
    assert len(read(coco(coco(tmp_path), "val"))[0]) == 3


def test_a_full_disk_leaves_no_index_and_does_no_harm(tmp_path, monkeypatch):
    root = coco(coco(tmp_path / "data"), "val")
    with disk(tmp_path / "small", "4k") as small:
        monkeypatch.setenv(annotation_cache.PLACE, str(small))
        assert len(read(root)[0]) == 3 and not [*small.iterdir()]


def test_a_kill_while_the_index_is_written_leaves_none(tmp_path, place, only_index):
    root = coco(coco(tmp_path / "data"), "val")
    done = subprocess.run([sys.executable, "-c", KILLED, root], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    (left,) = place.iterdir()
    assert left.name.startswith("unfinished-")
    os.utime(left, (0, 0))
    first = read(root)
    (file,) = place.iterdir()  # what the dead one left is removed after a month
    assert file.suffix == ".arrow"
    os.utime(file, (0, 0))
    only_index()
    check_same(first[0], read(root)[0])
    assert file.stat().st_mtime > 1e9  # it is in use, and stays


def _start(root: Path, barrier, results) -> None:
    barrier.wait()
    results.put([part.fingerprint for part in read(root)])


def test_processes_that_start_at_once_leave_one_whole_index(tmp_path, place, only_index):
    root = coco(coco(tmp_path / "data"), "val")
    forked = multiprocessing.get_context("fork")
    barrier, results = forked.Barrier(6), forked.Queue()
    processes = [forked.Process(target=_start, args=(root, barrier, results)) for _ in range(6)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    only_index()
    assert found == [[part.fingerprint for part in read(root)]] * 6 and len([*place.iterdir()]) == 1


def test_other_code_or_another_copy_of_the_data_has_an_index_of_its_own(tmp_path, place, monkeypatch):
    root = coco(coco(tmp_path / "data"), "val")
    read(root)
    copy = tmp_path / "other.py"
    copy.write_text("# another version")
    code = [copy if file == Path(coco_files.__file__) else file for file in annotation_cache._CODE]
    monkeypatch.setattr(annotation_cache, "_CODE", code)
    read(root)
    assert len([*place.iterdir()]) == 2
    changed(
        root / "train.json",
        lambda: (root / "train.json").write_text(json.dumps(json.loads((root / "train.json").read_text()))),
    )
    read(root)
    assert len([*place.iterdir()]) == 3


def test_the_index_lies_where_caches_lie(monkeypatch, tmp_path):
    monkeypatch.delenv(annotation_cache.PLACE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert annotation_cache._folder() == tmp_path / "vision-recipes"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # counts as not set, says its standard
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert annotation_cache._folder() == tmp_path / "home/.cache/vision-recipes"
    monkeypatch.setenv(annotation_cache.PLACE, "~/here")
    assert annotation_cache._folder() == tmp_path / "home/here"


def test_stamps_are_the_same_several_at_once(tmp_path, monkeypatch):
    files = [picture(tmp_path / f"{number}.png") for number in range(300)]
    one, several = stamps.Stamps(), stamps.Stamps()
    one.take_files([*files, tmp_path / "none"])
    monkeypatch.setattr(stamps, "_FAR", 0.0)
    several.take_files([*files, tmp_path / "none"])
    assert np.array_equal(one.groups[0][2], several.groups[0][2]) and one.hold() and several.hold()
    assert one.groups[0][2][-1].tolist() == [0, 0, 0] and (one.groups[0][2][:-1] > 0).all()
    (tmp_path / "none").write_text("")
    assert not one.hold() and not several.hold()
