"""Measures start-up with a detection set of COCO's size: seconds, and memory of the process and of its workers.

    python benchmarks/index.py [--scale 1.0] [--quick] [--brief] [--output FILE]

The set is like COCO's train2017, times `scale`: 118,287 images, 860,001 boxes with outlines, 450 MB of JSON; image content does
not matter. Each row is a fresh process: ours without the annotation cache, at the first start, which writes the cache, and at a
later start; and other readers of the file, which neither look at the images nor check a box. Imports are not counted. The
workers are forked and go through annotations and outlines without decoding images.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from table import Row

IMAGES, BOXES = 118_287, 860_001
WORKERS = 4
SIZES = ((640, 480), (480, 640), (640, 427), (427, 640), (500, 375))
READERS = [  # reader, whether outlines are needed, folder of the annotation cache
    ("json.load", True, None),
    ("pycocotools", True, None),
    ("no cache", False, "none"),
    ("first start", False, "index"),
    ("later start", False, "index"),
    ("no cache", True, "none"),
    ("first start", True, "index"),
    ("later start", True, "index"),
]
QUICK = (0, 6, 7)


def make_set(root: Path, images: int, boxes: int) -> Path:
    """Writes a COCO folder whose images are hard links to a few small files; returns its training annotations."""
    draw = np.random.default_rng(0)
    outlines = [_outline(draw) for _ in range(500)]
    (root / "annotations").mkdir(parents=True)
    for part, count, objects in (("train2017", images, boxes), ("val2017", max(images // 24, 2), max(boxes // 24, 2))):
        (root / part).mkdir()
        ids, kinds = np.sort(draw.choice(600_000, count, replace=False)).tolist(), draw.integers(len(SIZES), size=count)
        for place, (number, kind) in enumerate(zip(ids, kinds.tolist(), strict=True)):
            file = root / f"{part}-{kind}-{place // 50_000}.jpg"  # ext4 allows 65,000 links per file
            if not file.exists():
                Image.new("RGB", SIZES[kind], (90, 90, 90)).save(file)
            os.link(file, root / part / f"{number:012d}.jpg")
        with (root / "annotations" / f"instances_{part}.json").open("w") as file:
            entries = (_image(part, ids[place], *SIZES[kinds[place]]) for place in range(count))
            file.write('{"info": {"year": 2017}, "licenses": [], "images": [' + ", ".join(entries))
            owners, chosen = draw.integers(count, size=objects), draw.integers(len(outlines), size=objects)
            owners[0], corners = 0, draw.random((objects, 2))
            file.write('], "annotations": [')
            for box in range(objects):
                owner = owners[box]
                file.write(
                    ", " * (box > 0)
                    + _object(box, ids[owner], SIZES[kinds[owner]], corners[box], outlines[chosen[box]])
                )
            categories = [{"supercategory": "any", "id": number, "name": f"class {number}"} for number in range(1, 81)]
            file.write('], "categories": ' + json.dumps(categories) + "}")
    return root / "annotations/instances_train2017.json"


def _outline(draw: np.random.Generator) -> np.ndarray:
    """[n, 2] corners around the centre of a unit square; 25 on average, as in COCO."""
    angles = 2 * np.pi * np.sort(draw.random(4 + min(draw.geometric(1 / 21), 300)))
    return 0.5 + 0.5 * np.stack([np.cos(angles), np.sin(angles)], 1)


def _image(part: str, number: int, width: int, height: int) -> str:
    return (
        f'{{"license": 3, "file_name": "{number:012d}.jpg", "coco_url": "http://images.cocodataset.org/{part}/{number:012d}'
        f'.jpg", "height": {height}, "width": {width}, "date_captured": "2013-11-14 11:18:45", "flickr_url": '
        f'"http://farm9.staticflickr.com/8186/{number}_a_z.jpg", "id": {number}}}'
    )


def _object(number: int, image: int, size: tuple[int, int], corner: np.ndarray, outline: np.ndarray) -> str:
    left, top = 0.8 * size[0] * corner[0], 0.8 * size[1] * corner[1]
    width, height = 0.15 * size[0], 0.15 * size[1]
    numbers = str((outline * (width, height) + (left, top)).round(2).ravel().tolist())
    shape, crowd = f"[{numbers}]", 0
    if number % 100 == 0:  # COCO has 1 %
        pixels = size[0] * size[1]
        shape, crowd = f'{{"counts": [{pixels // 2}, {pixels - pixels // 2}], "size": [{size[1]}, {size[0]}]}}', 1
    return (
        f'{{"segmentation": {shape}, "area": {width * height * 0.7:.4f}, "iscrowd": {crowd}, "image_id": {image}, '
        f'"bbox": [{left:.2f}, {top:.2f}, {width:.2f}, {height:.2f}], "category_id": {1 + number % 80}, "id": {number}}}'
    )


def measure(reader: str, outlines: bool, file: Path) -> dict:
    """Measures one row in this process."""
    if reader == "json.load":
        read = _load_json
    elif reader == "pycocotools":
        from pycocotools.coco import COCO as read
    else:
        from common.detection.data import sources, stamps

        stamps._COARSEST = 0.0  # cache at once: nothing changes these files

        def read(file: Path) -> tuple:
            train, val = sources.load(sources.Spec(str(file.parents[1]), seed=0, val_share=0.2, masks=outlines))
            return train, train.fingerprint, val.fingerprint  # a start asks for them

        read(file.parents[2] / "small/annotations/instances_train2017.json")  # triggers late imports

    others = peak_memory(resource.RUSAGE_CHILDREN)
    before, began, cpu = peak_memory(), time.perf_counter(), time.process_time()
    found = read(file)
    row = {
        "reader": reader,
        "outlines": outlines,
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "memory_mib": peak_memory() - before,
        "other_process_mib": peak_memory(resource.RUSAGE_CHILDREN),
    }
    row["other_process_mib"] *= (
        row["other_process_mib"] > others
    )  # 0 if only the processes that imports started were as large
    if isinstance(found, tuple):
        row |= {"images": len(found[0]), "boxes": len(found[0].boxes), "fingerprints": found[1:]}
        row["worker_mib"] = max(_workers(found[0]))
    return row


def _load_json(file: Path) -> dict:
    with file.open() as text:
        return json.load(text)


def _workers(source) -> list[float]:
    """Private memory that each forked worker needs to go through its share of the annotations, in MiB."""
    with multiprocessing.get_context("fork").Pool(WORKERS, _adopt, [source]) as pool:
        return pool.map(_go_through, range(WORKERS), chunksize=1)


def _adopt(source) -> None:
    global adopted
    adopted = source


def _go_through(worker: int) -> float:
    before, total = own_memory(), 0.0
    for image in range(worker, min(len(adopted), 20_000 * WORKERS), WORKERS):
        rows = slice(adopted.offsets[image], adopted.offsets[image + 1])
        total += adopted.boxes[rows].sum() + adopted.labels[rows].sum() + len(adopted.name(image))
        total += len(adopted.outlines.shapes[rows].to_pylist()) if adopted.outlines else 0
    return own_memory() - before


def own_memory() -> float:
    """Private memory of this process in MiB, without file pages that can be read again."""
    rollup = Path("/proc/self/smaps_rollup")
    if rollup.exists():
        return sum(int(line.split()[1]) for line in rollup.read_text().splitlines() if "Private_Dirty" in line) / 2**10
    import psutil

    return psutil.Process().memory_full_info().uss / 2**20


def peak_memory(of: int = resource.RUSAGE_SELF) -> float:
    """Peak memory in MiB, of this process or of the largest child that it waited for."""
    return resource.getrusage(of).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def rows(quick: bool = False, scale: float = 1.0) -> Iterator[dict]:
    """Measures the rows, on a temporary set of `scale` times COCO's size."""
    scale = 0.01 if quick else scale
    with tempfile.TemporaryDirectory() as folder:
        make_set(Path(folder) / "small", 60, 400)
        file = make_set(Path(folder) / "set", int(scale * IMAGES), int(scale * BOXES))
        for number, (reader, _, place) in enumerate(READERS):
            if number not in QUICK if quick else reader == "pycocotools" and not importlib.util.find_spec(reader):
                continue
            environ = os.environ | {"VISION_RECIPES_CACHE": f"{folder}/{place}" if place == "index" else os.devnull}
            command = [sys.executable, __file__, "--row", str(number), "--file", str(file)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environ, text=True)
            yield json.loads(done.stdout.splitlines()[-1]) | {"json_mb": file.stat().st_size / 1e6}


def table(measured: list[dict]) -> list[Row]:
    """Rows for the common table."""
    ours = measured[-1]
    rows = []
    for peer in (row for row in measured if row["reader"] in ("json.load", "pycocotools")):
        what = f"{ours['images']:,} images, {ours['boxes']:,} boxes, later start"
        rows.append(Row(what, "s", ours["seconds"], peer["reader"], peer["seconds"], peer["seconds"] / ours["seconds"]))
        shrunk = peer["memory_mib"] / ours["memory_mib"]
        rows.append(Row("annotations in memory", "MiB", ours["memory_mib"], peer["reader"], peer["memory_mib"], shrunk))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="size of the set; COCO is 1")
    parser.add_argument("--quick", action="store_true", help="only check that it works: a hundredth of the set")
    parser.add_argument("--brief", action="store_true", help="a tenth of the set, as for `make bench`")
    parser.add_argument("--output", type=Path, help="also write the rows to this JSON file")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)  # internal: measure this row
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row is not None:
        return print(json.dumps(measure(*READERS[arguments.row][:2], arguments.file)))

    measured = list(rows(arguments.quick, 0.1 if arguments.brief else arguments.scale))
    size = next(row for row in measured if "images" in row)
    print(f"{size['images']:,} images, {size['boxes']:,} boxes, {size['json_mb']:,.0f} MB of JSON; {WORKERS} workers")
    print("reader       outlines       time        CPU      memory   reading process     worker")
    for row in measured:
        other = f"{row['other_process_mib']:14,.0f} MiB" if row["other_process_mib"] else f"{'-':>18}"
        worker = f"{row['worker_mib']:7,.1f} MiB" if "worker_mib" in row else f"{'-':>11}"
        print(
            f"{row['reader']:13}{'yes' if row['outlines'] else 'no':8}{row['seconds']:9.2f} s{row['cpu_s']:9.2f} s"
            f"{row['memory_mib']:8,.0f} MiB{other}{worker}"
        )
    if arguments.output:
        arguments.output.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
