"""Broken images do not stop the classification recipe, and are counted; folders may have any name.

Each case is the real recipe on one and on two ranks, in float64, where both must see the same samples and make the same steps.
"""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.harness.outcomes import Outcome
from tests.harness.shards import draw_noise

STEPS = 8  # of 8 samples: two passes over 30 images and the beginning of a third
WORDS = f"--model test_vit --dtype float64 --global_batch_size 8 --max_steps {STEPS} --log_every 1 --schedule constant".split()
CLOSE = 1e-9


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Images, some of them broken, in a folder with a difficult name; and without those to evaluate on."""
    root = tmp_path_factory.mktemp("a folder") / "with spaces, 'quotes' & ümläuts"
    draw_noise(root / "broken/train", (10, 10, 10))
    draw_noise(root / "broken/val", (5, 4, 4))
    unreadable = sorted((root / "broken/val").glob("*/*"))[::6]
    for file in unreadable:
        file.write_bytes(b"no picture")
    cut, empty, bomb = sorted((root / "broken/train").glob("*/*"))[::12]
    cut.write_bytes(cut.read_bytes()[:600])
    empty.write_bytes(b"")
    Image.new("1", (20_000, 20_000)).save(bomb, format="png")  # 50 kB, which take 1.2 GB when they are decoded
    (root / "broken.txt").write_text("\n".join(map(str, (cut, empty, bomb))))
    shutil.copytree(root / "broken", root / "readable")
    for file in unreadable:
        (root / "readable" / file.relative_to(root / "broken")).unlink()
    return root


@pytest.fixture(scope="module")
def runs(run_several, data, tmp_path_factory) -> dict[str, Outcome]:
    """On one rank, and on two, which also end what the one has begun."""
    half = ["--data", data / "broken", "--name", "half", "--output_dir", tmp_path_factory.mktemp("half")]
    one = {"one": ["--data", data / "broken"], "begun": [*half, "--max_steps", 4]}
    two = {name: ["--data", data / name] for name in ("broken", "readable")} | {"ended": half}
    runs = run_several(1, {name: [*WORDS, *words] for name, words in one.items()})
    runs |= run_several(2, {name: [*WORDS, *words] for name, words in two.items()})
    assert not {name: run.text for name, run in runs.items() if run.outcome != "ok"}
    return runs


def test_two_ranks_see_the_same_samples_as_one(runs):
    one, two = runs["one"], runs["broken"]
    losses = one.column("train/loss")
    assert len(losses) == STEPS and losses[-3:].mean() < 0.7 * losses[0]
    for key in ("train/loss", "eval/loss"):
        assert np.abs(one.column(key) - two.column(key)).max() < CLOSE
    for key in ("data/broken", "eval/top1"):
        assert np.array_equal(one.column(key), two.column(key))


def test_broken_images_are_named_once_with_the_reason_and_counted_each_time(runs, data):
    outcome, broken = runs["broken"], (data / "broken.txt").read_text().splitlines()
    lines = [line for line in outcome.stdout.splitlines() if "can't be read" in line]
    reasons = (".*[Tt]runcated.*", "not an image: empty, .*", r"DecompressionBombError: .*\(400000000 pixels\).*")
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
