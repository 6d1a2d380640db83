"""Unreadable images are named once, counted, and stop the run when a window of the stream has too many of them."""

import pytest

from common.errors import Refused
from common.run.broken_images import BrokenImages
from common.run.progress import Progress


def test_too_many_in_a_window_stop_the_run_and_a_new_window_starts_from_zero() -> None:
    broken = BrokenImages(Progress(), 0.02, 64, print)  # 16 steps, 1,024 samples, 20 of them may be broken
    for step, images in ((1, 10), (16, 10), (17, 20), (33, 20)):
        broken.count(step, [f"{step}/{image}" for image in range(images)])
    with pytest.raises(Refused) as raised:
        broken.count(48, ["the-last.png: torn"])
    assert str(raised.value) == (
        "step 48: 21 of the last 1,024 images could not be read (the last: the-last.png: torn), more than "
        "--max_broken_share 0.02 of each 1,024: mend the data, or raise the limit"
    )


def test_a_resume_in_the_middle_of_a_window_stops_at_the_same_step() -> None:
    progress = Progress()
    BrokenImages(progress, 0.5, 600, print).count(1, ["x"] * 500)
    resumed = BrokenImages(Progress(step=1, broken=progress.broken, broken_in_window=500), 0.5, 600, print)
    resumed.count(2, ["x"] * 100)  # 600 of 1,200
    resumed.count(3, ["x"] * 600)
    with pytest.raises(Refused, match="step 4: 601 of the last 1,200 "):
        resumed.count(4, ["x"])
    with pytest.raises(Refused, match="step 2: 1 of the last 4,000 "):
        BrokenImages(Progress(), 0.0, 4000, print).count(2, ["x"])
