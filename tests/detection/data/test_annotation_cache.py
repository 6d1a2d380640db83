"""The annotation cache holds what the data hold, or is not used."""

import json
import os
from pathlib import Path

import pytest

from common import files
from common.detection.data import annotation_cache, file_stats
from common.detection.data.sources import Spec, load
from common.errors import Refused
from tests.harness.annotations import (
    build_annotation,
    check_same,
    draw_picture,
    write_coco,
    write_voc,
    write_yolo,
)
from tests.harness.disks import disk


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch) -> Path:
    """The folder of the caches; files that were written just now count as settled."""
    monkeypatch.setenv(files.CACHE, str(tmp_path / "index"))
    monkeypatch.setattr(file_stats, "_CLOCK_RESOLUTION", 0.0)
    return tmp_path / "index"


def read(root: Path, masks: bool = False, seed: int = 0):
    return load(Spec(str(root), seed=seed, val_share=0.25, masks=masks))


def make_older(file: Path) -> int:
    """Make a cache look unused; its inode, which another one would not have."""
    os.utime(file, (0, 0))
    return file.stat().st_ino


def write_outlined(root: Path) -> Path:
    shapes = [
        {"segmentation": [[1, 2, 11, 2, 11, 10], [3.25, 4, 5, 6, 7, 8]]},
        {"segmentation": {"counts": [100, 20, 1080], "size": [30, 40]}},
        {"segmentation": {"counts": "PPYo0", "size": [30, 40]}},
        {},
    ]
    boxes = [
        build_annotation(number, [1, 2, 10, 8], **shape) for number in (4, 25) for shape in shapes
    ]
    return write_coco(write_coco(root, annotations=boxes), "val", annotations=boxes)


EIGHT = {
    "ids": range(1, 9),
    "annotations": [build_annotation(number, [1, 1, 5, number]) for number in range(1, 9)],
}
FOLDERS = {
    "COCO with masks": write_outlined,
    "COCO without a part to evaluate on": lambda root: write_coco(root, **EIGHT),
    "VOC": write_voc,
    "YOLO": write_yolo,
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_later_start_finds_the_same_without_reading_it(tmp_path, cache_folder, kind):
    root = FOLDERS[kind](tmp_path / "data")
    masks = "masks" in kind
    first = read(root, masks)
    (file,) = cache_folder.iterdir()
    assert read(root, seed=1)[0].masks is None  # what is read otherwise has a file of its own
    inode = make_older(file)
    for actual, expected in zip(first, read(root, masks), strict=True):
        check_same(actual, expected)
        assert not masks or actual.build_rles(1) == expected.build_rles(1)
    assert file.stat().st_ino == inode and file.stat().st_mtime > 0, (
        "it was used, not written again"
    )


def spoil(file: Path) -> None:
    """What `rsync --times` may do."""
    before = file.stat()
    file.write_bytes(bytes(before.st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = {
    "a box": (
        write_coco,
        "train.json",
        lambda f: f.write_text(f.read_text().replace("[1, 2, 10, 8]", "[1, 2, 10, 9]")),
    ),
    "an image, its size and time kept": (write_coco, "train/4.jpg", spoil),
    "a box of VOC": (
        write_voc,
        "Annotations/a.xml",
        lambda f: f.write_text(f.read_text().replace(">5<", ">4<")),
    ),
    "a list of VOC": (write_voc, "ImageSets/Main/train.txt", lambda f: f.write_text("d\na\nb\n")),
    "a box of YOLO": (
        write_yolo,
        "labels/train/a.txt",
        lambda f: f.write_text("1 0.5 0.5 0.5 0.4\n1 .25 .5 .5 1\n"),
    ),
    "boxes where there were none": (
        write_yolo,
        "labels/train/b.txt",
        lambda f: f.write_text("0 0.5 0.5 0.5 0.4\n"),
    ),
    "an image of YOLO more": (write_yolo, "images/train/new/e.jpg", draw_picture),
    "a class of YOLO": (
        write_yolo,
        "data.yaml",
        lambda f: f.write_text(f.read_text().replace("cat", "cow")),
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_whatever_changes_is_read_again(tmp_path, monkeypatch, case):
    make, name, change = CHANGES[case]
    root = make(tmp_path / "data")
    if make is write_coco:
        write_coco(root, "val")
    read(root)
    before = (root / name).stat().st_ctime_ns if (root / name).exists() else 0
    change(root / name)
    while (root / name).stat().st_ctime_ns == before:  # clocks of file systems tick slowly
        change(root / name)
    reread = read(root)
    monkeypatch.setenv(files.CACHE, os.devnull)
    for actual, expected in zip(read(root), reread, strict=True):
        check_same(actual, expected)


def test_without_room_for_the_cache_the_data_are_read(tmp_path, monkeypatch):
    root = write_coco(write_coco(tmp_path / "data"), "val")
    monkeypatch.setenv(files.CACHE, "/proc/none")
    assert len(read(root)[0]) == 3
    with disk(tmp_path / "small", "4k") as small:
        monkeypatch.setenv(files.CACHE, str(small))
        assert len(read(root)[0]) == 3 and not list(small.iterdir())


def test_unused_caches_are_removed_after_a_month(tmp_path, cache_folder):
    root = write_coco(write_coco(tmp_path / "data"), "val")
    cache_folder.mkdir()
    for name in (".a.arrow.tmp", "b.arrow"):
        (cache_folder / name).touch()
        os.utime(cache_folder / name, (0, 0))
    first = read(root)
    (file,) = cache_folder.iterdir()
    inode = make_older(file)
    check_same(first[0], read(root)[0])
    assert (file.suffix, file.stat().st_ino) == (
        ".arrow",
        inode,
    ) and file.stat().st_mtime > 0  # it is in use, and stays


def test_what_can_not_be_trusted_is_read_again(tmp_path, cache_folder, monkeypatch):
    """A torn file, a flipped bit, a FIFO, other code, another copy of the data; files as young as a
    coarse clock are not cached. An image that is gone is refused.
    """
    root = write_coco(write_coco(tmp_path / "data"), "val")
    first = read(root)
    (file,) = cache_folder.iterdir()
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(first[0].boxes.tobytes())] ^= 2
    for damaged in (whole[:-5], flipped, b""):
        file.write_bytes(damaged)
        check_same(first[0], read(root)[0])
        assert file.read_bytes() == whole
    file.unlink()
    os.mkfifo(file)
    check_same(first[0], read(root)[0])
    monkeypatch.setattr(annotation_cache, "_CODE_FILES", annotation_cache._CODE_FILES[1:])
    read(root)
    content = json.loads((root / "train.json").read_text())
    (root / "train.json").write_text(json.dumps(content, indent=1))
    read(root)
    assert len(list(cache_folder.iterdir())) == 3
    monkeypatch.setattr(file_stats, "_CLOCK_RESOLUTION", 3600.0)
    read(write_coco(write_coco(tmp_path / "young"), "val"))
    assert len(list(cache_folder.iterdir())) == 3
    (root / "train/4.jpg").unlink()
    with pytest.raises(Refused, match="1 of 3 annotated images are missing"):
        read(root)
