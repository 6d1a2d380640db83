"""The pages of real runs, in a browser: no script fails, nothing is loaded, nothing overflows, and dark is dark."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.run.report import FILE
from tests.harness.browser import Browser, browser
from tools.report import main

_OVERFLOW = """[...document.querySelectorAll('main *')].filter(one => !one.closest('.scroll')
  && one.getBoundingClientRect().right > innerWidth + 0.5).map(one => one.outerHTML.slice(0, 80)).join('|')"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


@pytest.fixture(scope="module", params=["trained_classifier", "trained_detector"])
def run(request) -> Path:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (360, "dark")])
def test_the_page_fits_any_window_and_scheme(tab: Browser, run: Path, width: int, scheme: str, tmp_path: Path) -> None:
    tab.visit(run / FILE, width, scheme)
    assert tab.value("document.documentElement.scrollWidth") <= width and tab.value(_OVERFLOW) == ""
    assert tab.value("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert tab.value("document.images.length") == len([*(run / "pictures").glob("*.png")]) > 1
    shot = np.asarray(Image.open(tab.photograph(tmp_path / "page.png")).convert("L"))
    assert shot.shape[1] == width and (np.median(shot[:, :6]) < 60) == (scheme == "dark")  # the margin at the left
    tab.visit(run / FILE, width, scheme, "print")
    assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.requests == [(run / FILE).resolve().as_uri()] and tab.errors == []


def test_a_run_leaves_the_page_and_the_tool_writes_it_again(run: Path, tmp_path: Path, capsys) -> None:
    page = (run / FILE).read_text()
    assert "could not be made" not in page
    environment = json.loads((run / "environment.json").read_text())
    if run.name == "cls":  # which was launched as a person does
        assert "--config_file" in environment["launch"] and environment["launch"].endswith(environment["command"])
        again = environment["launch"].removesuffix(environment["command"]) + environment["recipe"]
        assert f"{again} --config {run / 'config.yaml'} --name {run.name}-again" in page
    assert re.search(rf"  report +{re.escape(str(run / FILE))}\n", (run / "log.txt").read_text())
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("wandb", "checkpoints", FILE))
    main([str(copy)])
    assert capsys.readouterr().out == f"{copy / FILE}\n"
    assert abs(len((copy / FILE).read_text()) - len(page)) < 5_000
