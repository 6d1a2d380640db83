"""Fashion-MNIST of the Debian package dataset-fashion-mnist as a Hugging Face data set: 60,000 +
10,000 images of 28 x 28.

    apt-get install dataset-fashion-mnist
    python -m tests.harness.fashion_mnist /data/fashion_mnist [IMAGES OF EACH SPLIT]

It holds what `zalando-datasets/fashion_mnist` of the Hub does: splits train and test, columns image
and label.
"""

import gzip
import sys
import tempfile
from pathlib import Path

PACKAGE = "dataset-fashion-mnist"
FILES = Path("/usr/share/datasets/fashion-mnist")


def unpack(folder: Path, max_images: int | None = None) -> None:
    """Write the data set, or the first `max_images` images of each split, to folder/MNIST/raw, where
    torchvision's MNIST reads it.
    """
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    for packed in FILES.glob("*.gz"):
        content = gzip.decompress(packed.read_bytes())
        header, size = (16, 28 * 28) if "images" in packed.name else (8, 1)
        count = min(int.from_bytes(content[4:8], "big"), max_images or sys.maxsize)
        subset = content[:4] + count.to_bytes(4, "big") + content[8 : header + count * size]
        (raw / packed.stem).write_bytes(subset)


def save_fashion_mnist(folder: Path, max_images: int | None = None) -> None:
    """Save the data set, or the first `max_images` images of each split, to `folder`."""
    import datasets
    from torchvision.datasets import MNIST, FashionMNIST

    splits = {}
    with tempfile.TemporaryDirectory() as scratch:
        unpack(Path(scratch), max_images)
        for split in ("train", "test"):
            images, labels = zip(*MNIST(scratch, train=split == "train"), strict=True)
            features = datasets.Features(
                image=datasets.Image(), label=datasets.ClassLabel(names=FashionMNIST.classes)
            )
            splits[split] = datasets.Dataset.from_dict(
                {"image": images, "label": labels}, features=features
            )
    datasets.DatasetDict(splits).save_to_disk(str(folder))


if __name__ == "__main__":
    save_fashion_mnist(Path(sys.argv[1]), *map(int, sys.argv[2:]))
