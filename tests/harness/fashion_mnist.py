"""Fashion-MNIST of the Debian package dataset-fashion-mnist as a Hugging Face data set: 60,000 + 10,000 images of 28 x 28.

    apt-get install dataset-fashion-mnist
    python -m tests.harness.fashion_mnist /data/fashion_mnist [IMAGES OF EACH SPLIT]

It holds what `zalando-datasets/fashion_mnist` of the Hub does: splits train and test, columns image and label.
"""

import sys
import tempfile
from pathlib import Path

PACKAGE = "dataset-fashion-mnist"
FILES = Path("/usr/share/datasets/fashion-mnist")


def save_fashion_mnist(folder: Path, most: int | None = None) -> None:
    """Save the data set, or the first `most` images of each split, to `folder`."""
    import datasets
    from torchvision.datasets import FashionMNIST
    from torchvision.datasets.utils import extract_archive

    splits = {}
    with tempfile.TemporaryDirectory() as scratch:
        raw = Path(scratch) / "FashionMNIST/raw"  # where torchvision looks for them
        raw.mkdir(parents=True)
        for file in FILES.glob("*.gz"):
            extract_archive(str(file), str(raw))
        for split in ("train", "test"):
            pictures = FashionMNIST(scratch, train=split == "train")
            images, labels = zip(*(pictures[number] for number in range(most or len(pictures))), strict=True)
            features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=pictures.classes))
            splits[split] = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
    datasets.DatasetDict(splits).save_to_disk(str(folder))


if __name__ == "__main__":
    save_fashion_mnist(Path(sys.argv[1]), *map(int, sys.argv[2:]))
