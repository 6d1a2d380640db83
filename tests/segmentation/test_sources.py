"""Folders of images and masks in every layout; what does not fit is refused in one line."""

import json
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from common.data.images import BrokenImage
from common.errors import Refused
from common.segmentation.batches import EvalDataset
from common.segmentation.masks import IGNORED
from common.segmentation.sources import Spec, count_class_pixels, load, load_data
from recipes import seg

pytestmark = pytest.mark.smoke


def load_folder(folder: Path, **options) -> tuple:
    return load(Spec(str(folder), seed=0, val_share=0.25, **options))


def draw(file: Path, ids, size=(6, 4)) -> None:
    """A mask of one id, or of an array of ids."""
    file.parent.mkdir(parents=True, exist_ok=True)
    ids = np.full(size[::-1], ids) if np.ndim(ids) == 0 else np.asarray(ids)
    Image.fromarray(ids.astype(np.uint8)).save(file)


def draw_image(file: Path, size=(6, 4)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    colour = zlib.crc32(str(file).encode()) % 2**24  # no two images are copies
    Image.new("RGB", size, (colour >> 16, colour >> 8 & 255, colour & 255)).save(file)


def draw_pair(images: Path, masks: Path, name: str, ids=0, endings=("", "")) -> None:
    draw_image(images / f"{name}{endings[0]}.png")
    draw(masks / f"{name}{endings[1]}.png", ids)


def name_classes(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classes.txt").write_text("\n".join(names))


def test_images_and_masks_lie_side_by_side_flat_or_in_splits(tmp_path) -> None:
    flat = tmp_path / "flat"
    name_classes(flat, "a", "b")
    for number in range(8):
        draw_pair(flat / "images", flat / "masks", f"{number}", ids=number % 2)
    train, val = load_folder(flat)
    assert (len(train), len(val)) == (6, 2)
    assert train.classes == ("a", "b")
    assert val.split_text == "25 % held out of images"
    for source in (train, val):
        for index in range(len(source)):
            number = int(Path(source.get_name(index)).stem)
            assert (source.load_mask(index) == number % 2).all()

    below = tmp_path / "below"
    above = tmp_path / "above"
    for folder in (below, above):
        name_classes(folder, "a", "b")
    for number, split in enumerate(("train", "train", "val")):
        draw_pair(below / "images" / split, below / "annotations" / split, f"x/{number}", ids=1)
        draw_pair(above / split / "images", above / split / "masks", f"{number}", ids=1)
    for folder in (below, above):
        train, val = load_folder(folder)
        assert (len(train), len(val)) == (2, 1)
        assert count_class_pixels(train).tolist() == [0, 48]


def test_pascal_voc_has_lists_of_names(tmp_path) -> None:
    for name in "abc":
        draw_pair(tmp_path / "JPEGImages", tmp_path / "SegmentationClass", name, ids=20)
    draw_image(tmp_path / "JPEGImages/no_mask.png")
    lists = tmp_path / "ImageSets/Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("a\nc\n")
    (lists / "val.txt").write_text("b\n")
    train, val = load_folder(tmp_path)
    assert [Path(train.get_name(i)).stem for i in range(2)] == ["a", "c"]
    assert len(val) == 1 and len(train.classes) == 21 and train.classes[20] == "tvmonitor"


def test_ade20k_names_its_classes_and_ignores_zero(tmp_path) -> None:
    (tmp_path / "objectInfo150.txt").write_text(
        "Idx\tRatio\tTrain\tVal\tName\n1\t.1\t9\t9\twall\n2\t.1\t9\t9\tbuilding, edifice\n"
    )
    for split in ("training", "validation"):
        images = tmp_path / "images" / split
        draw_pair(images, tmp_path / "annotations" / split, "x", ids=[[0, 1, 2, 0, 1, 2]] * 4)
    train, val = load_folder(tmp_path, ignore_zero=True)
    assert train.classes == ("wall", "building")
    assert val.load_mask(0)[0].tolist() == [IGNORED, 0, 1] * 2
    with pytest.raises(Refused, match=r"the mask has the id 2, and there are 2 classes"):
        load_folder(tmp_path)


def test_cityscapes_has_19_of_its_ids(tmp_path) -> None:
    endings = ("_leftImg8bit", "_gtFine_labelIds")
    for split in ("train", "val"):
        images = tmp_path / "leftImg8bit" / split / "aachen"
        masks = tmp_path / "gtFine" / split / "aachen"
        draw_pair(images, masks, "aachen_0", [[0, 7, 11, 33, 26, 5]] * 4, endings)
        draw(masks / "aachen_0_gtFine_instanceIds.png", 3)
    train, val = load_folder(tmp_path)
    assert len(train.classes) == 19
    assert val.load_mask(0)[0].tolist() == [IGNORED, 0, 2, 18, 13, IGNORED]


def test_outlines_of_objects_are_painted(scenes) -> None:
    config = seg.Config(data=str(scenes))
    train, val = load_data(config)
    assert train.classes[0] == "background" and len(train.classes) == 11
    index = next(i for i in range(len(val)) if val.images.build_rles(i))
    pair = val.load_pair(index, index)
    assert (pair.picture.height, pair.picture.width) == pair.mask.shape
    labels = val.images.labels[val.images.offsets[index] : val.images.offsets[index + 1]]
    assert set(np.unique(pair.mask)) <= {0} | set((labels + 1).tolist())
    assert (pair.mask > 0).any()
    assert (val.load_mask(index) == pair.mask).all()


@pytest.mark.parametrize("share", [0.5, 0.0], ids=["cut off", "empty"])
def test_outlines_are_painted_without_the_image(share, scenes, tmp_path) -> None:
    """So that an image that can't be read counts as wrong in an evaluation, and does not end it."""
    data = shutil.copytree(scenes, tmp_path / "data")
    _, whole = load_data(seg.Config(data=str(data)))
    file = data / "val/1.png"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    _, val = load_data(seg.Config(data=str(data)))
    index = next(i for i in range(len(val)) if val.get_name(i) == str(file))
    with pytest.raises(BrokenImage):
        val.load_pair(index, index)
    assert (val.load_mask(index) > 0).any()
    assert (val.load_mask(index) == whole.load_mask(index)).all()


def test_fresh_scenes_have_pixels_to_count() -> None:
    train, val = load_data(seg.Config(data="digits"))
    assert train.fresh and not val.fresh
    assert (train.load_mask(3) == train.load_pair(3, 3).mask).all()
    assert (count_class_pixels(val) > 0).all()


def test_names_of_classes_in_json_are_not_taken_for_coco(tmp_path) -> None:
    for number in range(4):
        draw_pair(tmp_path / "images", tmp_path / "masks", f"{number}", ids=number % 2)
    (tmp_path / "classes.json").write_text(json.dumps(["a", "b"]))
    train, val = load_data(seg.Config(data=str(tmp_path)))
    assert train.classes == val.classes == ("a", "b")
    assert len(train) + len(val) == 4


def test_images_of_a_folder_are_held_out_together(tmp_path) -> None:
    name_classes(tmp_path, "a", "b")
    for number in range(24):
        name = f"{number % 4}/{number}"  # a place and an image of it
        draw_pair(tmp_path / "images", tmp_path / "masks", name, ids=number % 2)
    train, val = load_folder(tmp_path, group_column="folder")
    places = [{Path(s.get_name(i)).parent.name for i in range(len(s))} for s in (train, val)]
    assert len(places[0]) == 3 and len(places[1]) == 1 and not places[0] & places[1]
    assert val.split_text == "25 % held out of images by folder"


def spoil(kind: str, folder: Path) -> None:
    images = folder / "images"
    masks = folder / "masks"
    if kind == "a mask is missing":
        (masks / "0.png").unlink()
    elif kind == "no mask has a label":
        for file in masks.iterdir():
            draw(file, 255)
    elif kind == "another size":
        draw(masks / "0.png", 0, size=(4, 6))
    elif kind == "turned by EXIF":
        image = Image.new("RGB", (6, 4))
        exif = image.getexif()
        exif[0x0112] = 6
        (images / "0.png").unlink()
        image.save(images / "0.jpg", exif=exif)
    elif kind == "unknown ids":
        draw(masks / "1.png", 7)
    elif kind == "colours":
        Image.new("RGB", (6, 4), (1, 2, 3)).save(masks / "1.png")
    elif kind == "no names":
        (folder / "classes.txt").unlink()
    elif kind == "a name twice":
        name_classes(folder, "a", "a")
    elif kind == "no text":
        (folder / "classes.txt").unlink()
        (folder / "classes.json").write_text(json.dumps({"0": "a", "2": "b"}))
    elif kind == "two images":
        draw_image(images / "0.jpg")
    elif kind == "nothing":
        shutil.rmtree(images)


@pytest.mark.parametrize(
    "kind, message",
    [
        (
            "a mask is missing",
            "masks: 1 of 8 images have no mask there, first 0; it has the same name",
        ),
        ("no mask has a label", ": none of 8 masks has a pixel with a label, such as "),
        ("another size", "0.png: is 6 x 4 pixels large (after its EXIF rotation), its mask "),
        ("turned by EXIF", "0.jpg: is 4 x 6 pixels large (after its EXIF rotation), its mask "),
        ("unknown ids", "1.png: the mask has the id 7, and there are 2 classes, 0 to 1"),
        ("colours", "1.png: the mask has colours (mode RGB), and a class id per pixel is needed"),
        ("no names", "the classes of the masks have no names; write "),
        ("a name twice", "two classes have the name a; give each its own"),
        ("no text", "classes.json: must be a list of names, or an object of names by id from 0"),
        ("two images", "0.jpg and 0.png have the same name; keep one"),
        ("nothing", "data of another kind; expected digits, a folder with images/ and masks/"),
    ],
)
def test_data_that_do_not_fit_are_refused_in_one_line(kind, message, tmp_path) -> None:
    name_classes(tmp_path, "a", "b")
    for number in range(8):
        draw_pair(tmp_path / "images", tmp_path / "masks", f"{number}", ids=number % 2)
    assert load_folder(tmp_path)
    spoil(kind, tmp_path)
    with pytest.raises(Refused) as refusal:
        load_folder(tmp_path)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("short_side", [0, 8])
def test_a_later_mask_of_another_size_ends_an_evaluation(short_side, tmp_path) -> None:
    name_classes(tmp_path, "a", "b")
    for number in range(8):
        draw_pair(tmp_path / "images", tmp_path / "masks", f"{number}", ids=number % 2)
    train, val = load_folder(tmp_path)
    transforms = SimpleNamespace(short_side=short_side, stride=4, normalize=None)
    batch = EvalDataset(val, transforms).__getitems__([0])
    assert batch.labels.shape == (1, 4, 6) and not batch.broken
    message = "is 6 x 4 pixels large (after its EXIF rotation), its mask 4 x 6"
    for source in (train, val):
        draw(tmp_path / "masks" / Path(source.get_name(0)).name, 0, size=(4, 6))
    with pytest.raises(BrokenImage) as broken:
        train.load_pair(0, 0)
    assert str(broken.value) == message
    with pytest.raises(Refused) as refusal:
        EvalDataset(val, transforms).__getitems__([0])
    assert str(refusal.value) == f"{val.get_name(0)}: {message}; make them equal"
