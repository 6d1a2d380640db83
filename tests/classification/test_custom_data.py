"""A custom data set, an object with a length, items and class names, is a source like any other.

If it lacks anything, it is refused in one line.
"""

import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.classification import EvalDataset, Normalize, Transforms
from common.classification.sources import Spec, load
from common.classification.transforms import EvalTransform
from common.data.images import BrokenImage
from common.errors import Refused
from common.training import timm_models
from tests.harness.drawings import draw_pets


class Shells:
    """Items as they are given."""

    def __init__(self, items: Sequence, classes: Sequence[str] = ("cockle", "limpet")):
        self.items = items
        self.classes = classes

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        return self.items[index]


class Counted(Shells):
    """Images whose labels are known without them, and of which the seventh of 20 is torn."""

    read = 0

    @property
    def targets(self) -> list[int]:
        return [label for _, label in self.items]

    def __getitem__(self, index: int) -> object:
        self.read += 1
        if index == 7 and len(self.items) == 20:
            raise OSError("torn")
        return super().__getitem__(index)


def image(value: int) -> Image.Image:
    return Image.new("L", (4, 3), value)


@pytest.fixture
def files(tmp_path: Path) -> list[tuple[Path, int]]:
    """12 + 8 files and their class ids, of a folder that does not tell the classes."""
    items = []
    for number in range(20):
        path = tmp_path / "some" / f"{number % 3}" / f"shell{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image(number).save(path)
        items.append((path, int(number >= 12)))
    return items


def read(data: object, seed: int = 0, **options) -> tuple:
    return load(Spec("shells", seed, 0.25, **options), data)


def refusal(data: object, **options) -> str:
    with pytest.raises(Refused) as refused:
        read(data, **options)
    return str(refused.value)


def map_labels(*sources) -> dict[str, int]:
    """The label of each image, by its name."""
    labels = {}
    for source in sources:
        for index, label in enumerate(source.labels.tolist()):
            labels[source.get_name(index)] = label
    return labels


def test_a_share_of_each_class_of_paths_is_held_out(files: list) -> None:
    train, val = read(Shells(files))
    by_path = {str(path): label for path, label in files}
    assert map_labels(train, val) == by_path
    assert train.classes == ("cockle", "limpet")
    assert train.labels.dtype == np.int64
    assert train.multi_label is False
    assert np.bincount(val.labels).tolist() == [3, 2]
    assert train.split_text == "75 % of Shells"
    assert val.split_text == "25 % held out of Shells"
    for source in (train, pickle.loads(pickle.dumps(train))):
        assert not hasattr(source, "data"), "the object would be copied into every data worker"
        for index in range(len(source)):
            number = int(Path(source.get_name(index)).stem.removeprefix("shell"))
            assert source.load_image(index).getpixel((0, 0))[0] == number
    # A path keeps its side, wherever it stands; an evaluation finds the images that training held
    # out.
    _, reversed_val = read(Shells(files[::-1]))
    assert map_labels(reversed_val) == map_labels(val)
    _, held_out = read(Shells(files), is_eval_only=True, is_training_data=True)
    assert map_labels(held_out) == map_labels(val)
    with_names = [(path, ("cockle", "limpet")[label]) for path, label in files]
    assert map_labels(*read(Shells(with_names))) == by_path
    splits = {
        "train": Shells(files[:15]),
        "valid": Shells(files[15:]),
        "test": Shells(files[16:18]),
    }
    train, val = read(splits)
    assert len(train) == 15
    assert len(val) == 5
    assert train.split_text == "train"
    assert val.split_text == "valid; test: for --split test"
    for is_eval_only in (False, True):
        assert len(read(splits, split="test", is_eval_only=is_eval_only)[1]) == 2
    splits["valid"].classes = ("limpet", "cockle")
    assert "other classes to evaluate than to train on" in refusal(splits)


def test_images_are_read_when_they_are_wanted() -> None:
    data = Counted([(image(number), number % 2) for number in range(200)])
    train, val = read(data)
    assert data.read < 50, "labels are known: only a look at the data reads some"
    assert sorted(np.append(train.indices, val.indices)) == list(range(200))
    for index, number in enumerate(train.indices):
        assert train.load_image(index).getpixel((0, 0))[0] == number
    assert np.array_equal(train.labels, train.indices % 2)
    assert train.get_name(3) == f"Counted[{train.indices[3]}]"
    assert pickle.loads(pickle.dumps(val)).fingerprint == val.fingerprint
    # One of those that are looked at.
    data.items[int(val.indices[0])] = (image(250), int(val.labels[0]))
    assert read(data)[1].fingerprint != val.fingerprint
    torn = read(Counted([(image(1), index % 2) for index in range(20)]), is_eval_only=True)[1]
    with pytest.raises(BrokenImage, match="torn"):
        torn.load_image(7)


def test_tensors_keep_all_channels_and_show_three() -> None:
    tensors = [torch.full((4, 6, 5), number, dtype=torch.uint8) for number in range(20)]
    _, val = read(Shells([(tensor, number % 2) for number, tensor in enumerate(tensors)]))
    index = int(val.indices[0])
    assert torch.equal(val.get_content(0), tensors[index])
    image = val.load_image(0)
    assert image.mode == "RGB"
    assert image.size == (5, 6)
    assert image.getpixel((0, 0)) == (index,) * 3
    before = val.fingerprint
    tensors[index][3] += 100
    assert replace(val).fingerprint != before, "the fourth channel counts"


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_tensors_are_evaluated_as_images_are(channels: int) -> None:
    """Three channels give the pixels of the same RGB image."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (channels, 50, 40), dtype=torch.uint8, generator=generator)
    model = timm_models.build_classifier("test_vit", 2, image_size=32, in_chans=channels)
    data_config = timm_models.resolve_data_config(model, 32)
    assert len(data_config["mean"]) == channels
    _, val = read(Shells([(pixels, number % 2) for number in range(20)]))
    normalize = Normalize(data_config, torch.float32, torch.device("cpu"))
    transforms = Transforms(data_config, normalize, [normalize])
    batch = EvalDataset(val, transforms).__getitems__(np.arange(2))
    assert batch.images.shape == (2, channels, 32, 32)
    if channels == 3:
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        assert torch.equal(batch.images[0], EvalTransform(data_config)(image))
    reason = f"{channels + 1} channels, the model takes {channels}: build it .*in_chans"
    with pytest.raises(Refused, match=reason):
        normalize(torch.zeros(2, channels + 1, 32, 32))


def test_an_image_may_have_several_labels() -> None:
    train, val = read(Shells([(image(number), [1, number % 2, 0]) for number in range(20)], "abc"))
    assert train.multi_label
    assert train.labels.shape[1] == 3
    assert len(train) == 15
    assert len(val) == 5
    assert np.array_equal(train.labels[:, 1], train.indices % 2)


def test_torchvisions_data_sets_fit(tmp_path: Path) -> None:
    from torchvision.datasets import FakeData, ImageFolder

    fake = FakeData(20, (3, 8, 8), num_classes=2)
    fake.classes = ["odd", "even"]  # the only one without
    train, _ = read(fake)
    assert np.array_equal(np.asarray(train.load_image(7)), np.asarray(fake[train.indices[7]][0]))
    _, val = read(ImageFolder(draw_pets(tmp_path)))
    assert val.classes == ("cat", "dog")
    assert val.labels.tolist() == [0] * 2 + [1] * 3


def label_two(first: object, second: object) -> Shells:
    return Shells([(image(0), first), (image(0), second)])


@pytest.mark.parametrize(
    "data, reason",
    [
        (Shells([], "ab"), "Shells has no items"),
        (Shells([(image(0), 0)], "a"), "it needs 2 or more"),
        (Shells([image(0)]), "item 0 is a Image; an item is a pair"),
        (
            Shells([(np.zeros((4, 4, 3), np.uint8), 0)]),
            "is a ndarray; an item is a pair: .*Image.fromarray",
        ),
        (
            Shells([(np.zeros((4, 4, 4), np.uint8), 0)]),
            r"\[H, W, C\], by torch.from_numpy.* in_chans=C .*change_it.md",
        ),
        (
            Shells([(torch.zeros(4, 4, 4), 0)]),
            r"is a Tensor; an item is a pair: .* a tensor uint8\[C, H, W\]",
        ),
        (label_two(0, 2), "item 1 has the label 2; its 2 classes are 0 to 1"),
        (
            label_two("cockle", "whelk"),
            "has the label whelk, which is none of its classes: cockle",
        ),
        (label_two(0.5, 1.0), r"the labels are float64 \[2\]; each of its 2 items has a class id"),
        (Shells([("a.png", 0), (image(0), 1)]), "1 items are no paths, as item 0 is"),
        (
            Shells([("a.png", 0), ("b.png", 1)] * 4),
            "--data shells: 8 of 8 images are missing, the first is .*/a.png",
        ),
    ],
)
def test_other_objects_are_refused_in_one_line(data: object, reason: str) -> None:
    assert re.search(reason, refusal(data))
    assert "is no table" in refusal(data, label_column="kind")
