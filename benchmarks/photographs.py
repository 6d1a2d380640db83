"""Photographs that all benchmarks read: parts of scikit-learn's two, as JPEGs of any size."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

CLASSES = ("temple", "flower")
NUM_BOXES = 7  # in an image, each of another class
NUM_MASK_CLASSES = 150


def draw_photographs(
    width: int, height: int, num_images: int, seed: int = 0
) -> Iterator[Image.Image]:
    """Parts of both photographs in turn."""
    random = np.random.default_rng(seed)
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    for index in range(num_images):
        photograph = photographs[index % 2]
        right, bottom = (random.uniform(0.5, 1, 2) * photograph.size).astype(int).tolist()
        yield photograph.resize(
            (width, height), Image.Resampling.BICUBIC, box=(0, 0, right, bottom)
        )


def write_classes(folder: Path, width: int, height: int, num_images: int, seed: int = 0) -> None:
    """Writes the JPEGs to two class folders."""
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
    for index, image in enumerate(draw_photographs(width, height, num_images, seed)):
        image.save(folder / CLASSES[index % 2] / f"{index}.jpg", quality=90)


def write_boxes(
    folder: Path, split: str, width: int, height: int, num_images: int, seed: int = 0
) -> None:
    """Writes the JPEGs, and <split>.json in COCO's format."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    images = []
    boxes = []
    for index, image in enumerate(draw_photographs(width, height, num_images, seed)):
        name = f"{split}_{index}.jpg"
        image.save(folder / name, quality=90)
        images.append({"id": index, "file_name": name, "width": width, "height": height})
        for category in range(1, NUM_BOXES + 1):
            size = random.uniform(0.04, 0.4, 2) * height
            corner = random.random(2) * ([width, height] - size)
            box = {"id": len(boxes), "image_id": index, "category_id": category, "iscrowd": 0}
            boxes.append(box | {"bbox": [*corner, *size], "area": size.prod()})
    categories = [{"id": category, "name": str(category)} for category in range(1, NUM_BOXES + 1)]
    content = {"images": images, "annotations": boxes, "categories": categories}
    (folder / f"{split}.json").write_text(json.dumps(content))


def write_masks(folder: Path, width: int, height: int, num_images: int) -> list[Path]:
    """Writes the JPEGs, each with a PNG of the same name: class ids in 16 x 12 blocks."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    paths = []
    for index, image in enumerate(draw_photographs(width, height, num_images)):
        paths.append(folder / f"{index}.jpg")
        image.save(paths[-1], quality=90)
        ids = Image.fromarray(random.integers(0, NUM_MASK_CLASSES, (12, 16), dtype=np.uint8))
        mask = ids.resize((width, height), Image.Resampling.NEAREST)
        mask.save(paths[-1].with_suffix(".png"))
    return paths
