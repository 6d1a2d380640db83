"""docs/ideas.md: its script draws every figure, and computes the numbers that its text claims.

The quick mode shortens what is drawn as curves; gradients and master weights are computed as for the page.
"""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from tests.harness.launching import ROOT, Launcher

PAGE = (ROOT / "docs/ideas.md").read_text()
TEXT = " ".join(PAGE.split())
NUMBER = r"(\d+(?:\.\d+)?)"
# A sentence of the page, the names of its numbers, and how far they may be off on another machine, in parts of the number.
CLAIMS = [
    (f"that was {NUMBER} % of the gradients between layers", ["fp16 zeros %"], 0.25),
    (f"it ends at {NUMBER} in fp32, and at {NUMBER} in both others", ["fp32 weight after", "bf16 weight after"], 0.001),
    (
        f"{NUMBER} % of all updates change nothing, and its loss ends at {NUMBER}",
        ["bf16 updates lost %", "bf16 last loss"],
        0.1,
    ),
    (f"With weights in fp32 it ends at {NUMBER}", ["bf16 with fp32 master last loss"], 0.1),
    (f"by {NUMBER} % over 2 images, by {NUMBER} % over 64", ["scatter of 2 %", "scatter of 64 %"], 0.05),
]
SLOW_CLAIMS = [
    (
        f"the loss is {NUMBER} with batch 32, {NUMBER} with batch 256 and the same rate, {NUMBER} with 8 times the rate, and "
        f"{NUMBER} with a warm-up",
        [
            f"{name}, last loss"
            for name in ("1 GPU, batch 32", *(f"8 GPUs, batch 256{rate}" for rate in ("", ", rate x 8")))
        ]
        + ["8 GPUs, batch 256, rate x 8, warm-up, last loss"],
        0.5,
    ),
]


def run(launch: Launcher, folder: Path, *flags: str) -> dict[str, float]:
    done = launch.start_python("benchmarks/ideas.py", "--output", folder, *flags).finish(600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compare(claims: list, found: dict[str, float]) -> None:
    for sentence, names, part in claims:
        claimed = re.search(sentence, TEXT)
        assert claimed, f"not on the page: {sentence}"
        assert [float(number) for number in claimed.groups()] == pytest.approx(
            [found[name] for name in names], rel=part
        ), names


@pytest.mark.smoke
def test_the_page_shows_every_figure_and_names_code_that_exists() -> None:
    figures = re.findall(r"!\[.+?\]\(pictures/(ideas_\w+\.png)\)", PAGE)
    assert sorted(figures) == sorted(path.name for path in (ROOT / "docs/pictures").glob("ideas_*"))
    for name in figures:
        with Image.open(ROOT / "docs/pictures" / name) as picture:
            assert 1150 < picture.width < 1350, f"{name}: readable when shown 900 pixels wide"
    named = re.findall(r"\[`([\w.]+)`\]\(\.\./(\S+\.py)\)", PAGE)
    assert len(named) >= 12
    for name, file in named:
        word = name.split(".")[-1]
        assert Path(file).stem == word or re.search(rf"(def|class) {word}\b", (ROOT / file).read_text()), (name, file)


def test_the_script_draws_the_figures_and_computes_what_the_text_claims(launch: Launcher, tmp_path: Path) -> None:
    found = run(launch, tmp_path, "--quick")
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (ROOT / "docs/pictures").glob("ideas_*")
    }
    compare(CLAIMS, found)
    assert found["bf16 zeros %"] == found["fp32 zeros %"] == 0 and "In bf16 it was none" in TEXT
    assert found["fp16 weight after"] == found["bf16 weight after"]
    scaled = re.search(rf"and {NUMBER} % vanish", TEXT)
    assert scaled and found["scaled zeros %"] < 0.2 and float(scaled[1]) < 0.2
    assert (
        found["same batch, largest difference of loss"] < 1e-5
        and "differ from those of one GPU by less than 0.00001" in TEXT
    )
    assert found["overlap: late ms"] < found["overlap: complete ms"]


@pytest.mark.long
@pytest.mark.alone
def test_the_long_trainings_and_the_profile_are_as_the_text_says(launch: Launcher, tmp_path: Path) -> None:
    found = run(launch, tmp_path)
    compare(CLAIMS + SLOW_CLAIMS, found)
    one, same, eight, warm = (found[name] for name in SLOW_CLAIMS[0][1])
    assert one < min(same, eight, warm), "the larger batch is behind with each rate"
    assert found["overlap: late ms"] < found["after: late ms"]
