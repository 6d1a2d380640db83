"""Labels that a model contradicts: nobody is accused where its own doubt explains them, and wrong
ones are found.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.classification.batches import Batch
from tools.audit import labels as audit

CLASSES = tuple("abcdefghij")


def build_source(labels: np.ndarray):
    name = "{}.png".format
    return SimpleNamespace(
        labels=labels, classes=CLASSES, multi_label=labels.ndim == 2, get_name=name
    )


def find_suspects(
    labels: np.ndarray, logits: torch.Tensor, broken: tuple[int, ...] = ()
) -> audit.Suspects:
    """Find suspects in images with these labels and logits, in batches of 64."""
    batches = []
    for indices in torch.arange(len(labels)).split(64):
        readable = torch.tensor([index not in broken for index in indices.tolist()])
        batch = Batch(
            torch.zeros(len(indices), 0),
            torch.from_numpy(labels[indices]),
            indices,
            readable=readable,
        )
        batches.append((batch, logits[indices]))
    return audit.find_suspects(build_source(labels), batches, "cpu")


def build_predictions(images: int = 4000, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """Labels drawn with the very probabilities that the model gives: classes 0 to 4 are alike, the
    others are not.
    """
    random = np.random.default_rng(seed)
    true = random.integers(10, size=images)
    logits = random.normal(size=(images, 10))
    logits[:, :5] += 2 * (true < 5)[:, None]
    logits[np.arange(images), true] += 4
    probabilities = torch.from_numpy(logits).softmax(1).numpy()
    labels = (probabilities.cumsum(1) > random.random((images, 1))).argmax(1)
    # A model that has trained on these labels fits them better than its probabilities say.
    logits[np.arange(images), labels] += 2
    return labels, torch.from_numpy(logits)


@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_only_doubts_accuses_nobody(seed: int) -> None:
    labels, logits = build_predictions(seed=seed)
    suspects = find_suspects(labels, logits)
    worst = int(suspects.indices[0])
    assert suspects.num_likely == 0 and suspects.unlearned == [] and suspects.num_images == 4000
    without = find_suspects(labels, logits, broken=(worst,))
    assert without.num_images == 3999 and worst not in without.indices
    assert (logits.argmax(1).numpy() != labels).sum() > 20, (
        "it is wrong somewhere, or this proves nothing"
    )
    assert len(suspects.indices) == min(240, (logits.argmax(1).numpy() != labels).sum())


def test_a_class_that_was_not_learnt_gets_a_line_of_its_own() -> None:
    labels, logits = build_predictions()
    rare = np.flatnonzero(labels == 9)
    logits[rare, 9] -= 12  # what is left of the class looks like others
    labels[rare[20:]] = logits[rare[20:], :9].argmax(1).numpy()
    suspects = find_suspects(labels, logits)
    assert suspects.num_likely == 0 and not np.isin(suspects.indices, rare[:20]).any()
    ((class_id, _, num_contradicted, num_images),) = suspects.unlearned
    assert (class_id, num_contradicted, num_images) == (9, 20, 20)
    header, first, *other_rows = audit.build_table(build_source(labels), suspects)
    row = dict(zip(header, first, strict=True))
    assert (row["verdict"], row["image"], row["label"]) == ("class", "20 of 20 images", "j")
    assert {dict(zip(header, row, strict=True))["verdict"] for row in other_rows} == {
        "worth a look"
    }
    summary = audit.summarize(build_source(labels), suspects)
    assert "no label is likely wrong; class j: 20 of 20 images look like others" in summary


def test_of_several_labels_the_worst_decision_counts() -> None:
    labels = np.zeros((3, 10), bool)
    labels[0, 1] = labels[1, 2] = labels[2, 3] = True
    logits = torch.where(torch.from_numpy(labels), 5.0, -5.0).double()
    logits[0, 4] = 3.0
    logits[1, 2] = -3.0
    suspects = find_suspects(labels, logits)
    assert suspects.num_likely == 0
    table = audit.build_table(build_source(labels), suspects)
    assert [row[2:5] for row in table[1:]] == [("0.png", "b", "+e")], "6 % of three images: one row"
