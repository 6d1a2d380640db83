"""Measures `tools.predict` beside a loop around timm's loader and transformers' pipeline.

    python benchmarks/predict.py [--quick] [--brief] [--output FILE]

10,000 JPEGs of 500 x 375 pixels are classified by test_resnet at 64 pixels, where reading is the cost, on one and on two CPU
processes, with a data worker per core in total and one thread per process. Whole commands are timed, from their start to a
complete CSV file. The peers are commands, too: timm's loader, as its inference script uses it, and transformers' pipeline with
the batch size that is its fastest on 500 images. On two processes each peer takes every second image and writes a file of its
own. All take turns; a ratio is the median of the ratios of turns.
"""

import csv
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import timm
import torch
from input_pipeline import make_photographs
from table import Row, compare, script, take_turns
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.models import save_for_hf
from whole_run import seconds

ROOT = Path(__file__).resolve().parent.parent
MODEL, SIZE, GOAL = "test_resnet", 64, 2.0
CLASSES = ["flower", "temple"]
PIPELINE = "transformers' pipeline"
BATCH_SIZES = 8, 32, 128  # of the pipeline; timm's loop has the middle one


def make_model(name: str, size: int, folder: Path) -> None:
    """Writes a timm model with random weights, as a run's best/ is written."""
    save_for_hf(timm.create_model(name, num_classes=len(CLASSES)), folder, model_config={"label_names": CLASSES})
    content = json.loads((folder / "config.json").read_text())
    content["pretrained_cfg"]["input_size"] = [3, size, size]
    del content["model_args"]  # which transformers passes on beside arguments of its own
    (folder / "config.json").write_text(json.dumps(content))


# ---- the peers


def by_timm(model: str, photographs: str, rank: int, world_size: int) -> list[tuple]:
    network = timm.create_model(f"local-dir:{model}", pretrained=True).eval()
    names, data = network.pretrained_cfg["label_names"], resolve_data_config(model=network)
    images = create_dataset("", root=photographs)
    images.reader.samples = images.reader.samples[rank::world_size]
    loader = create_loader(
        images,
        **{key: data[key] for key in ("input_size", "interpolation", "mean", "std", "crop_pct")},
        batch_size=BATCH_SIZES[1],
        num_workers=workers(world_size),
        device=torch.device("cpu"),
    )
    best = []
    with torch.inference_mode():
        for pixels, _ in loader:
            best.append(torch.cat(network(pixels).softmax(-1).topk(1), dim=1))
    files = images.filenames(absolute=True)
    return [
        (file, names[int(label)], score) for file, (score, label) in zip(files, torch.cat(best).tolist(), strict=True)
    ]


def by_transformers(model: str, photographs: str, rank: int, world_size: int, batch_size: int) -> list[tuple]:
    from transformers import pipeline

    files = sorted(map(str, Path(photographs).rglob("*.jpg")))[rank::world_size]
    classify = pipeline("image-classification", model, batch_size=batch_size, num_workers=workers(world_size))
    found = classify(files, top_k=1)
    return [(file, best["label"], best["score"]) for file, (best,) in zip(files, found, strict=True)]


def workers(world_size: int) -> int:
    """Data workers of a process: one per core in total."""
    return max(1, len(os.sched_getaffinity(0)) // world_size)


def run_peer(peer: str, model: str, photographs: str, output: str, *batch_size: str) -> None:
    """The command of a peer, on this rank."""
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    by = {"timm": by_timm, "transformers": by_transformers}[peer]
    rows = by(model, photographs, rank, world_size, *map(int, batch_size))
    with open(f"{output}.{rank}.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", "class", "score"), *rows])


# ---- turns


def command(way: str, processes: int, *words: object) -> list[object]:
    """`way` with `words`: model, photographs, output and, of the pipeline, its batch size."""
    if way == "ours":
        model, photographs, output = words
        launch = ["accelerate", "launch", "--config_file", ROOT / "accelerate_configs/multi_cpu.yaml"]
        start = [*launch, "-m"] if processes > 1 else [sys.executable, "-m"]
        flags = ["--format", "csv", "--output", f"{output}.csv", "--workers", workers(processes)]
        return [*start, "tools.predict", model, photographs, *flags]
    start = ["torchrun", "--nproc_per_node", processes, "--standalone"] if processes > 1 else [sys.executable]
    return [*start, Path(__file__).resolve(), "--peer", way, *words]


def whole_commands(scratch: Path, images: int, turns: int) -> list[Row]:
    model, photographs, few = scratch / "model", scratch / "photographs", scratch / "few"
    make_model(MODEL, SIZE, model)
    make_photographs(photographs, 500, 375, images // 2)
    make_photographs(few, 500, 375, min(250, images // 2))
    tried = {size: command("transformers", 1, model, few, scratch / "try", size) for size in BATCH_SIZES}
    fastest = min(BATCH_SIZES, key=lambda size: seconds(tried[size]))
    print(f"{PIPELINE} is the fastest with batches of {fastest}", flush=True)
    rows = []
    for processes in (1, 2):

        def speed(way: str, *batch_size: int, processes: int = processes) -> float:
            output = Path(tempfile.mkdtemp(dir=scratch)) / "rows"
            taken = seconds(command(way, processes, model, photographs, output, *batch_size))
            written = sum(len(file.read_text().splitlines()) - 1 for file in output.parent.iterdir())
            if written != images:
                raise SystemExit(f"{way}: {written} of {images} images are in its output")
            return images / taken

        peers = {"timm's loader": partial(speed, "timm"), PIPELINE: partial(speed, "transformers", fastest)}
        speeds = take_turns({"ours": partial(speed, "ours")} | peers, turns)
        what = f"tools.predict, {processes} process{'es' * (processes > 1)}"
        rows += [compare(what, "images/s", speeds, peer, goal=GOAL) for peer in peers]
    return rows


def measure(quick: bool, brief: bool) -> tuple[list[Row], None]:
    with tempfile.TemporaryDirectory() as folder:
        return whole_commands(Path(folder), 40 if quick else 10_000, 1 if quick or brief else 3), None


if __name__ == "__main__":
    if "--peer" in sys.argv:
        run_peer(*sys.argv[2:])
    else:
        script(__doc__, measure)
