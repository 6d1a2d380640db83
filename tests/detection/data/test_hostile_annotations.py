"""Malicious annotations and images end in one line, or count as unreadable, in bounded time and memory."""

import json
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.detection.batches import EvaluationScenes
from common.detection.data.sources import Spec, load
from common.detection.transforms import BoxAugmentation
from common.errors import Refused
from tests.harness.annotations import picture
from tests.harness.odd_files import bounded

OBJECT = "<object><name>{}</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>4</ymax></bndbox></object>"
LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
XML = {
    "entities": (f'<!DOCTYPE a [<!ENTITY l0 "ha">{LAUGHS}]><a>{OBJECT.format("&l9;")}</a>', "1.xml: defines entities"),
    "a file": ('<!DOCTYPE a [<!ENTITY x SYSTEM "/etc/passwd">]><a>&x;</a>', "1.xml: defines entities"),
    "UTF-16": (f'<!DOCTYPE a [<!ENTITY l0 "ha">{LAUGHS}]><a>&l9;</a>'.encode("utf-16"), "1.xml: not readable as XML"),
    "an endless size": ("<a><size><width>1e999</width><height>1</height></size></a>", "1.xml: a size or corner is no number"),
    "a size of no image": ("<a><size><width>1e30</width><height>1</height></size></a>", "1.xml: a size of 10+[0-9]+ x 1 pix"),
    "nothing": ("", "1.xml: not readable as XML"),
}  # fmt: skip
JSON = {
    "lists in lists": ("[" * 10**6, "not readable as JSON"),
    "lists in an image": (
        '{"images": [{"id": ' + "[" * 10**5 + "]" * 10**5 + '}], "annotations": [], "categories": []}',
        ".",
    ),
    "numbers beyond 64 bits": ('{"images": [{"id": 1e400, "file_name": "1.png"}], "annotations": [], "categories": []}', "."),
    "a name with a NUL": (
        json.dumps(
            {
                "images": [{"id": 1, "file_name": "1.png"}, {"id": 2, "file_name": "a\0b"}],
                "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 1, 2, 2]}],
                "categories": [{"id": 1, "name": "a"}],
            }
        ),
        "are missing or may not be read",
    ),
}  # fmt: skip
LABELS = {
    "a class beyond all": ("99999999999999999999 .5 .5 .1 .1", "unknown class 100000000000000000000"),
    "a class of 1e300": ("1e300 .5 .5 .1 .1", "unknown class 1000"),
    "an endless class": ("inf .5 .5 .1 .1", "are no numbers"),
    "no text": (b"\xff\xfe\x00", "not readable as text"),
}


def refusal(root: Path, monkeypatch) -> str:
    monkeypatch.setenv("VISION_RECIPES_CACHE", str(root.parent / "index"))
    with bounded(), pytest.raises(Refused) as raised:
        load(Spec(str(root), seed=0, val_share=0.5))
    assert str(raised.value).isprintable()
    return str(raised.value)


def write(file: Path, content: str | bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


CASES = {
    **{f"XML: {name}": ("Annotations/1.xml", "JPEGImages/1.png", *case) for name, case in XML.items()},
    **{f"JSON: {name}": ("train.json", "1.png", *case) for name, case in JSON.items()},
    **{f"YOLO: {name}": ("labels/1.txt", "images/1.png", *case) for name, case in LABELS.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_annotations(tmp_path: Path, monkeypatch, name: str) -> None:
    file, image, content, told = CASES[name]
    picture(tmp_path / "data" / image, (8, 8))
    write(tmp_path / "data" / file, content)
    assert re.search(told, refusal(tmp_path / "data", monkeypatch))


def png(file: Path, width: int, height: int) -> None:
    """The header alone."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    write(file, b"\x89PNG\r\n\x1a\n" + body)


def test_folders_that_link_to_each_other_and_images_that_claim_to_be_huge(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("VISION_RECIPES_CACHE", str(tmp_path / "index"))
    root = tmp_path / "data"
    for number in range(12):
        picture(root / f"images/{number}/{number}.png", (8, 8))
        write(root / f"labels/{number}/{number}.txt", "0 .5 .5 .5 .5")
        for other in range(12):
            (root / f"images/{number}/to {other}").symlink_to(f"../{other}")
    png(root / "images/0/huge.png", 2**31 - 1, 2**31 - 1)
    png(root / "images/0/large.png", 100_000, 100_000)
    with bounded():
        train, val = load(Spec(str(root), seed=0, val_share=0.5))
        assert len(train) + len(val) == 14
        assert max(train.sizes.max(), val.sizes.max()) == 640  # what stands in
        assert "2 of 14 images can't be read" in train.notes[0]
        for part in (train, val):
            scenes = EvaluationScenes(part, BoxAugmentation(0, (64,), 64), 32, (0, 0, 0))
            assert scenes.__getitems__(np.arange(len(part))).images.shape[2:] == (64, 64)


def test_a_stripe_is_shown_no_larger_than_the_long_side(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("VISION_RECIPES_CACHE", str(tmp_path / "index"))
    for number in range(4):
        Image.new("1", (200_000, 1)).save(tmp_path / f"{number}.png")
    images = [{"id": n, "file_name": f"{n}.png"} for n in range(4)]
    boxes = [{"image_id": n, "category_id": 1, "bbox": [1, 0, 10**5, 1]} for n in range(4)]
    write(
        tmp_path / "train.json",
        json.dumps({"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "a"}]}),
    )
    with bounded():
        train, val = load(Spec(str(tmp_path), seed=0, val_share=0.5))
        scenes = EvaluationScenes(val, BoxAugmentation(0, (64,), 96), 32, (0, 0, 0))
        batch = scenes.__getitems__(np.arange(2))
        assert batch.images.shape[2:] == (32, 96) and not batch.broken
        varied = BoxAugmentation(0, (64,), 96, (0.1, 2), 1, 1, 1, 1, 1, 1)
        for position in range(4):
            samples = [train.sample(position % 2, position)] * (1 + len(varied.partners(position)))
            assert varied(samples, position, (0, 0, 0)).image.shape[1:].numel() <= 96 * 96
