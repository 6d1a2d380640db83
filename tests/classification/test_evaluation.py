"""Evaluation: what it is given is checked; each image's prediction is what it counts."""

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from common.classification import Evaluation
from common.classification.batches import Batch
from common.data.source import Columns
from common.distributed.collectives import is_main, rank, world_size
from common.errors import Refused
from tests.harness.launching import Launcher

NAMES = ("a", 'b, or "B"', "=c", "d", "e", "f", "g")
UNREAD = 5  # this image could not be read
COUNT = 203


@dataclass(frozen=True, eq=False, kw_only=True)
class Listed(Columns):
    """Images of one colour."""

    def get_name(self, index: int) -> str:
        return f"images/{index}.png"

    def get_content(self, index: int) -> Image.Image:
        return Image.new("RGB", (300, 200 + index))


class Pictures:
    """What an evaluation wants to have drawn, by name."""

    def __init__(self) -> None:
        self.drawn: dict[str, tuple] = {}

    def draw(self, name: str, function, *arguments) -> None:
        self.drawn[name] = arguments


def draw_samples(multi_label: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits on a coarse grid, so that ties are common, and labels."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (COUNT, len(NAMES)), generator=generator) / 2
    logits[7] = 0.0
    logits[8, 2] = 1000.0  # sure: its loss is 0 or -0
    labels = torch.randint(0, len(NAMES), (COUNT,), generator=generator)
    labels[8] = 2
    if multi_label:
        labels = (logits > 0) ^ (torch.rand(COUNT, len(NAMES), generator=generator) < 0.2)
    return logits, labels


def evaluate(multi_label: bool, folder: Path | None = None) -> Evaluation:
    """An evaluation of a rank's share of the batches, which come in the order of no image."""
    logits, labels = draw_samples(multi_label)
    data = Listed(labels=labels.numpy(), classes=NAMES)
    evaluation = Evaluation(data, "cpu")
    for indices in torch.arange(COUNT).flip(0).split(17)[rank() :: world_size()]:
        batch = Batch(torch.zeros(0), labels[indices], indices, readable=indices != UNREAD)
        evaluation.update(batch, logits[indices])
    return evaluation


def write_on_rank(folder: Path, multi_label: bool) -> dict:
    evaluation = evaluate(multi_label)
    results = evaluation.results()
    if is_main():
        evaluation.write_predictions(folder)
    return results


def draw_on_rank() -> list[tuple]:
    """The mistakes that a rank would draw: index, confidence."""
    evaluation = evaluate(False)
    evaluation.results()
    pictures = Pictures()
    evaluation.draw(pictures)
    _, mistakes = pictures.drawn["mistakes"]
    return [(index, row[3]) for index, row in mistakes]


@pytest.mark.parametrize(
    "outputs,named",
    [((torch.zeros(4, 3), torch.zeros(4, 2)), "tuple"), (torch.zeros(4, 3, 1), r"\[4, 3, 1\]")],
)
def test_outputs_that_are_no_logits_are_refused_in_one_line(outputs, named: str) -> None:
    labels = torch.zeros(4, dtype=torch.int64)
    data = Listed(labels=labels.numpy(), classes=("a", "b", "c"))
    batch = SimpleNamespace(labels=labels, readable=None)
    with pytest.raises(
        Refused,
        match=f"^evaluate: the model gave {named} instead of logits .*the recipe's predict$",
    ):
        Evaluation(data, "cpu").update(batch, outputs)


@pytest.mark.parametrize("multi_label", [False, True])
def test_predictions_are_what_was_counted_on_any_layout(processes, tmp_path, multi_label) -> None:
    files = []
    for ranks in (1, 2, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        results = processes.run(write_on_rank, folder, multi_label, ranks=ranks)[0]
        files.append((folder / "predictions.csv").read_bytes())
    assert files[0] == files[1] == files[2], "the same on 1 to 3 processes, byte for byte"
    rows = list(csv.DictReader(files[0].decode().splitlines()))
    logits, _ = draw_samples(multi_label)
    num_right = 0
    losses = []
    for index, row in enumerate(rows):
        assert row["path"] == f"images/{index}.png"
        num_right += row["label"] == row["predicted"] and row["score"] != "nan"
        losses.append(float(row["loss"]))
    assert len(rows) == COUNT
    accuracy = results["exact_match" if multi_label else "top1"]
    assert accuracy == num_right / COUNT
    assert 0 < accuracy < 1
    assert np.nanmean(losses) == pytest.approx(results["loss"], abs=1e-6)
    assert np.flatnonzero(np.isnan(losses)).tolist() == [UNREAD]
    assert rows[UNREAD]["predicted"] == ""
    assert rows[UNREAD]["score"] == "nan"
    assert results["broken"] == 1
    if multi_label:
        expected = [";".join(NAMES[k] for k in row.nonzero()[:, 0]) for row in logits > 0]
        probabilities = logits.double().sigmoid()
        scores = torch.maximum(probabilities, 1 - probabilities).amin(1)
    else:
        csv_names = ["'=c" if name == "=c" else name for name in NAMES]  # no formula
        expected = [csv_names[k] for k in logits.argmax(1)]
        scores = logits.double().softmax(1).amax(1)
    for index, row in enumerate(rows):
        if index != UNREAD:
            assert row["predicted"].removeprefix("'") == expected[index].removeprefix("'"), index
            assert float(row["score"]) == pytest.approx(scores[index].item(), abs=1e-6)
    name = "f1_class" if multi_label else "accuracy_class"
    for class_name, value in zip(NAMES, results["per_class"], strict=True):
        assert results[f"{name}/{class_name}"] == value


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_mistakes_are_the_most_confident_wrong_ones(processes, ranks: int) -> None:
    """On every rank in the same order. An image that could not be read is no mistake to look at."""
    logits, labels = draw_samples(False)
    confidences, predicted = logits.softmax(1).max(1)
    confidences = confidences.tolist()
    wrong = (predicted != labels).nonzero()[:, 0].tolist()
    wrong.remove(UNREAD)
    most_confident = sorted(wrong, key=lambda index: (-confidences[index], index))[:24]
    expected = [(index, pytest.approx(confidences[index], abs=1e-6)) for index in most_confident]
    assert processes.run(draw_on_rank, ranks=ranks) == [expected] * ranks


def test_the_worst_are_shown_small_by_their_loss() -> None:
    evaluation = evaluate(False)
    evaluation.results()
    columns, *rows = evaluation.worst()
    assert columns == ("image", "path", "label", "predicted", "score", "loss")
    assert len(rows) == 100
    logits, labels = draw_samples(False)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    losses[UNREAD] = -1
    expected = losses.sort(descending=True).values[:100].tolist()
    assert [row[-1] for row in rows] == pytest.approx(expected, abs=1e-6)
    paths = {row[1] for row in rows}
    assert len(paths) == 100
    assert f"images/{UNREAD}.png" not in paths
    sizes = Counter(max(row[0].size) for row in rows)
    assert sizes == {128: 100}


# Evaluates many images; prints bytes of memory for each, and microseconds, also of writing.
MANY = """
import ctypes, re, sys, time
import numpy as np, torch
from pathlib import Path
from common.classification import Evaluation
from common.classification.batches import Batch
from common.data.source import Files, encode_paths

count, folder = int(sys.argv[1]), Path(sys.argv[2])

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def memory():
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present memory
    return peak()

def evaluate(count):
    paths = encode_paths(f"n{i % 1000:08d}/ILSVRC2012_val_{i:08d}.JPEG" for i in range(count))
    labels = np.arange(count) % 10
    sizes = np.zeros(count, np.int64)
    data = Files("/data/val", paths, sizes, labels=labels, classes=tuple("0123456789"))
    logits = torch.rand(512, 10)
    batches = []
    for indices in torch.arange(count).split(512):
        batches.append(Batch(None, torch.from_numpy(labels[indices]), indices))
    before = memory()
    began = time.perf_counter()
    evaluation = Evaluation(data, "cpu")
    for batch in batches:
        evaluation.update(batch, logits[: len(batch.labels)])
    evaluation.results()
    evaluated = time.perf_counter()
    evaluation.write_predictions(folder)
    written = time.perf_counter()
    return 1024 * (peak() - before), 1e6 * (evaluated - began), 1e6 * (written - evaluated)

evaluate(2000)
print(*(value / count for value in evaluate(count)))
"""


@pytest.mark.alone
def test_many_images_take_little_memory(launch: Launcher, tmp_path, record_property) -> None:
    """64 bytes each, 64 MB for a million; all rows of the file would take ten times as much."""
    ended = launch.start_python(["-c", MANY, 400_000, tmp_path]).finish()
    assert ended.returncode == 0, ended
    memory, evaluating, writing = map(float, ended.stdout.split())
    record_property("bytes per image", memory)
    record_property("us per image, evaluating", evaluating)
    record_property("us per image, writing", writing)
    assert memory < 64
