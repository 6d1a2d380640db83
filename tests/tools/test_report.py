"""The pages of real runs, in a browser: no script fails, nothing is loaded, nothing overflows, and dark is dark."""

import json
import re
import shutil
from pathlib import Path

import pytest

from common.run.report import FILE
from tools.report import main


@pytest.fixture(scope="module", params=["trained_classifier", "trained_detector"])
def run(request) -> Path:
    return request.getfixturevalue(request.param)


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
