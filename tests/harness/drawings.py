"""Small data sets that tests draw: striped stuffs, scenes of digits, images with several labels."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from common.detection.data import masks as mask_columns
from common.detection.data import sources


def draw_stripes(folder: Path, counts: Sequence[int], seed: int = 0) -> None:
    """A folder per class, each with `counts` 32 x 32 PNGs of stripes in its direction and colour."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:32, :32] / 32
    for number, count in enumerate(counts):
        (folder / f"stuff_{number}").mkdir(parents=True)
        share = number / len(counts)
        colour = np.cos(2 * np.pi * (share + np.arange(3) / 3))  # of red, green, blue
        for index in range(count):
            phase = (
                4
                * np.pi
                * (x * np.cos(np.pi * share) + y * np.sin(np.pi * share) + generator.random())
            )
            pixels = (
                128
                + 30 * colour
                + 40 * np.sin(phase)[..., None]
                + generator.normal(0, 30, (32, 32, 3))
            )
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(folder / f"stuff_{number}" / f"{index}.png")


def draw_regions(folder: Path) -> None:
    """Into an existing folder: images/ and masks/ of train (25) and val (7), of many sizes, and classes.txt.

    Regions of three classes have colours of their own. A border has no label, nor has any pixel of
    every sixth image.
    """
    generator = np.random.default_rng(0)
    (folder / "classes.txt").write_text("ground\nleaf\nsky\n")
    colours = np.array([[150, 100, 60], [40, 160, 60], [90, 140, 220]])
    for split, count in (("train", 25), ("val", 7)):
        for kind in ("images", "masks"):
            (folder / kind / split).mkdir(parents=True)
        for number in range(count):
            height = 70 + 11 * number % 31
            width = 60 + 7 * number % 53
            y, x = np.mgrid[:height, :width]
            ids = (y < height * generator.uniform(0.3, 0.7)) * 2
            centre = generator.uniform(0.2, 0.8, 2) * (height, width)
            ids[np.hypot(y - centre[0], x - centre[1]) < 20] = 1
            pixels = colours[ids] + generator.normal(0, 30, (height, width, 3))
            suffix = "jpg" if number % 2 else "png"
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(folder / "images" / split / f"{number}.{suffix}")
            ids[:, :5] = 255
            if number % 6 == 5:
                ids[:] = 255
            mask = Image.fromarray(ids.astype(np.uint8))
            mask.save(folder / "masks" / split / f"{number}.png")


def draw_scenes(folder: Path) -> None:
    """Into an existing folder: train.json, val.json with outlines, and their images in folders."""
    train, val = sources.load(sources.Spec("digits", seed=0, val_share=0.2, masks=True))
    for split, source, count in (("train", train, 25), ("val", val, 7)):
        (folder / split).mkdir()
        images = []
        annotations = []
        for number in range(count):
            width = 96 + 7 * number % 33
            height = 96 + 11 * number % 31
            picture, boxes, labels, _, masks, _ = source.load_sample(number, number)
            pixels = picture.decode().permute(1, 2, 0).numpy()
            inside = (
                (boxes[:, 2:] <= (width, height)).all(1)
                if number % 3
                else np.zeros(len(boxes), bool)
            )
            Image.fromarray(pixels[:height, :width]).save(folder / split / f"{number}.png")
            images.append(
                {
                    "id": number,
                    "file_name": f"{split}/{number}.png",
                    "width": width,
                    "height": height,
                }
            )
            encoded = mask_columns.encode_masks(masks[inside, :height, :width])
            runs = [rle | {"counts": rle["counts"].decode()} for rle in encoded]
            objects = zip(boxes[inside].tolist(), labels[inside].tolist(), runs, strict=True)
            for (left, top, right, bottom), label, outline in objects:
                annotation = {
                    "id": len(annotations),
                    "image_id": number,
                    "category_id": 3 * label + 1,
                }
                box = [left, top, right - left, bottom - top]
                annotations.append(annotation | {"bbox": box, "segmentation": outline})
        categories = [
            {"id": 3 * number + 1, "name": name} for number, name in enumerate(source.classes)
        ]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"{split}.json").write_text(json.dumps(content))


def save_colours(folder: Path) -> None:
    """A Hugging Face data set of 80 + 23 images whose labels are the colours that are bright."""
    import datasets

    def rows(count: int, seed: int) -> dict:
        generator = np.random.default_rng(seed)
        shows = generator.integers(0, 2, (count, 3))
        pixels = 60 + 120 * shows[:, None, None] + generator.normal(0, 30, (count, 32, 32, 3))
        images = [Image.fromarray(image) for image in pixels.clip(0, 255).astype(np.uint8)]
        return {"image": images, "colours": [np.flatnonzero(row).tolist() for row in shows]}

    colours = datasets.Sequence(datasets.ClassLabel(names=["red", "green", "blue"]))
    features = datasets.Features({"image": datasets.Image(), "colours": colours})
    splits = {"train": rows(80, seed=0), "validation": rows(23, seed=1)}
    parts = {
        name: datasets.Dataset.from_dict(part, features=features) for name, part in splits.items()
    }
    datasets.DatasetDict(parts).save_to_disk(str(folder))


def draw_picture(path: Path, value: int = 0, green: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3), (value, green, 2)).save(path)
    return path


def draw_pets(root: Path, cats: int = 8, dogs: int = 12) -> Path:
    return draw_tree(root, {"cat": cats, "dog": dogs})


def draw_tree(root: Path, content: Mapping[str, int | str | None]) -> Path:
    """Below `root`: of each folder that number of pictures 0.png, 1.png, ..., all different; None:
    nothing; a text: a file.
    """
    root.mkdir(parents=True, exist_ok=True)
    for number, (name, entry) in enumerate(content.items()):
        path = root / name
        (path.parent if isinstance(entry, str) else path).mkdir(parents=True, exist_ok=True)
        if isinstance(entry, str):
            path.write_text(entry)
        for index in range(entry if isinstance(entry, int) else 0):
            draw_picture(path / f"{index}.png", index, number)
    return root
