"""Scenes to detect: stamps of the drawing program Tux Paint on photographs of scikit-image and scikit-learn, as a COCO folder.

    apt-get install tuxpaint-stamps-default
    python -m tests.harness.stamp_scenes /data/stamps

Stamps are cut-outs of photographs, 0 to 4 in a scene of 320 x 240, each at most partly behind a later one. Validation scenes
show stamps and photographs that no training scene shows. A scene is a function of its part, its number and a seed.
"""

import importlib.resources
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

PACKAGE = "tuxpaint-stamps-default"  # GPL-2: used where it is installed, never copied into this repository
STAMPS = Path("/usr/share/tuxpaint/stamps")
CLASSES = {
    "bird": "animals/birds",
    "fish": "animals/fish",
    "flower": "plants/flowers",
    "fruit": "food/fruit",
    "insect": "animals/insects",
    "mammal": "animals/mammals",
    "road sign": "town/roadsigns",
    "tool": "household/tools",
}
# Photographs that show nothing of these classes.
GROUNDS = {
    "train": (
        *("skimage/data/brick.png", "skimage/data/grass.png", "skimage/data/gravel.png", "skimage/data/rocket.jpg"),
        *("skimage/data/hubble_deep_field.jpg", "sklearn/datasets/images/china.jpg"),
    ),
    "val": ("skimage/data/coffee.png", "skimage/data/moon.png", "skimage/data/motorcycle_left.png"),
}
WIDTH, HEIGHT = 320, 240
HELD_OUT = 4  # every fourth stamp of a class is for validation
LEAST_SEEN = 0.4  # share of a stamp that later ones leave visible; fewer, and the later one is left out


def save_stamp_scenes(folder: Path, scenes: int = 800, val_scenes: int = 100, seed: int = 0) -> None:
    """Write train.json and val.json with boxes and masks, and the scenes of each in a folder beside it."""
    for part, count in (("train", scenes), ("val", val_scenes)):
        (folder / part).mkdir(parents=True)
        stamps, grounds = _stamps(part), [_ground(name) for name in GROUNDS[part]]
        images, annotations = [], []
        for number in range(count):
            draw = np.random.default_rng((seed, part == "val", number))
            scene, labels, masks = _scene(draw, stamps, grounds)
            file = f"{part}/{number:05d}.jpg"
            scene.save(folder / file, quality=95)
            images.append({"id": number, "file_name": file, "width": WIDTH, "height": HEIGHT})
            for label, mask in zip(labels, masks, strict=True):
                packed = coco_mask.encode(np.asfortranarray(mask))
                box, area = coco_mask.toBbox(packed).tolist(), int(coco_mask.area(packed))
                outline = packed | {"counts": packed["counts"].decode()}
                about = {"id": len(annotations), "image_id": number, "category_id": label, "iscrowd": 0}
                annotations.append(about | {"bbox": box, "area": area, "segmentation": outline})
        categories = [{"id": label, "name": name} for label, name in enumerate(CLASSES)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"{part}.json").write_text(json.dumps(content))


def _stamps(part: str) -> list[list[Image.Image]]:
    """The cut-outs of each class, without the drawings among them."""
    found = []
    for folder in CLASSES.values():
        files = sorted(file for file in (STAMPS / folder).rglob("*.png") if "cartoon" not in file.parts)
        of_part = [file for place, file in enumerate(files) if (place % HELD_OUT == 0) == (part == "val")]
        cut_outs = [Image.open(file).convert("RGBA") for file in of_part]
        found.append([image.crop(image.getchannel("A").getbbox()) for image in cut_outs])
    return found


def _ground(name: str) -> Image.Image:
    package, _, file = name.partition("/")
    return Image.open(str(importlib.resources.files(package) / file)).convert("RGB")


def _scene(
    draw: np.random.Generator, stamps: list[list[Image.Image]], grounds: list[Image.Image]
) -> tuple[Image.Image, list[int], list[np.ndarray]]:
    """An image, and the class and visible mask uint8[H, W] of each of its stamps."""
    ground = grounds[draw.integers(len(grounds))]
    most = min(ground.width / WIDTH, ground.height / HEIGHT)
    scale = most * draw.uniform(0.5, 1)
    left, top = draw.uniform(0, ground.width - scale * WIDTH), draw.uniform(0, ground.height - scale * HEIGHT)
    scene = ground.resize((WIDTH, HEIGHT), box=(left, top, left + scale * WIDTH, top + scale * HEIGHT))
    labels, masks = [], []
    for _ in range(draw.integers(5)):
        label = int(draw.integers(len(stamps)))
        stamp = _varied(draw, stamps[label][draw.integers(len(stamps[label]))])
        place = int(draw.integers(WIDTH - stamp.width + 1)), int(draw.integers(HEIGHT - stamp.height + 1))
        alpha = Image.new("L", (WIDTH, HEIGHT))
        alpha.paste(stamp.getchannel("A"), place)
        mask = np.uint8(np.asarray(alpha) > 127)
        left_over = [other & ~mask & 1 for other in masks]
        if any(rest.sum() < LEAST_SEEN * other.sum() for rest, other in zip(left_over, masks, strict=True)):
            continue
        scene.paste(stamp, place, stamp)
        labels, masks = [*labels, label], [*left_over, mask]
    return scene, labels, masks


def _varied(draw: np.random.Generator, stamp: Image.Image) -> Image.Image:
    """A stamp of another size, mirrored or not, and turned a little."""
    factor = draw.uniform(48, 150) / max(stamp.size)
    stamp = stamp.resize([max(8, round(factor * side)) for side in stamp.size])
    if draw.random() < 0.5:
        stamp = stamp.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    stamp = stamp.rotate(draw.uniform(-20, 20), Image.Resampling.BILINEAR, expand=True)
    return stamp.crop(stamp.getchannel("A").getbbox())


if __name__ == "__main__":
    save_stamp_scenes(Path(sys.argv[1]))
