"""The data of the comparison, from the handwritten digits of scikit-learn."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

YOLO_CONFIG = """train: train2017
val: val2017
nc: 10
names: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
"""


class Task(NamedTuple):
    save: Callable[[Path, int], None]
    num_train: tuple[int, int]  # the first leaves a last batch that is not full
    batch_size: int  # of all processes


def save_digits(folder: Path, num_train: int) -> None:
    """Save `train/`, and a quarter as many in `val/`: a folder per class, pictures of 32 x 32.

    All are in `flat/`, too, as `<class>_<number>.jpg`.
    """
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    for position, index in enumerate(order[: num_train + math.ceil(num_train / 4)]):
        image = Image.fromarray((digits.images[index] * 15).astype(np.uint8))
        split = "train" if position < num_train else "val"
        label = digits.target[index]
        for path in (f"{split}/{label}/{index}.png", f"flat/{label}_{index}.jpg"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            image.resize((32, 32)).convert("RGB").save(folder / path)


def save_scenes(folder: Path, num_train: int) -> None:
    """Save pictures of 96 x 96 with one to three digits of 24 x 24, in COCO's layout.

    YOLO's labels lie beside the pictures; its `data.yaml` is there, too.
    """
    digits = load_digits()
    rng = np.random.default_rng(0)
    (folder / "annotations").mkdir(parents=True)
    for split, num_images in (("train2017", num_train), ("val2017", math.ceil(num_train / 4))):
        (folder / split).mkdir()
        categories = [{"id": label + 1, "name": str(label)} for label in range(10)]
        coco = {"images": [], "annotations": [], "categories": categories}
        for image_id in range(num_images):
            scene = np.zeros((96, 96), np.uint8)
            lines = ""
            for cell in rng.permutation(9).tolist()[: rng.integers(1, 4)]:
                index = rng.integers(len(digits.images))
                label = int(digits.target[index])
                x = cell % 3 * 32 + 4
                y = cell // 3 * 32 + 4
                scene[y : y + 24, x : x + 24] = np.kron(digits.images[index] * 15, np.ones((3, 3)))
                lines += f"{label} {(x + 12) / 96} {(y + 12) / 96} 0.25 0.25\n"
                annotation = {"id": len(coco["annotations"]) + 1, "image_id": image_id}
                annotation |= {"category_id": label + 1, "bbox": [x, y, 24, 24], "area": 576}
                corners = [x, y, x + 24, y, x + 24, y + 24, x, y + 24]
                annotation |= {"segmentation": [corners], "iscrowd": 0}
                coco["annotations"].append(annotation)
            path = f"{image_id:03}.png"
            coco["images"].append({"id": image_id, "file_name": path, "width": 96, "height": 96})
            Image.fromarray(scene).convert("RGB").save(folder / split / path)
            (folder / split / f"{image_id:03}.txt").write_text(lines)
        (folder / f"annotations/instances_{split}.json").write_text(json.dumps(coco))
    (folder / "data.yaml").write_text(f"path: {folder}\n{YOLO_CONFIG}")


CLASSIFICATION = Task(save_digits, (401, 384), 24)
DETECTION = Task(save_scenes, (99, 90), 6)
