"""The classification recipe trains on data as people have them: any kind of image, any source, some images broken.

Each case is the real recipe on one and on two ranks, in float64, where both must see the same samples and make the same steps.
"""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from tests.harness.outcomes import Outcome

CLASSES = ("an emu", "chat", "犬")
STEPS = 8  # of 8 samples: two passes over 30 images and the beginning of a third
WORDS = f"--model test_vit --dtype float64 --global_batch_size 8 --max_steps {STEPS} --log_every 1 --schedule constant".split()
CLOSE = 1e-9


# ---- the data


def write_classes(folder: Path, counts: Sequence[int], start: int = 0) -> None:
    """Pictures in ten kinds of image file: a colour for the class, noise for the number."""
    rotated = Image.Exif()
    rotated[0x0112] = 6
    for label, (name, count) in enumerate(zip(CLASSES, counts, strict=True)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(start, start + count):
            noise = np.random.default_rng([label, number]).integers(0, 60, (40, 56, 3))
            pixels = (noise + 60 * np.roll([0, 1, 3], label)).clip(0, 255).astype(np.uint8)
            image = Image.fromarray(pixels)
            grey = np.asarray(image.convert("L"))
            kinds = (
                ("rgb.jpg", image, {}),
                ("grey.png", image.convert("L"), {}),
                ("palette.gif", image.quantize(16), {"transparency": 3}),
                ("transparent.webp", image.convert("RGBA"), {}),
                ("print.jpg", image.convert("CMYK"), {}),
                ("16bit.png", Image.fromarray(grey.astype(np.uint16) * 257), {}),
                ("turned.JPEG", image, {"exif": rotated}),
                ("float.tiff", Image.fromarray(grey.astype(np.float32) / 255), {}),
                ("grey and transparent.png", image.convert("LA"), {}),
                ("black and white.bmp", image.convert("1"), {}),
            )
            kind, image, options = kinds[number % len(kinds)]
            image.save(folder / name / f"{number:02} {kind}", **options)


def table(folder: Path) -> datasets.Dataset:
    """The files below `folder` as rows, in the order in which the folder itself is read."""
    rows = {"picture": [], "kind": []}
    for label, name in enumerate(CLASSES):
        for file in sorted((folder / name).iterdir(), key=os.fsencode):
            rows["picture"].append({"bytes": file.read_bytes(), "path": None})
            rows["kind"].append(label)
    features = {"picture": datasets.Image(), "kind": datasets.ClassLabel(names=list(CLASSES))}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Images, some of them broken, from several sources, in a folder with a difficult name."""
    datasets.disable_progress_bars()
    root = tmp_path_factory.mktemp("a folder") / "with spaces, 'quotes' & ümläuts"
    write_classes(root / "broken/train", (10, 10, 10))
    write_classes(root / "broken/val", (5, 4, 4), start=10)
    unreadable = sorted((root / "broken/val").glob("*/*"))[::6]
    for file in unreadable:
        file.write_bytes(b"no picture")
    places = zip(CLASSES, (0, 4, 8), strict=True)
    cut, empty, bomb = (sorted((root / "broken/train" / name).iterdir())[place] for name, place in places)
    cut.write_bytes(cut.read_bytes()[:600])
    empty.write_bytes(b"")
    Image.new("1", (20_000, 20_000)).save(bomb, format="png")  # 50 kB, which take 1.2 GB when they are decoded
    (root / "broken.txt").write_text("\n".join(map(str, (cut, empty, bomb))))
    parts = {part: table(root / "broken" / part) for part in ("train", "val")}
    datasets.DatasetDict(parts).save_to_disk(root / "saved")
    shutil.copytree(root / "broken", root / "readable")
    for file in unreadable:
        (root / "readable" / file.relative_to(root / "broken")).unlink()
    return root


@pytest.fixture(scope="module")
def runs(run_several, data, tmp_path_factory) -> dict[str, Outcome]:
    """On one rank, and on two, which also end what the one has begun."""
    half = ["--data", data / "broken", "--name", "half", "--output_dir", tmp_path_factory.mktemp("half")]
    one = {"one": ["--data", data / "broken"], "begun": [*half, "--max_steps", 4]}
    two = {name: ["--data", data / name] for name in ("broken", "saved", "readable")} | {"ended": half}
    runs = run_several(1, {name: [*WORDS, *words] for name, words in one.items()})
    runs |= run_several(2, {name: [*WORDS, *words] for name, words in two.items()})
    assert not {name: run.text for name, run in runs.items() if run.outcome != "ok"}
    return runs


def test_two_ranks_see_the_same_samples_as_one_and_learn_images_of_all_kinds(runs):
    one, two = runs["one"], runs["broken"]
    losses = one.column("train/loss")
    assert len(losses) == STEPS and losses[-3:].mean() < 0.7 * losses[0]
    for key in ("train/loss", "eval/loss"):
        assert np.abs(one.column(key) - two.column(key)).max() < CLOSE
    for key in ("data/broken", "eval/top1"):
        assert np.array_equal(one.column(key), two.column(key))


def test_the_same_images_as_a_data_set_of_hugging_face_train_the_same_model(runs):
    for key in ("train/loss", "data/broken", "eval/loss", "eval/top1", "eval/broken"):
        assert np.array_equal(runs["broken"].column(key), runs["saved"].column(key))


def test_broken_images_are_named_once_with_the_reason_and_counted_each_time(runs, data):
    outcome, broken = runs["broken"], (data / "broken.txt").read_text().splitlines()
    lines = [line for line in outcome.stdout.splitlines() if "can't be read" in line]
    reasons = ("Truncated File Read", "not an image: empty, .*", r"DecompressionBombError: .*\(400000000 pixels\).*")
    for file, reason in zip(broken, reasons, strict=True):
        (line,) = [line for line in lines if file in line]
        assert re.fullmatch(f"can't be read, a stand-in takes its place: {re.escape(file)}: {reason}", line), line
    assert len(lines) == 3
    counts = outcome.column("data/broken")
    assert (np.diff(counts) >= 0).all() and 2 * 3 <= counts[-1] <= 3 * 3  # in two epochs and a piece of the third
    summary = outcome.read("summary.json")
    assert (summary["broken_files"], summary["broken_draws"]) == (3, counts[-1])


def test_a_resumed_run_replaces_broken_images_by_the_same_neighbours_and_goes_on_counting(runs):
    ended, whole = runs["ended"], runs["one"]
    assert "resuming from step 4 of 8" in ended.stdout
    assert np.abs(ended.column("train/loss") - whole.column("train/loss")).max() < CLOSE
    assert np.array_equal(ended.column("data/broken"), whole.column("data/broken"))


def test_a_broken_image_counts_as_wrong_in_evaluation_not_as_absent(runs):
    """The same training, evaluated with and without three images that can't be read."""
    broken, readable = runs["broken"], runs["readable"]
    assert np.array_equal(broken.column("train/loss"), readable.column("train/loss"))
    assert (broken.column("eval/count") == 13).all() and (readable.column("eval/count") == 10).all()
    assert (broken.column("eval/broken") == 3).all() and (readable.column("eval/broken") == 0).all()
    right = readable.column("eval/top1") * 10
    assert right.max() > 0 and np.allclose(broken.column("eval/top1") * 13, right)
    assert np.allclose(broken.column("eval/loss"), readable.column("eval/loss"))
