"""Malicious annotations and images end in one line, or count as unreadable, in bounded time and memory."""

import re
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from common.detection.batches import EvalDataset
from common.detection.data.sources import Spec, load
from common.detection.transforms import BoxAugmentation
from common.errors import Refused
from tests.harness.annotations import draw_picture
from tests.harness.odd_files import bounded

LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
ONE = '{{"images": [{{"id": {}, "file_name": "1.png"}}], "annotations": [], "categories": []}}'
CASES = {
    "XML, entities": (
        "Annotations/1.xml",
        f'<!DOCTYPE a [<!ENTITY l0 "ha">{LAUGHS}]><a>&l9;</a>',
        "not readable as XML",
    ),
    "XML, UTF-16": (
        "Annotations/1.xml",
        "<!DOCTYPE a [<!ENTITY l '']>".encode("utf-16"),
        "1.xml: not readable as XML",
    ),
    "XML, a size of no image": (
        "Annotations/1.xml",
        "<a><size><width>1e30</width><height>1</height></size></a>",
        "1.xml: a size of 10+[0-9]+ x 1 pix",
    ),
    "JSON, lists in lists": ("train.json", "[" * 10**6, "not readable as JSON"),
    "JSON, lists in an image": ("train.json", ONE.format("[" * 10**5 + "]" * 10**5), "."),
    "JSON, numbers beyond 64 bits": ("train.json", ONE.format("1e400"), "."),
    "YOLO, a class of 1e300": ("labels/1.txt", "1e300 .5 .5 .1 .1", "unknown class 1000"),
    "YOLO, an endless class": ("labels/1.txt", "inf .5 .5 .1 .1", "are no numbers"),
    "YOLO, no text": ("labels/1.txt", b"\xff\xfe\x00", "not readable as text"),
}  # fmt: skip
IMAGES = {
    "Annotations/1.xml": "JPEGImages/1.png",
    "train.json": "1.png",
    "labels/1.txt": "images/1.png",
}


@pytest.fixture(autouse=True)
def _with_a_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VISION_RECIPES_CACHE", str(tmp_path / "index"))


def write(file: Path, content: str | bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("name", CASES)
def test_annotations_are_refused(tmp_path: Path, name: str) -> None:
    file, content, message = CASES[name]
    draw_picture(tmp_path / "data" / IMAGES[file], (8, 8))
    write(tmp_path / "data" / file, content)
    with bounded(), pytest.raises(Refused) as raised:
        load(Spec(str(tmp_path / "data"), seed=0, val_share=0.5))
    assert str(raised.value).isprintable() and re.search(message, str(raised.value))


def write_png(file: Path, width: int, height: int) -> None:
    """The header alone."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = (
        struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    )
    write(file, b"\x89PNG\r\n\x1a\n" + body)


def test_linked_folders_and_images_that_claim_to_be_huge(tmp_path: Path) -> None:
    root = tmp_path / "data"
    for number in range(12):
        draw_picture(root / f"images/{number}/{number}.png", (8, 8))
        write(root / f"labels/{number}/{number}.txt", "0 .5 .5 .5 .5")
        for i in range(12):
            (root / f"images/{number}/to {i}").symlink_to(f"../{i}")
    write_png(root / "images/0/huge.png", 2**31 - 1, 2**31 - 1)
    write_png(root / "images/0/large.png", 100_000, 100_000)
    with bounded():
        train, val = load(Spec(str(root), seed=0, val_share=0.5))
        assert len(train) + len(val) == 14
        assert max(train.sizes.max(), val.sizes.max()) == 640  # what stands in
        assert "2 of 14 images can't be read" in train.notes[0]
        resize = BoxAugmentation(0, (64,), 64)
        transforms = SimpleNamespace(resize=resize, stride=32, fill=(0, 0, 0), normalize=None)
        for part in (train, val):
            scenes = EvalDataset(part, transforms)
            assert scenes.__getitems__(np.arange(len(part))).images.shape[2:] == (64, 64)
