"""The data of the comparison, from the handwritten digits of scikit-learn."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


class Sizes(NamedTuple):
    num_train: int  # leaves a last batch that is not full
    num_train_even: int
    batch_size: int  # of all processes


CLASSIFICATION = Sizes(401, 384, 24)
DETECTION = Sizes(99, 90, 6)


def count_val(num_train: int) -> int:
    return math.ceil(num_train / 4)


def save_digits(folder: Path, num_train: int) -> None:
    """Save `train/`, and a quarter as many in `val/`: a folder per class, pictures of 32 x 32.

    All are in `flat/`, too, as `<class>_<number>.jpg`.
    """
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    for position, index in enumerate(order[: num_train + count_val(num_train)]):
        image = Image.fromarray((digits.images[index] * 15).astype(np.uint8))
        split = "train" if position < num_train else "val"
        label = digits.target[index]
        for path in (f"{split}/{label}/{index}.png", f"flat/{label}_{index}.jpg"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            image.resize((32, 32)).convert("RGB").save(folder / path)


def save_scenes(folder: Path, num_train: int) -> None:
    """Save pictures of 96 x 96 with one to three digits of 24 x 24, in COCO's layout.

    YOLO's is there, too: `images/`, `labels/` and `data.yaml`.
    """
    digits = load_digits()
    rng = np.random.default_rng(0)
    categories = [{"id": label + 1, "name": str(label)} for label in range(10)]
    for split, num_images in (("train", num_train), ("val", count_val(num_train))):
        name = f"{split}2017"
        for path in (f"images/{name}", f"labels/{name}", "annotations"):
            (folder / path).mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(folder / "images" / name)
        images = []
        annotations = []
        for image_id in range(num_images):
            scene = np.zeros((96, 96), np.uint8)
            lines = []
            for cell in rng.permutation(9)[: rng.integers(1, 4)]:
                index = rng.integers(len(digits.images))
                row, column = divmod(int(cell), 3)
                x, y = (column * 32 + 4, row * 32 + 4)
                scene[y : y + 24, x : x + 24] = np.kron(digits.images[index] * 15, np.ones((3, 3)))
                label = int(digits.target[index])
                annotation = {"id": len(annotations) + 1, "image_id": image_id, "iscrowd": 0}
                annotation |= {"category_id": label + 1, "bbox": [x, y, 24, 24], "area": 576}
                corners = [x, y, x + 24, y, x + 24, y + 24, x, y + 24]
                annotation["segmentation"] = [corners]
                annotations.append(annotation)
                lines.append(f"{label} {(x + 12) / 96} {(y + 12) / 96} 0.25 0.25")
            path = f"{image_id:03}.png"
            images.append({"id": image_id, "file_name": path, "width": 96, "height": 96})
            Image.fromarray(scene).convert("RGB").save(folder / name / path)
            labels = folder / "labels" / name / f"{image_id:03}.txt"
            labels.write_text("\n".join(lines))
        coco = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"annotations/instances_{name}.json").write_text(json.dumps(coco))
    names = [category["name"] for category in categories]
    config = {"path": str(folder), "train": "images/train2017", "val": "images/val2017"}
    (folder / "data.yaml").write_text(json.dumps(config | {"nc": 10, "names": names}))
