"""A run finds wrong labels: of 5 % that were changed, nearly all are among the worst 6 %, in the same order on any layout.

Also after kills and on another number of processes, since the sums are part of a checkpoint.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from common.classification import sources
from tests.harness import fashion_mnist
from tests.harness.interrupted import Interrupted
from tests.harness.outcomes import Outcome

SHARE = 0.05  # of the labels
EXACT = (
    "--model test_vit --dtype float64 --max_steps 24 --log_every 1 --schedule constant --lr 2e-3 --global_batch_size 48"
)
EXACT += " --eval_every 1000 --mixup 0.2 --label_smoothing 0.1 --val_share 0.8"


def spoil(labels: np.ndarray, classes: int) -> np.ndarray:
    """`labels`, of which `SHARE` are another class: each other class as often."""
    random, given = np.random.default_rng(0), labels.copy()
    chosen = random.permutation(len(labels))[: round(SHARE * len(labels))]
    given[chosen] = (labels[chosen] + random.integers(1, classes, len(chosen))) % classes
    return given


def save(folder: Path, images: list[Image.Image], labels: np.ndarray, names: list[str]) -> Path:
    """A CSV file of the images with some wrong labels; which are wrong is in truth.json, by the file's name."""
    (folder / "images").mkdir(parents=True)
    given = spoil(labels, len(names))
    lines = ["path,label"]
    for number, (image, label) in enumerate(zip(images, given.tolist(), strict=True)):
        image.save(folder / f"images/{number}.png")
        lines.append(f"images/{number}.png,{names[label]}")
    (folder / "data.csv").write_text("\n".join(lines))
    (folder / "truth.json").write_text(json.dumps([names[label] for label in labels]))
    return folder / "data.csv"


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """The handwritten digits with wrong labels."""
    train, val = sources.load(sources.Spec("digits", seed=0, val_share=0.2))
    images = [source.image(index) for source in (train, val) for index in range(len(source))]
    labels = np.concatenate([train.labels, val.labels])
    return save(tmp_path_factory.mktemp("digits"), images, labels, list(train.classes))


def found(folder: Path, data: Path) -> tuple[float, float, float]:
    """AUROC of the mean margin, recall within the worst 6 %, and the share of right suggestions among the wrong labels."""
    from sklearn.metrics import roc_auc_score

    truth = json.loads((data.parent / "truth.json").read_text())
    train, _ = sources.load(sources.Spec(str(data), seed=0, val_share=0.2))
    true = [truth[int(Path(train.name(index)).stem)] for index in range(len(train))]
    wrong = np.array([train.classes[label] != name for label, name in zip(train.labels, true, strict=True)])
    newest = max((folder / "checkpoints").glob("step_*"))
    sums = load_file(newest / "audit.safetensors")
    rows = suspicious(folder)
    assert len(rows) == np.ceil(0.06 * len(train))
    of_row = [truth[int(Path(row["image"]).stem)] for row in rows]
    caught = [name for row, name in zip(rows, of_row, strict=True) if row["label"] != name]
    right = [name for row, name in zip(rows, of_row, strict=True) if row["suggested"] == name != row["label"]]
    return roc_auc_score(wrong, -sums["margin"] / sums["seen"]), len(caught) / wrong.sum(), len(right) / len(caught)


def suspicious(folder: Path) -> list[dict]:
    with (folder / "suspicious.csv").open() as lines:
        return list(csv.DictReader(lines))


def test_changed_labels_of_digits_are_found_after_a_kill(launch, digits, tmp_path) -> None:
    words = ["--data", digits, "--config", "recipes/presets/digits.yaml", "--epochs", 6, "--checkpoint_every", 25]
    words += ["--output_dir", tmp_path, "--name", "killed", "--tracker", "none", "--log_every", 1, "--workers", 1]
    started = launch.start("multi_cpu", "recipes/cls.py", *words, process_group=0)
    Interrupted(started, tmp_path / "killed").at_step(60).interrupt("KILL all").gone()
    done = launch("multi_cpu", "recipes/cls.py", *words, timeout=300)
    assert done.returncode == 0 and "resuming from step 50" in done.stdout, done.stderr
    folder = tmp_path / "killed"
    auroc, recall, suggested = found(folder, digits)
    assert auroc > 0.98 and recall >= 0.9 and suggested > 0.8, (auroc, recall, suggested)
    seen = load_file(max((folder / "checkpoints").glob("step_*")) / "audit.safetensors")["seen"]
    steps = max(row["step"] for row in Outcome("ok", "", "", 0.0, folder).rows)
    assert seen.sum() == 64 * steps and seen.min() >= 6, "each sample of each step counts once"
    assert (folder / "pictures/suspicious.png").stat().st_size > 10_000


def test_the_ranking_is_the_same_on_any_layout_and_after_a_move(run_several, digits, tmp_path) -> None:
    words = ["--data", digits, *EXACT.split(), "--output_dir", tmp_path]
    half = [*words, "--name", "moved", "--max_steps", 10]
    runs = run_several(1, {"one": words, "moved": half, "old": [*half[:-4], "--name", "old", "--max_steps", 10]})
    # A checkpoint from before runs were audited: the sums begin with the next step.
    old = runs["old"].checkpoint
    (old / "audit.safetensors").unlink()
    manifest = json.loads((old / "manifest.json").read_text())
    del manifest["audit.safetensors"]
    (old / "manifest.json").write_text(json.dumps(manifest))
    runs |= run_several(2, {"two": [*words, "--max_micro_batch_size", 6, "--workers", 1], "old": words})
    runs |= run_several(3, {"three": words, "moved": words})
    assert {run.outcome for run in runs.values()} == {"ok"}
    one = suspicious(runs["one"].folder)
    assert len(one) >= 20 and max(int(row["times_seen"]) for row in one) > 2
    for name in ("two", "three", "moved"):
        other = suspicious(runs[name].folder)
        for key in ("rank", "image", "label", "suggested", "times_seen"):
            assert [row[key] for row in other] == [row[key] for row in one], (name, key)
        for key in ("mean_margin", "mean_loss"):
            assert [float(row[key]) for row in other] == pytest.approx([float(row[key]) for row in one], abs=2e-6)
    counted = {name: int(runs[name].tensors("audit")["seen"].sum()) for name in ("old", "one")}
    assert 0 < counted["old"] < 0.75 * counted["one"], "14 of 24 steps"


@pytest.mark.long
def test_changed_labels_of_fashion_mnist_are_found(launch, tmp_path) -> None:
    if not fashion_mnist.FILES.is_dir():
        pytest.skip(f"needs Debian's package {fashion_mnist.PACKAGE}")
    import datasets

    fashion_mnist.save_fashion_mnist(tmp_path / "all")
    train = datasets.load_from_disk(str(tmp_path / "all"))["train"]
    data = save(tmp_path / "spoilt", train["image"], np.array(train["label"]), train.features["label"].names)
    words = [
        "--data",
        data,
        "--config",
        "recipes/presets/digits.yaml",
        "--epochs",
        4,
        "--crop_scale",
        0.8,
        "--lr",
        2e-3,
    ]
    words += ["--output_dir", tmp_path, "--name", "fashion", "--tracker", "none"]
    done = launch("multi_cpu", "recipes/cls.py", *words, timeout=1200)
    assert done.returncode == 0, done.stderr
    auroc, recall, _ = found(tmp_path / "fashion", data)
    assert auroc > 0.98 and recall > 0.88, (auroc, recall)
