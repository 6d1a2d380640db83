"""A dry run names images that are there twice, within and between the parts, and says how many it
has looked at.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.classification import sources
from common.data import duplicates


def draw_picture(seed: int) -> Image.Image:
    """A smooth picture of 160 x 120 pixels, another one for each seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(coarse).resize((160, 120), Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """14 + 6 different pictures of two classes."""
    for number in range(20):
        path = (
            tmp_path
            / ("train" if number < 14 else "val")
            / ("cat" if number % 3 else "dog")
            / f"{number:02}.png"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_picture(number).save(path)
    return tmp_path


def describe(folder: Path) -> dict[str, str]:
    return duplicates.describe_duplicates(
        *sources.load(sources.Spec(str(folder), seed=0, val_share=0.2))
    )


def test_copies_and_other_sizes_are_named_by_their_parts(folder: Path) -> None:
    train = folder / "train/cat"
    val = folder / "val/cat"
    assert describe(folder)["duplicates"] == "none"
    shutil.copy(train / "01.png", val / "copy.png")
    shutil.copy(train / "02.png", train / "copy.png")
    draw_picture(4).resize((80, 60)).save(val / "small.jpg", quality=80)
    shutil.copy(val / "14.png", val / "again.png")
    text = describe(folder)["duplicates"]
    between = f"{train / '01.png'} ~ {val / 'copy.png'}, {train / '04.png'} ~ {val / 'small.jpg'}"
    assert text == (
        f"2 between train and val ({between}), 1 within train ({train / '02.png'} ~ "
        f"{train / 'copy.png'}), 1 within val ({val / '14.png'} ~ {val / 'again.png'})"
    )


def test_a_limit_on_the_images_that_are_read_is_said(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(duplicates, "MAX_THUMBNAILS", 10)
    assert describe(folder)["duplicates"] == "none (of 10 of 20 images, which were looked at)"


def test_flat_pictures_are_duplicates_as_equal_files(folder: Path) -> None:
    for number in range(5):
        Image.new("RGB", (40 + number, 40), (200, 200, 200 + number)).save(
            folder / f"train/cat/flat{number}.png"
        )
    broken = [
        folder / name for name in ("train/cat/broken.png", "train/dog/torn.png", "val/cat/none.png")
    ]
    for path in broken:
        path.write_bytes(b"nothing")
    rows = describe(folder)
    assert rows["duplicates"] == "none (of 25 of 28 images, which were looked at)"
    equal = [folder / "train/cat/flat3.png", folder / "val/dog/flat.png"]
    shutil.copy(*equal)
    assert describe(folder)["duplicates"].startswith(
        f"1 between train and val ({equal[0]} ~ {equal[1]}) (of 26 of 29 "
    )
    reason = "not an image: empty, cut off in its header, or of an unknown format"
    assert rows["unreadable"] == f"3: {'; '.join(f'{path}: {reason}' for path in broken)}"
