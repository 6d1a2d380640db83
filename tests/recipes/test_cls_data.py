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


def picture(label: int, number: int) -> np.ndarray:
    """uint8[40, 56, 3]: a colour for the class, noise for the number."""
    noise = np.random.default_rng([label, number]).integers(0, 60, (40, 56, 3))
    return (noise + 60 * np.roll([0, 1, 3], label)).clip(0, 255).astype(np.uint8)


def write(folder: Path, label: int, number: int) -> None:
    """The picture in one of ten kinds of image file."""
    image = Image.fromarray(picture(label, number))
    rotated = Image.Exif()
    rotated[0x0112] = 6
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
    name, image, options = kinds[number % len(kinds)]
    folder.mkdir(parents=True, exist_ok=True)
    image.save(folder / f"{number:02} {name}", **options)


def write_classes(folder: Path, counts: Sequence[int], start: int = 0) -> Path:
    for label, (name, count) in enumerate(zip(CLASSES, counts, strict=True)):
        for number in range(start, start + count):
            write(folder / name, label, number)
    return folder


def damage(folder: Path) -> list[Path]:
    """Break three files below `folder`, each in another way; what a person would find damaged."""
    cut, empty, bomb = (
        sorted((folder / name).iterdir())[place] for name, place in zip(CLASSES, (0, 4, 8), strict=True)
    )
    cut.write_bytes(cut.read_bytes()[:600])
    empty.write_bytes(b"")
    Image.new("1", (20_000, 20_000)).save(bomb, format="png")  # 50 kB, which take 1.2 GB when they are decoded
    return [cut, empty, bomb]


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
    """The same images from several sources, whole and broken, below a folder whose name is hard for careless programs."""
    datasets.disable_progress_bars()
    root = tmp_path_factory.mktemp("a folder") / "with spaces, 'quotes' & ümläuts"
    for name in ("whole", "broken"):
        write_classes(root / name / "train", (10, 10, 10))
        write_classes(root / name / "val", (5, 4, 4), start=10)
    broken = [*damage(root / "broken/train"), *sorted((root / "broken/val").glob("*/*"))[::6]]
    for file in broken[3:]:
        file.write_bytes(b"no picture")
    (root / "broken.txt").write_text("\n".join(map(str, broken)))
    for name in ("whole", "broken"):
        parts = {part: table(root / name / part) for part in ("train", "val")}
        datasets.DatasetDict(parts).save_to_disk(root / f"{name} saved")
    shutil.copytree(root / "broken", root / "readable")
    for file in broken[3:]:
        (root / "readable" / file.relative_to(root / "broken")).unlink()
    return root


# ---- the runs

CASES = {  # each on one and on two ranks
    "whole": [],
    "broken": [],
    "many broken": ["--data", "DATA/broken", "--max_broken_share", 0.003],
    "first half": ["--data", "DATA/broken", "--name", "halves", "--max_steps", 4, "--workers", 1],
    "second half": ["--data", "DATA/broken", "--name", "halves"],
}
ON_TWO = {
    "whole saved": [],
    "broken saved": ["--workers", 2],
    "readable": [],
}


@pytest.fixture(scope="module")
def runs(run_several, data) -> dict[int, dict[str, Outcome]]:
    """What became of each case on one and on two ranks."""
    outcomes = {}
    for world, cases in ((1, CASES), (2, CASES | ON_TWO)):
        commands = {}
        for name, words in cases.items():
            words = [str(word).replace("DATA", str(data)) for word in words]
            words += [] if "--data" in words else ["--data", str(data / name)]
            words += [] if "--output_dir" in words else ["--output_dir", str(data / f"runs of {world}")]
            commands[name] = [*WORDS, *words]
        outcomes[world] = run_several(world, commands)
    return outcomes


ENDS = {"many broken": "refused"}
LENGTHS = {"many broken": 4}  # rows at the end


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_see_the_same_samples_as_one(runs, name):
    one, two = runs[1][name], runs[2][name]
    assert one.outcome == two.outcome == ENDS.get(name, "ok"), (one, two)
    assert one.text == two.text.replace("runs of 2", "runs of 1")
    losses = one.column("train/loss")
    assert len(losses) == LENGTHS.get(name, STEPS)
    assert np.abs(losses - two.column("train/loss")).max() < CLOSE
    assert np.array_equal(one.column("data/broken"), two.column("data/broken"))
    if name != "many broken":
        assert np.abs(one.column("eval/loss") - two.column("eval/loss")).max() < CLOSE
        assert np.array_equal(one.column("eval/top1"), two.column("eval/top1"))


@pytest.mark.parametrize("one", ["whole", "broken"])
def test_the_same_images_as_a_data_set_of_hugging_face_train_the_same_model(runs, one):
    for key in ("train/loss", "data/broken", "eval/loss", "eval/top1", "eval/broken"):
        assert np.array_equal(runs[2][one].column(key), runs[2][f"{one} saved"].column(key))


def test_images_of_all_kinds_are_learnt(runs):
    for name in ("whole", "broken"):
        losses = runs[2][name].column("train/loss")
        assert losses[-3:].mean() < 0.7 * losses[0], (name, losses)


def test_broken_images_are_named_once_with_the_reason_and_counted_each_time(runs, data):
    outcome, broken = runs[2]["broken"], (data / "broken.txt").read_text().splitlines()[:3]
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
    for world in (1, 2):
        halves, whole = runs[world]["second half"], runs[world]["broken"]
        assert "resuming from step 4 of 8" in halves.stdout
        assert np.abs(halves.column("train/loss") - whole.column("train/loss")).max() < CLOSE
        assert np.array_equal(halves.column("data/broken"), whole.column("data/broken"))


def test_too_many_broken_images_stop_the_run_with_the_share_and_the_limit(runs):
    for world in (1, 2):
        outcome = runs[world]["many broken"]
        limit = "more than --max_broken_share 0.003 of each 1,000: mend the data, or raise the limit"
        assert re.fullmatch(
            rf"step 5: 4 of the last 40 images could not be read \(the last: .*\), {limit}", outcome.text
        )
        assert outcome.rows[-1]["step"] == 4 and outcome.rows[-1]["data/broken"] <= 3
        status = outcome.read("status.json")
        assert (status["status"], status["cause"]) == ("failed", outcome.text)


def test_a_broken_image_counts_as_wrong_in_evaluation_not_as_absent(runs, data):
    """The same training, evaluated with and without three images that can't be read."""
    absent = len((data / "broken.txt").read_text().splitlines()) - 3
    assert absent == 3
    broken, readable = runs[2]["broken"], runs[2]["readable"]
    assert np.array_equal(broken.column("train/loss"), readable.column("train/loss"))
    assert (broken.column("eval/count") == 13).all() and (readable.column("eval/count") == 13 - absent).all()
    assert (broken.column("eval/broken") == absent).all() and (readable.column("eval/broken") == 0).all()
    right = readable.column("eval/top1") * (13 - absent)
    assert right.max() > 0 and np.allclose(broken.column("eval/top1") * 13, right)
    assert np.allclose(broken.column("eval/loss"), readable.column("eval/loss"))
