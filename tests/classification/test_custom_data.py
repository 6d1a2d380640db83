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
from tests.harness.drawings import pets


class Shells:
    """Items as they are given."""

    def __init__(self, items: Sequence, classes: Sequence[str] = ("cockle", "limpet")):
        self.items, self.classes = items, classes

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


def everything(*sources) -> dict[str, int]:
    return {
        source.name(index): int(source.labels[index])
        for source in sources
        for index in range(len(source))
    }


def test_a_share_of_each_class_of_paths_is_held_out(files: list) -> None:
    train, val = read(Shells(files))
    assert everything(train, val) == {str(path): label for path, label in files}
    assert (train.classes, train.labels.dtype, train.multi_label) == (
        ("cockle", "limpet"),
        np.int64,
        False,
    )
    assert np.bincount(val.labels).tolist() == [3, 2]
    assert (train.part, val.part) == ("75 % of Shells", "25 % held out of Shells")
    for source in (train, pickle.loads(pickle.dumps(train))):
        assert not hasattr(source, "data"), "the object would be copied into every data worker"
        numbers = [
            int(Path(source.name(index)).stem.removeprefix("shell")) for index in range(len(source))
        ]
        assert [source.image(index).getpixel((0, 0))[0] for index in range(len(source))] == numbers
    # A path keeps its side, wherever it stands; an evaluation finds the images that training held
    # out.
    assert everything(val) == everything(read(Shells(files[::-1]))[1])
    assert everything(
        read(Shells(files), is_eval_only=True, is_training_data=True)[1]
    ) == everything(val)
    assert everything(
        *read(Shells([(path, ("cockle", "limpet")[label]) for path, label in files]))
    ) == everything(train, val)
    parts = {"train": Shells(files[:15]), "valid": Shells(files[15:]), "test": Shells(files[16:18])}
    train, val = read(parts)
    assert (len(train), len(val), train.part, val.part) == (
        15,
        5,
        "train",
        "valid; test: for --split test",
    )
    assert [
        len(read(parts, split="test", is_eval_only=is_eval_only)[1])
        for is_eval_only in (False, True)
    ] == [2, 2]
    parts["valid"].classes = ("limpet", "cockle")
    assert "other classes to evaluate than to train on" in refusal(parts)


def test_images_are_read_when_they_are_wanted() -> None:
    data = Counted([(image(number), number % 2) for number in range(200)])
    train, val = read(data)
    assert data.read < 50, "labels are known: only a look at the data reads some"
    assert sorted([*train.indices, *val.indices]) == list(range(200))
    assert all(
        train.image(index).getpixel((0, 0))[0] == train.indices[index]
        for index in range(len(train))
    )
    assert (
        np.array_equal(train.labels, train.indices % 2)
        and train.name(3) == f"Counted[{train.indices[3]}]"
    )
    assert pickle.loads(pickle.dumps(val)).fingerprint == val.fingerprint
    # One of those that are looked at.
    data.items[int(val.indices[0])] = (image(250), int(val.labels[0]))
    assert read(data)[1].fingerprint != val.fingerprint
    torn = read(Counted([(image(1), index % 2) for index in range(20)]), is_eval_only=True)[1]
    with pytest.raises(BrokenImage, match="torn"):
        torn.image(7)


def test_tensors_keep_all_channels_and_show_three() -> None:
    tensors = [torch.full((4, 6, 5), number, dtype=torch.uint8) for number in range(20)]
    _, val = read(Shells([(tensor, number % 2) for number, tensor in enumerate(tensors)]))
    index = int(val.indices[0])
    assert torch.equal(val.content(0), tensors[index])
    image = val.image(0)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (5, 6), (index,) * 3)
    before = val.fingerprint
    tensors[index][3] += 100
    assert replace(val).fingerprint != before, "the fourth channel counts"


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_tensors_are_evaluated_as_images_are(channels: int) -> None:
    """Three channels give the pixels of the same RGB image."""
    pixels = torch.randint(
        256, (channels, 50, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    model = timm_models.build_classifier("test_vit", 2, image_size=32, in_chans=channels)
    data_config = timm_models.resolve_data_config(model, 32)
    assert len(data_config["mean"]) == channels
    _, val = read(Shells([(pixels, number % 2) for number in range(20)]))
    normalize = Normalize(data_config, torch.float32, torch.device("cpu"))
    batch = EvalDataset(val, Transforms(data_config, normalize, [normalize])).__getitems__(
        np.arange(2)
    )
    assert batch.images.shape == (2, channels, 32, 32)
    if channels == 3:
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        assert torch.equal(batch.images[0], EvalTransform(data_config)(image))
    with pytest.raises(
        Refused, match=f"{channels + 1} channels, the model takes {channels}: build it .*in_chans"
    ):
        normalize(torch.zeros(2, channels + 1, 32, 32))


def test_an_image_may_have_several_labels() -> None:
    train, val = read(Shells([(image(number), [1, number % 2, 0]) for number in range(20)], "abc"))
    assert train.multi_label and train.labels.shape[1] == 3 and (len(train), len(val)) == (15, 5)
    assert np.array_equal(train.labels[:, 1], train.indices % 2)


def test_torchvisions_data_sets_fit(tmp_path: Path) -> None:
    from torchvision.datasets import FakeData, ImageFolder

    fake = FakeData(20, (3, 8, 8), num_classes=2)
    fake.classes = ["odd", "even"]  # the only one without
    train, _ = read(fake)
    assert np.array_equal(np.asarray(train.image(7)), np.asarray(fake[train.indices[7]][0]))
    _, val = read(ImageFolder(pets(tmp_path)))
    assert val.classes == ("cat", "dog") and val.labels.tolist() == [0] * 2 + [1] * 3


def two(one: object, other: object) -> Shells:
    return Shells([(image(0), one), (image(0), other)])


@pytest.mark.parametrize(
    "data, said",
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
        (two(0, 2), "item 1 has the label 2; its 2 classes are 0 to 1"),
        (two("cockle", "whelk"), "has the label whelk, which is none of its classes: cockle"),
        (two(0.5, 1.0), r"the labels are float64 \[2\]; each of its 2 items has a class id"),
        (Shells([("a.png", 0), (image(0), 1)]), "1 items are no paths, as item 0 is"),
        (
            Shells([("a.png", 0), ("b.png", 1)] * 4),
            "--data shells: 8 of 8 images are missing, the first is .*/a.png",
        ),
    ],
)
def test_other_objects_are_refused_in_one_line(data: object, said: str) -> None:
    assert re.search(said, refusal(data))
    assert "is no table" in refusal(data, label_column="kind")
