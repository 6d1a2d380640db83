"""Publish writes a card whose figures are the run's and whose code runs, and pushes nothing that the run did not save."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard
from PIL import Image

from common.errors import Refused
from tests.harness.launching import inherited
from tools.publish.__main__ import main
from tools.publish.card import plain


def published(run: Path, folder: Path, *words: str) -> tuple[ModelCard, str]:
    main([str(run), "--to", "someone/digits", "--dry_run", str(folder), *words])
    card = ModelCard.load(folder / "README.md")
    return card, card.text


def figures(text: str, heading: str) -> dict[str, str]:
    """The table under this row of names."""
    rows = text[text.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return dict(re.fullmatch(r"\| (.*?) \| (.*?) \|", row).groups() for row in rows)


def shown(value) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"


def ran(words: list, folder: Path) -> str:
    environment = inherited() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_card_of_a_classifier_has_its_figures_and_code_that_runs(trained_classifier, tmp_path) -> None:
    card, text = published(trained_classifier, tmp_path / "model", "--license", "apache-2.0")
    results = json.loads((trained_classifier / "best" / "results.json").read_text())
    assert card.data.license == "apache-2.0" and card.data.library_name == "timm"
    assert card.data.pipeline_tag == "image-classification" and card.data.metrics == ["accuracy"]
    (of_hub,) = card.data.eval_results
    assert (of_hub.metric_type, of_hub.metric_value) == ("accuracy", results["top1"])
    overall = figures(text, "Result | Validation")
    assert overall["Top-1 accuracy"] == shown(results["top1"]) and overall["Images"] == "359" == str(results["count"])
    assert list(overall.values()) == [shown(value) for value in results.values() if not isinstance(value, dict)]
    assert figures(text, "Class | Accuracy") == {name: shown(value) for name, value in results["per_class"].items()}
    weakest = min(results["per_class"], key=results["per_class"].get)
    assert f"Weakest classes: {weakest} {shown(results['per_class'][weakest])}" in text
    rows = [json.loads(line) for line in (trained_classifier / "metrics.jsonl").read_text().splitlines()]
    assert f"best of {sum('eval/top1' in row for row in rows)} evaluations" in text
    assert f"step {json.loads((trained_classifier / 'best' / 'run.json').read_text())['step']:,}" in text
    settings = figures(text, "flag | value")
    assert settings["`--global_batch_size`"] == "64" and settings["`--model`"] == r"test\_resnet"
    assert "| layout | 2 processes on 1 node" in text and "1,438 + 359 images of 10 classes" in text

    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert files == {path.name for path in (trained_classifier / "best").iterdir()} | {"README.md", "pictures"}
    for name in re.findall(r"!\[.*?\]\((.*?)\)", text):
        Image.open(tmp_path / "model" / name).verify()
    assert str(trained_classifier.parent) not in text + (tmp_path / "model" / "run.json").read_text()

    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    Image.new("RGB", (50, 40), "white").save(tmp_path / "photo.jpg")
    assert "hf-hub:someone/digits" in code
    output = ran([sys.executable, "-c", code.replace("hf-hub:someone/digits", f"local-dir:{tmp_path}/model")], tmp_path)
    scores = [line.split() for line in output.splitlines()]
    assert len(scores) == 5 and {name for name, _ in scores} <= set("0123456789") and float(scores[0][1]) > 0.1


def test_the_card_of_a_detector_has_its_figures_and_code_that_runs(trained_detector, tmp_path, capsys) -> None:
    card, text = published(trained_detector, tmp_path / "model")
    assert "no --license is given" in capsys.readouterr().err and "License: none was given" in text
    results = json.loads((trained_detector / "best" / "results.json").read_text())
    assert card.data.license is None and card.data.pipeline_tag == "object-detection"
    assert card.data.eval_results[0].metric_value == results["AP"]
    assert figures(text, "Result | Validation")["AP50"] == shown(results["AP50"])
    assert figures(text, "Class | AP") == {name: shown(value) for name, value in results["per_class"].items()}
    (command,) = re.findall(r"^python model/(.*?) model photo\.jpg", text, re.MULTILINE)
    Image.new("RGB", (50, 40), "white").save(tmp_path / "photo.jpg")
    ran([sys.executable, f"model/{command}", "model", "photo.jpg"], tmp_path)


def test_names_in_a_card_are_no_markup_and_unfinished_runs_say_so(trained_classifier, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_classifier, run, ignore=shutil.ignore_patterns("checkpoints", "wandb"))
    odd, best = "a|b <i>*_`\n", run / "best"
    for name in ("config.json", "results.json"):
        content = json.loads((best / name).read_text())
        if name == "config.json":
            content["label_names"][3] = odd
        else:
            content["per_class"] = {odd if key == "3" else key: value for key, value in content["per_class"].items()}
            content["per_class"]["4"] = None
        (best / name).write_text(json.dumps(content))
    (run / "status.json").write_text(json.dumps({"status": "resumable", "step": 20, "cause": "", "time": ""}))
    _, text = published(run, tmp_path / "model")
    assert r"| a\|b \<i\>\*\_\`\\n |" in text and "\n| 4 | - |" in text
    assert "The run was not finished (resumable)" in text and "do not show them: 4." in text


def test_folders_of_a_person_are_not_published() -> None:
    assert plain("recipes/cls.py --data /home/jo/flowers --config recipes/presets/digits.yaml") == (
        "recipes/cls.py --data flowers --config recipes/presets/digits.yaml"
    )
    assert plain("'/home/jo/a b/x' ~/data/y.csv 3/4 a/b hf-hub:o/n /tmp") == "'a b/x' y.csv 3/4 a/b hf-hub:o/n /tmp"


def test_what_cannot_be_published_is_refused_in_one_line(trained_classifier, tmp_path, monkeypatch) -> None:
    def refused(run: Path, *words: str) -> str:
        with pytest.raises(Refused) as refusal:
            main([str(run), "--to", "someone/digits", *words])
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    new = ("--dry_run", str(tmp_path / "new"))
    assert "no run folder" in refused(trained_classifier / "best", *new)
    assert "must be OWNER/NAME" in refused(trained_classifier, *new, "--to", "digits")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    assert "is there already" in refused(trained_classifier, "--dry_run", str(tmp_path / "old"))
    assert refused(trained_classifier, "--dry_run", "/dev/null/x").startswith("--dry_run /dev/null/x: ")
    run = tmp_path / "run"
    shutil.copytree(trained_classifier, run)
    weights = run / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert "is not what the run saved" in refused(run, *new)
    (run / "summary.json").unlink()
    assert "not a whole run folder" in refused(run, *new)
    shutil.rmtree(run / "best")
    assert "has no best/" in refused(run, *new)
    assert not (tmp_path / "new").exists()

    pushed = {}
    monkeypatch.setattr(HfApi, "create_repo", lambda self, to, **options: pushed.update(options, to=to))

    def upload(self, *, folder_path, **options):
        pushed.update(options, files={path.name for path in folder_path.iterdir()})
        raise OSError("401 Client Error\n\nInvalid credentials")

    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert "--to someone/digits: 401 Client Error; log in with" in refused(trained_classifier, "--private")
    assert pushed["private"] and pushed["repo_id"] == "someone/digits" and "README.md" in pushed["files"]
