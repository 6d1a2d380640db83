"""Measures what augmentations of images with boxes cost, and the padding of multi-scale training.

    python benchmarks/box_augmentation.py [--quick] [--output FILE]

- CPU time of one sample on one core, from the file to uint8: JPEGs of 640 x 427 pixels, parts of scikit-learn's two photographs
  with eight objects each, shown whole or varied at a short side of 480. Also the decoding of a JPEG alone. All take turns in
  one run.
- How well boxes of rotated objects fit where no masks are read: their mean IoU with the boxes of the rotated masks, of 60
  scenes of digits; also that of boxes around the rotated corners.
- Share of the canvas that is padding, and its pixels, for a synthetic mix of shapes: three quarters 640 x 480, a fifth
  480 x 640, the rest 640 x 640. Short sides are 480 to 800 pixels, the global batch is 16.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision import tv_tensors
from torchvision.ops import box_iou
from torchvision.transforms.v2.functional import affine

from common.data.stream import Stream
from common.detection.affine import moved
from common.detection.batches import TrainingScenes
from common.detection.data import sources
from common.detection.data.annotated import Sample
from common.detection.grouping import GroupedStream
from common.detection.transforms import BoxAugmentation

OBJECTS, IMAGES = 8, 16
FILL = (124, 116, 104)
MOVED = {"rotate": 10.0, "translate": 0.1}
WAYS = {  # name: with masks, augmentation
    "plain": (False, {}),
    "mosaic": (False, {"mosaic": 1.0}),
    "mixup": (False, {"mixup": 1.0}),
    "rotate, translate": (False, MOVED),
    "plain, masks": (True, {}),
    "rotate, translate, masks": (True, MOVED),
    "copy_paste": (True, {"copy_paste": 1.0, "drop_masks": True}),
    "copy_paste, rotate, translate": (True, {"copy_paste": 1.0, "drop_masks": True, **MOVED}),
}


def make_data(folder: Path) -> None:
    """Writes photographs with ellipses as objects, in COCO's format."""
    draws, images, annotations = np.random.default_rng(0), [], []
    photographs, turn = load_sample_images().images, np.linspace(0, 2 * np.pi, 40, endpoint=False)
    (folder / "train").mkdir()
    for number in range(IMAGES):
        pixels = np.roll(photographs[number % 2], 37 * number, axis=1)
        height, width = pixels.shape[:2]
        Image.fromarray(pixels).save(folder / "train" / f"{number}.jpg", quality=90)
        images.append({"id": number, "file_name": f"train/{number}.jpg", "width": width, "height": height})
        for _ in range(OBJECTS):
            radius = draws.uniform(10, 100, 2)
            centre = draws.uniform(radius, [width, height] - radius)
            outline = centre + radius * np.stack([np.cos(turn), np.sin(turn)], 1)
            box = [*(centre - radius).tolist(), *(2 * radius).tolist()]
            annotation = {"id": len(annotations), "image_id": number, "category_id": 1, "bbox": box}
            annotations.append(annotation | {"segmentation": [outline.ravel().tolist()]})
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "ellipse"}]}
    (folder / "train.json").write_text(json.dumps(content))


def measure_costs(folder: Path, turns: int) -> list[dict]:
    """Median CPU milliseconds of a sample for each way, and of decoding alone."""
    data = {
        masks: sources.load(sources.Spec(str(folder), seed=0, val_share=0.2, masks=masks))[0] for masks in (False, True)
    }
    spent = {name: [] for name in ("decoding", *WAYS)}
    for turn in range(turns):
        for name in spent:
            masks, ways = WAYS.get(name, (False, {}))
            source = data[masks]
            augmentation = BoxAugmentation(0, (480,), 800, hflip=0.5, **ways)
            samples = TrainingScenes(source, Stream(len(source), 1, 0), augmentation, 32, FILL, 0)
            began = time.process_time()
            if name == "decoding":
                source.image(turn % len(source)).load()
            else:
                samples.__getitems__(np.array([turn]))
            spent[name].append(1000 * (time.process_time() - began))
    return [{"way": name, "ms": statistics.median(values)} for name, values in spent.items()]


def measure_fit(scenes: int) -> list[dict]:
    source, rows = sources.load(sources.Spec("digits", seed=0, val_share=0.2, masks=True))[0], []
    for degrees in (5, 10, 20, 30, 45):
        fits = {"ellipse": [], "corners": []}
        for position in range(scenes):
            _, boxes, labels, crowd, masks = source.sample(0, position)[:5]
            columns = map(torch.from_numpy, (boxes, labels, crowd, masks))
            sample = Sample(torch.zeros(3, *masks.shape[1:], dtype=torch.uint8), *columns)
            exact, shares = moved(sample, degrees, (0.0, 0.0), FILL)
            ellipses, _ = moved(sample._replace(masks=None), degrees, (0.0, 0.0), FILL)
            square = tv_tensors.BoundingBoxes(sample.boxes, format="XYXY", canvas_size=masks.shape[1:])
            corners = affine(square, degrees, [0, 0], 1.0, [0.0, 0.0])
            for name, found in (("ellipse", ellipses.boxes), ("corners", corners.as_subclass(torch.Tensor))):
                fits[name] += box_iou(exact.boxes, found).diagonal()[shares > 0.99].tolist()
        rows.append({"degrees": degrees, **{name: statistics.mean(values) for name, values in fits.items()}})
    return rows


def measure_padding(steps: int) -> list[dict]:
    draws, shapes = np.random.default_rng(0), np.array([[640, 480], [480, 640], [640, 640]])
    sizes = shapes[draws.choice(3, 10_000, p=(0.75, 0.2, 0.05))]
    streams = {
        0: Stream(len(sizes), 16, 0),
        16: GroupedStream(len(sizes), 16, 0, aspects=sizes[:, 0] / sizes[:, 1], window=16),
    }
    rows = []
    for window, stream in streams.items():
        for synchronous in (False, True):
            augmentation = BoxAugmentation(0, (*range(480, 801, 32),), 1333, alike=16 if synchronous else 1)
            source = argparse.Namespace(sizes=sizes)  # as much of a source as a canvas needs
            samples = TrainingScenes(source, stream, augmentation, 32, FILL, 0)
            row = {"group_window": window, "sync_short_sides": synchronous}
            row["padding"] = statistics.mean(samples.padding(step) for step in range(steps))
            rows.append(
                row | {"pixels": statistics.mean(float(np.prod(samples.canvas(step))) for step in range(steps))}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it works")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder))
        result = {"costs": measure_costs(Path(folder), 2 if arguments.quick else 60)}
    result["fit"] = measure_fit(4 if arguments.quick else 60)
    result["padding"] = measure_padding(2 if arguments.quick else 200)
    for row in result["costs"]:
        print(f"{row['way']:32}{row['ms']:8.1f} ms")
    for row in result["fit"]:
        print(f"{row['degrees']:2} degrees: IoU {row['ellipse']:.3f}, of boxes around the corners {row['corners']:.3f}")
    for row in result["padding"]:
        flags = f"--group_window {row['group_window']}{' --sync_short_sides' * row['sync_short_sides']}"
        print(f"{flags:40}{row['padding']:6.1%} padding, {row['pixels'] / 1e6:.2f} million pixels")
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
