"""Masks are pycocotools' and turn with their image; outlines that can't be drawn are counted."""

import os
import pickle

import numpy as np
import pytest
from PIL import ExifTags, Image

from common.data.images import BrokenImage, open_rgb
from common.detection.data import coco_files
from common.detection.data.masks import decode_masks, encode_masks
from common.detection.data.sources import Spec, load
from common.errors import Refused
from tests.harness.annotations import build_annotation, draw_picture, write_coco, write_yolo

WIDTH = 40
HEIGHT = 30
IMAGES = [{"id": 5, "file_name": "5.jpg", "width": WIDTH, "height": HEIGHT}]


def write_masks(root, segmentations, orientation=1, boxes=None):
    """A data set of one image with a box for each segmentation, to train and to evaluate on."""
    boxes = boxes or [[2, 3, 30, 20]] * len(segmentations)
    objects = [
        build_annotation(5, box, 1, iscrowd=int(isinstance(shape, dict)))
        | ({} if shape is None else {"segmentation": shape})
        for shape, box in zip(segmentations, boxes, strict=True)
    ]
    for part in ("train", "val"):
        draw_picture(root / part / "5.jpg", (WIDTH, HEIGHT), orientation=orientation)
        named = [{"id": 1, "name": 'a "counts": "b'}]
        write_coco(
            root, part, (), objects, named, change=lambda content: content.update(images=IMAGES)
        )
    return load(Spec(str(root), seed=0, val_share=0.2, masks=True))[0]


def draw_blob(seed=0):
    """uint8[HEIGHT, WIDTH] without any symmetry."""
    return (np.random.default_rng(seed).random((HEIGHT, WIDTH)) < 0.3).astype(np.uint8)


def encode_runs(mask):
    flat = mask.T.flatten()
    edges = np.flatnonzero(np.diff(flat)) + 1
    lengths = np.diff([0, *edges, flat.size]).tolist()
    return [0, *lengths] if flat[0] else lengths


POLYGONS = [[3, 4, 20.5, 5, 18, 22.5], [25, 5, 38, 5, 38, 20, 25, 20.25]]


def test_outlines_become_the_masks_of_pycocotools(tmp_path, monkeypatch):
    from pycocotools import mask as pycoco

    monkeypatch.setattr(
        coco_files, "_read_slowly", lambda *_: pytest.fail("Python's reader: minutes for COCO")
    )
    packed = pycoco.encode(np.asfortranarray(draw_blob()))
    listed = {"counts": encode_runs(draw_blob(1)), "size": [HEIGHT, WIDTH]}
    source = write_masks(
        tmp_path, [POLYGONS, listed, packed | {"counts": packed["counts"].decode()}, POLYGONS[:1]]
    )
    masks = source.load_sample(0, 0).masks
    for mask, polygons in ((masks[0], POLYGONS), (masks[3], POLYGONS[:1])):
        assert (
            mask == pycoco.decode(pycoco.merge(pycoco.frPyObjects(polygons, HEIGHT, WIDTH)))
        ).all()
    assert (
        (masks[1] == draw_blob(1)).all()
        and (masks[2] == draw_blob()).all()
        and masks.dtype == np.uint8
    )
    assert [rle["counts"] for rle in source.build_rles(0)] == [
        rle["counts"] for rle in encode_masks(masks)
    ]
    assert len(source.notes) == 1 and "2 of 4 boxes are crowds" in source.notes[0]
    assert source.classes == ('a "counts": "b',)
    # Nobody has asked.
    assert load(Spec(str(tmp_path), seed=0, val_share=0.2))[0].load_sample(0, 0).masks is None


@pytest.mark.parametrize("orientation", range(1, 9))
def test_masks_turn_with_their_image(tmp_path, orientation):
    source = write_masks(
        tmp_path, [{"counts": encode_runs(draw_blob()), "size": [HEIGHT, WIDTH]}, None], orientation
    )
    drawn = tmp_path / "mask.png"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(draw_blob() * 255).save(drawn, exif=exif)
    masks = decode_masks(source.build_rles(0), source.sizes[0])
    assert (masks[0] == np.asarray(open_rgb(drawn))[..., 0] // 255).all()
    left, top, right, bottom = source.boxes[1].astype(int)
    box = np.zeros_like(masks[1])
    box[top:bottom, left:right] = 1
    assert (masks[1] == box).all()


BAD = {
    "none": None,
    "two points": [[1, 2, 3, 4]],
    "odd": [[1, 2, 3, 4, 5, 6, 7]],
    "far out": [[1, 2, 1e9, 4, 5, 6]],
    "another size": {"counts": [600, 600], "size": [WIDTH, HEIGHT]},
    "too short": {"counts": [600, 599], "size": [HEIGHT, WIDTH]},
    "negative": {"counts": [1300, -100], "size": [HEIGHT, WIDTH]},
    "no counts": {"size": [HEIGHT, WIDTH]},
}


def test_outlines_of_2000_images_take_their_own_bytes(tmp_path):
    """In what each data worker gets, beside the boxes."""
    corners = (1 + np.arange(120) % 27.5).tolist()
    ids = range(2000)
    objects = [build_annotation(i, [1, 1, 28, 28], 1, segmentation=[corners]) for i in ids]
    images = [{"id": i, "file_name": f"{i}.jpg", "width": WIDTH, "height": HEIGHT} for i in ids]
    first = draw_picture(tmp_path / "val/0.jpg", (WIDTH, HEIGHT))
    for i in ids[1:]:
        os.link(first, first.with_name(f"{i}.jpg"))
    named = [{"id": 1, "name": "cat"}]
    write_coco(
        tmp_path, "val", (), objects, named, change=lambda content: content.update(images=images)
    )
    sizes = {}
    for masks in (False, True):
        spec = Spec(str(tmp_path), seed=0, val_share=0.2, is_eval_only=True, masks=masks)
        sizes[masks] = len(pickle.dumps(load(spec)[1]))
    bytes_of_outlines = 8 * len(corners) * len(objects)
    assert bytes_of_outlines < sizes[True] - sizes[False] < 1.1 * bytes_of_outlines


def test_what_can_not_be_drawn_is_counted_and_its_box_stands_in(tmp_path):
    source = write_masks(tmp_path, [*BAD.values(), POLYGONS])
    message = "boxes have no outline that can be drawn, and their box stands in"
    assert (
        f"{len(BAD)} of {len(BAD) + 1} {message}" in source.notes[-1]
        and "5.jpg" in source.notes[-1]
    )
    masks = source.load_sample(0, 0).masks
    box = np.zeros((HEIGHT, WIDTH), np.uint8)
    box[3:23, 2:32] = 1
    for name, mask in zip(BAD, masks, strict=False):
        assert (mask == box).all(), name
    assert (masks[-1] != box).any()


def test_data_without_outlines_are_refused(tmp_path):
    source = write_masks(tmp_path, [POLYGONS, {"counts": "04", "size": [HEIGHT, WIDTH]}])
    with pytest.raises(BrokenImage, match="outline that can't be drawn"):
        source.load_sample(0, 0)
    with pytest.raises(Refused, match="none of its 2 objects has an outline"):
        write_masks(tmp_path, [None, None])
    with pytest.raises(Refused, match=r"boxes without outlines.*give one"):
        load(Spec(str(write_yolo(tmp_path / "yolo")), seed=0, val_share=0.2, masks=True))


def test_outlines_follow_their_boxes_and_make_the_fingerprint(tmp_path):
    boxes = [[2, 3, 30, 20], [50, 3, 0, 5], [1, 1, 9, 9]]  # one without an area, which is left out
    source = write_masks(tmp_path, [POLYGONS, POLYGONS[:1], POLYGONS[1:]], boxes=boxes)
    assert len(source.boxes) == len(source.masks.shapes) == 2
    assert source.load_sample(0, 0).masks[1].any(0).nonzero()[0].min() == 25
    twice = source.select(np.array([0, 0]))
    assert len(twice.masks.shapes) == 4 and twice.build_rles(1) == source.build_rles(0)
    other_file = write_masks(tmp_path, [POLYGONS, POLYGONS[:1], POLYGONS[:1]], boxes=boxes)
    assert source.fingerprint != other_file.fingerprint
