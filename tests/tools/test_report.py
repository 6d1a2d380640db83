"""The tool writes the page of a run again, which the run has left."""

import re
import shutil
from pathlib import Path

from common.run.report import FILE
from tests.harness.runs import read
from tools.report import main


def test_a_run_leaves_the_page_and_the_tool_writes_it_again(trained_classifier, tmp_path: Path, capsys) -> None:
    run, copy = trained_classifier, tmp_path / "copy"
    page, facts = (run / FILE).read_text(), read(run / "environment.json")
    assert "could not be made" not in page and "--config_file" in facts["launch"]
    again = facts["launch"].removesuffix(facts["command"]) + facts["recipe"]
    assert f"{again} --config {run / 'config.yaml'} --name {run.name}-again" in page
    assert re.search(rf"  report +{re.escape(str(run / FILE))}\n", (run / "log.txt").read_text())
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("wandb", "checkpoints", FILE))
    main([str(copy)])
    assert capsys.readouterr().out == f"{copy / FILE}\n"
    assert abs(len((copy / FILE).read_text()) - len(page)) < 5_000
