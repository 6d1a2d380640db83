"""Metrics equal a short script of their own, and each pixel is compared at the size of its image."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from common.classification.balancing import weigh_counts
from common.classification.batches import SelectClasses
from common.distributed.collectives import rank, world_size
from common.segmentation import evaluation as evaluation_module
from common.segmentation import plots
from common.segmentation.evaluation import Evaluation, compare_pixels, compute_metrics
from common.segmentation.losses import build_loss
from common.segmentation.masks import IGNORED
from common.segmentation.models import build_segmenter
from tests.harness.pictures import collect_texts

pytestmark = pytest.mark.smoke


class Data(list):
    """Masks as a source has them."""

    classes = "abc"

    def load_mask(self, index: int) -> np.ndarray:
        return self[index].numpy()


@pytest.mark.parametrize("chunk", [2**26, 3000])
@pytest.mark.parametrize("size", [(45, 61), (90, 122), (33, 20)])
def test_pixels_are_compared_as_by_resizing_all_logits(size, chunk, monkeypatch) -> None:
    """Logits of a canvas of 64 x 64 where the image has 45 x 61 pixels, some classes at a time."""
    monkeypatch.setattr(evaluation_module, "_CHUNK", chunk)
    torch.manual_seed(0)
    logits = torch.randn(7, 16, 16, dtype=torch.float64)
    labels = torch.randint(7, size)
    labels[0] = IGNORED
    whole = F.interpolate(logits[None], (64, 64), mode="bilinear")[:, :, :45, :61]
    if size != (45, 61):
        whole = F.interpolate(whole, size, mode="bilinear")
    predicted, losses = compare_pixels(logits, labels, (64, 64), (45, 61))
    expected = F.cross_entropy(whole, labels[None], ignore_index=IGNORED, reduction="none")[0]
    assert torch.equal(predicted, whole[0].argmax(0))
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    assert not losses[0].any()


def test_metrics_equal_a_short_script() -> None:
    generator = np.random.default_rng(0)
    truth = generator.integers(0, 4, 5000)
    predicted = np.where(generator.random(5000) < 0.6, truth, generator.integers(0, 6, 5000))
    confusion = np.zeros(
        (5, 7), np.int64
    )  # class 4 has no pixel; 5 is one that only the model knows
    np.add.at(confusion, (truth, predicted), 1)
    ious = []
    accuracies = []
    for class_id in range(4):
        is_true = truth == class_id
        is_predicted = predicted == class_id
        ious.append((is_true & is_predicted).sum() / (is_true | is_predicted).sum())
        accuracies.append((is_true & is_predicted).sum() / is_true.sum())
    results = compute_metrics(confusion)
    assert results["per_class"] == [*ious, None]
    assert results["mIoU"] == np.mean(ious)
    assert results["mean_class_accuracy"] == np.mean(accuracies)
    assert results["pixel_accuracy"] == (truth == predicted).mean()
    assert results["classes"] == 4
    nothing = compute_metrics(np.zeros((2, 3), np.int64))
    assert nothing["mIoU"] is None and nothing["per_class"] == [None, None]


def test_the_loss_is_a_mean_over_labelled_pixels_of_all_ranks() -> None:
    """However it is divided; an image without a labelled pixel counts 0."""
    torch.manual_seed(0)
    logits = torch.randn(4, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(3, (4, 32, 32), dtype=torch.int16)
    labels[0, :20] = IGNORED
    labels[2] = IGNORED
    data = Data(labels)
    config = SimpleNamespace(dtype="float64", class_weights="balanced", label_smoothing=0.1)
    compute_losses = build_loss(config, data, torch.device("cpu"))
    counts = torch.bincount(labels[labels != IGNORED].long(), minlength=3)
    totals = torch.tensor([counts.sum(), 4])
    parts = []
    for rows in ((0, 1), (1, 4)):
        batch = SimpleNamespace(labels=labels[slice(*rows)], totals=totals)
        parts.append(compute_losses(logits[slice(*rows)], batch))
    losses = torch.cat(parts)
    weights = torch.from_numpy(weigh_counts("balanced", counts.numpy()))
    assert (weights * counts).sum().item() == pytest.approx(counts.sum().item())
    resized = F.interpolate(logits, (32, 32), mode="bilinear")
    expected = F.cross_entropy(
        resized,
        labels.long(),
        weight=weights,
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=0.1,
    )
    assert losses[2] == 0
    torch.testing.assert_close(losses.mean(), expected / counts.sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "name, decoder, stride, cells",
    [
        ("test_resnet", "fpn", 32, 16),
        ("test_vit", "fpn", 32, 16),
        ("test_resnet", "linear", 32, 2),
        ("test_vit", "linear", 16, 4),
        ("test_efficientnet", "fpn", 32, 16),
    ],
)
def test_models_give_a_logit_for_each_class_and_cell(name, decoder, stride, cells) -> None:
    model = build_segmenter(name, 5, decoder=decoder, width=32).eval()
    assert model.stride == stride
    with torch.no_grad():
        logits = model(torch.randn(2, 3, 64, 96))
        assert logits.shape == (2, 5, cells, cells * 3 // 2)
        chosen = SelectClasses(model, [3, 0])(torch.zeros(1, 3, 64, 64))
    assert chosen.shape == (1, 2, cells, cells)
    rebuilt = build_segmenter(name, 5, decoder=decoder, width=32)
    for tensor, rebuilt_tensor in zip(model.parameters(), rebuilt.parameters(), strict=True):
        assert torch.equal(tensor, rebuilt_tensor), "the weights are a function of the seed"


class Unlabelled(Data):
    """Images that are not looked at."""

    model_classes = None


def evaluate_images(labels: torch.Tensor, logits: torch.Tensor) -> tuple[list, dict]:
    """The confusion matrix and the results of images of which each rank has every `world_size()`th."""
    evaluation = Evaluation(Unlabelled(labels), torch.device("cpu"))
    height, width = labels.shape[1:]
    for i in range(rank(), len(labels), world_size()):
        batch = SimpleNamespace(
            images=torch.zeros(1, 3, height, width),
            labels=labels[i : i + 1],
            positions=torch.tensor([i]),
            sizes=torch.tensor([[width, height]]),
        )
        evaluation.update(batch, logits[i : i + 1])
    results = evaluation.results()
    return evaluation.confusion.tolist(), results


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_counts_each_pixel_once(processes, ranks: int) -> None:
    """Rows of the confusion matrix are labels, and the loss is that of all images of all ranks."""
    torch.manual_seed(0)
    labels = torch.randint(3, (3, 16, 24), dtype=torch.int16)
    labels[0, :5] = IGNORED
    logits = torch.randn(3, 3, 16, 24, dtype=torch.float64)
    logits[:, 2] += 1  # so that the matrix is not symmetric
    is_labelled = labels != IGNORED
    confusion = np.zeros((3, 4), np.int64)
    np.add.at(confusion, (labels[is_labelled], logits.argmax(1)[is_labelled]), 1)
    loss = F.cross_entropy(logits, labels.long(), ignore_index=IGNORED)
    for counted, results in processes.run(evaluate_images, labels, logits, ranks=ranks):
        assert counted == confusion.tolist()
        assert results["loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert results["pixel_accuracy"] == pytest.approx(
            confusion.diagonal().sum() / is_labelled.sum().item()
        )


class Grey(Unlabelled):
    """Grey images of 8 x 10 pixels with masks of three classes."""

    def get_name(self, index: int) -> str:
        return f"{index}.png"

    get_listed_name = get_name

    def load_image(self, index: int) -> Image.Image:
        return Image.new("RGB", (10, 8), (100, 100, 100))


# The worst image, and the third worst.
UNREAD = 53
UNLABELLED = 39


def make_worse(num_images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks int16[N, 8, 10], and predictions that have i errors in image `(7 * i) % N`."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(3, (num_images, 8, 10), dtype=torch.int16, generator=generator)
    predicted = masks.clone()
    for i in range(num_images):
        index = (7 * i) % num_images
        predicted[index].view(-1)[:i] = (masks[index].view(-1)[:i] + 1) % 3
    masks[UNLABELLED] = IGNORED
    return masks, predicted


def evaluate_worst(masks: torch.Tensor, predicted: torch.Tensor) -> Evaluation:
    """An evaluation of which each rank has every `world_size()`th image."""
    evaluation = Evaluation(Grey(masks), torch.device("cpu"))
    for i in range(rank(), len(masks), world_size()):
        side = 0 if i == UNREAD else 1
        batch = SimpleNamespace(
            images=torch.zeros(1, 3, 8, 10),
            labels=masks[i : i + 1],
            positions=torch.tensor([i]),
            sizes=torch.tensor([[10 * side, 8 * side]]),
        )
        logits = F.one_hot(predicted[i].long(), 3).movedim(2, 0)[None].double()
        evaluation.update(batch, logits)
        assert len(evaluation.shown) <= 24 + plots.NUM_COLUMNS
    evaluation.results()
    return evaluation


def draw_on_rank(masks: torch.Tensor, predicted: torch.Tensor) -> dict:
    """By the name of a picture: the indices and the predictions that it is drawn of."""
    drawn = {}

    def draw(name: str, function, source, predictions, indices=(), *_) -> None:
        if name != "confusion":
            drawn[name] = {index: predictions[index].tolist() for index in indices}

    evaluation = evaluate_worst(masks, predicted)
    if not rank():
        evaluation.draw(SimpleNamespace(draw=draw))
    return drawn


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_worst_images_are_drawn_on_any_layout(processes, ranks: int) -> None:
    """Those with the most wrong pixels come first; others have no label or could not be read."""
    masks, predicted = make_worse(60)
    drawn = processes.run(draw_on_rank, masks, predicted, ranks=ranks)[0]
    ranked = [(7 * i) % 60 for i in range(59, 0, -1)]
    assert (ranked[0], ranked[2]) == (UNREAD, UNLABELLED)
    expected = [ranked[1], *ranked[3:26]]
    assert list(drawn["worst"]) == expected
    assert len(drawn["predictions"]) == plots.NUM_COLUMNS
    for predictions in drawn.values():
        for index, values in predictions.items():
            assert values == predicted[index].tolist(), index


def test_the_worst_images_have_the_rows_of_predictions_csv() -> None:
    masks, predicted = make_worse(60)
    columns, *rows = evaluate_worst(masks, predicted).worst()
    assert columns == ("image", "path", "pixel_accuracy", "loss", "labelled_pixels")
    assert len(rows) == 24
    picture, name, accuracy, loss, num_labelled = rows[0]
    worst = 7 * 58 % 60
    assert (name, accuracy, num_labelled) == (f"{worst}.png", round(22 / 80, 7), 80)
    logits = F.one_hot(predicted[worst].long(), 3).movedim(2, 0)[None].double()
    expected = F.cross_entropy(logits, masks[worst][None].long())
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    image, truth, predictions, differences = np.split(np.asarray(picture), 4, axis=1)
    assert (image == 100).all()
    colours = plots.make_colours(3)
    assert (truth == colours[masks[worst]]).all()
    assert (predictions == colours[predicted[worst]]).all()
    is_blue = differences[..., 2] > differences[..., 0]
    assert (is_blue == (masks[worst] == predicted[worst]).numpy()).all()
    assert [row[2] for row in rows] == sorted(row[2] for row in rows)


def test_a_sheet_names_the_most_frequent_error(tmp_path: Path, monkeypatch) -> None:
    mask = torch.zeros(8, 10, dtype=torch.int16)
    mask[:2] = 1
    mask[2] = IGNORED
    predicted = mask.clone()
    predicted[0] = 2  # ten of class 1
    predicted[5, :4] = 1  # and four of class 0
    drawn = []
    monkeypatch.setattr(plots, "draw_cells", lambda cells, *_: drawn.extend(cells))
    predictions = {0: predicted.numpy()}
    plots.draw_worst(Grey([mask]), predictions, [0, 1], ("a", "b", "c"), tmp_path)
    (cell,) = drawn
    assert cell.caption == "80.0 % right\nb → c"
    is_orange = (cell.pixels != 100).any(2)
    assert (is_orange == ((mask != predicted) & (mask != IGNORED)).numpy()).all()


def test_millions_of_pixels_fit_into_their_cell(tmp_path: Path, monkeypatch) -> None:
    counts = np.array([[3_745_307, 12, 0], [1616, 99_999, 0]])
    path = tmp_path / "run/pictures/confusion.png"
    texts = collect_texts(monkeypatch, lambda: plots.draw_confusion(counts, "ab", path))
    assert {"3.7M", "12", "1,616", "99,999"} <= set(texts)
