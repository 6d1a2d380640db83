"""What is published of a run is of its exported weights, as what is compared and reported, and
nothing that a person wrote.
"""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard
from PIL import Image

from common.run.folder import read_rows
from common.run.report import FILE
from tests.harness.launching import inherit_environment
from tests.harness.runs import catch_refusal, copy_run, read
from tests.tools.changed import update_json
from tools.compare.__main__ import main as compare
from tools.publish.__main__ import main
from tools.report import main as write_report


def publish(run: Path, folder: Path, flags: list | tuple = ()) -> tuple[ModelCard, str]:
    """The card that the tool writes into `folder`, and its text."""
    main([str(run), "--to", "someone/digits", "--dry_run", str(folder)] + list(flags))
    card = ModelCard.load(folder / "README.md")
    return card, card.text


def read_table(text: str, heading: str) -> dict[str, str]:
    """The table under this row of names."""
    rows = text[text.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return dict(re.fullmatch(r"\| (.*?) \| (.*?) \|", row).groups() for row in rows)


def format_value(value) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def run_command(argv: list, folder: Path) -> str:
    environment = inherit_environment() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numbers_of_an_averaged_run_are_those_of_its_export(
    run_several, trained_classifier, forks, tmp_path, capsys
) -> None:
    argv = (
        "--config recipes/presets/digits.yaml --epochs 2 --ema_decay 0.98 --tracker none "
        "--workers 0 --output_dir"
    )
    run = run_several(2, {"averaged": argv.split() + [tmp_path]}, pictures=True)["averaged"].folder
    ended = forks(["--eval_only", run / "best", "--workers", 0])
    true = json.loads(ended.stdout.splitlines()[-1])
    raw = read_rows(run / "metrics.jsonl")[-1]["eval/top1"]
    assert abs(true["top1"] - raw) > 0.01, "the weights have to differ to be told apart"

    card, text = publish(run, tmp_path / "model")
    assert card.data.eval_results[0].metric_value == pytest.approx(true["top1"], abs=1e-12)
    of_card = read_table(text, "Result | Validation")
    for name, key in (
        ("top-1", "top1"),
        ("mean class accuracy", "mean_class_accuracy"),
        ("macro F1", "f1_macro"),
    ):
        assert of_card[name] == format_value(true[key])
    assert read_table(text, "Class | Accuracy") == {
        name: format_value(value) for name, value in true["per_class"].items()
    }
    assert format_value(raw) not in text and "The weights are the moving average" in text
    for results in (read(tmp_path / "model" / "results.json"), read(run / "best" / "results.json")):
        assert (results["top1"], results["raw_top1"]) == pytest.approx(
            (true["top1"], raw), abs=1e-12
        )
        assert results["thresholds"] == true["thresholds"]
    ended = forks(
        [
            "--eval_only",
            tmp_path / "model",
            "--data",
            "digits",
            "--output_dir",
            tmp_path,
            "--workers",
            0,
        ],
    )
    assert json.loads(ended.stdout.splitlines()[-1])["top1"] == true["top1"], (
        "what was published is as it says"
    )

    summary = read(run / "summary.json")
    first = next(key for key in summary["best"] if key.startswith("eval/"))
    assert (summary["exported_weights"], first) == ("ema", "eval/ema_top1")
    assert summary["best"][first] == pytest.approx(true["top1"], abs=1e-12)

    capsys.readouterr()
    compare([str(run), str(trained_classifier), "--recorded", "-o", str(tmp_path / "out")])
    stdout = capsys.readouterr().out
    compared = read(tmp_path / "out" / "comparison.json")["runs"][0]
    rows = dict(re.findall(r"^  (\S.*?) {2,}(\S+(?: %)?)", stdout, re.MULTILINE))
    assert (
        rows["top-1"] == f"{100 * true['top1']:.2f} %"
        and rows["top-1 (without EMA)"] == f"{100 * raw:.2f} %"
    )
    assert compared["best"]["top1"] == pytest.approx(true["top1"], abs=1e-12)
    write_report([str(run)])
    assert capsys.readouterr().out == f"{run / FILE}\n"
    page = re.sub("<[^>]+>", " ", html.unescape((run / FILE).read_text()))
    page = " ".join(page[page.index("Results") :].split())
    assert re.search(
        rf"^Results Of the exported weights, .*? top-1 {100 * true['top1']:.2f} %", page
    )
    assert f"top-1 (without EMA) {100 * raw:.2f} %" in page


def test_the_card_of_a_classifier_has_code_that_runs(trained_classifier, tmp_path) -> None:
    card, text = publish(trained_classifier, tmp_path / "model", ["--license", "apache-2.0"])
    results = read(trained_classifier / "best" / "results.json")
    assert card.data.license == "apache-2.0" and card.data.library_name == "timm"
    assert card.data.pipeline_tag == "image-classification" and card.data.metrics == ["accuracy"]
    (of_hub,) = card.data.eval_results
    assert (of_hub.metric_type, of_hub.metric_value) == ("accuracy", results["top1"])
    overall = read_table(text, "Result | Validation")
    of_all_classes = {
        key: value
        for key, value in results.items()
        if not isinstance(value, dict) and "_class/" not in key
    }
    assert list(overall.values()) == [format_value(value) for value in of_all_classes.values()]
    assert read_table(text, "Class | Accuracy") == {
        name: format_value(value) for name, value in results["per_class"].items()
    }
    settings = read_table(text, "flag | value")
    assert settings["`--global_batch_size`"] == "64" and settings["`--model`"] == r"test\_resnet"
    assert "| layout | 2 processes on 1 node" in text and "Measured on 359 images" in text
    for name in re.findall(r"!\[.*?\]\((.*?)\)", text):
        Image.open(tmp_path / "model" / name).verify()

    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    Image.new("RGB", (50, 40), "white").save(tmp_path / "photo.jpg")
    output = run_command(
        [
            sys.executable,
            "-c",
            code.replace("hf-hub:someone/digits", f"local-dir:{tmp_path}/model"),
        ],
        tmp_path,
    )
    scores = [line.split() for line in output.splitlines()]
    assert (
        len(scores) == 5
        and {name for name, _ in scores} <= set("0123456789")
        and float(scores[0][1]) > 0.1
    )


def test_the_card_of_a_detector_has_code_that_runs(trained_detector, tmp_path, capsys) -> None:
    card, text = publish(trained_detector, tmp_path / "model")
    assert "no --license is given" in capsys.readouterr().err and "License: none was given" in text
    results = read(trained_detector / "best" / "results.json")
    assert card.data.license is None and card.data.pipeline_tag == "object-detection"
    assert card.data.eval_results[0].metric_value == results["AP"]
    assert read_table(text, "Result | Validation")["AP50"] == format_value(results["AP50"])
    assert read_table(text, "Class | AP") == {
        name: format_value(value) for name, value in results["per_class"].items()
    }
    (command,) = re.findall(r"^python model/(.*?) model photo\.jpg", text, re.MULTILINE)
    Image.new("RGB", (50, 40), "white").save(tmp_path / "photo.jpg")
    run_command([sys.executable, f"model/{command}", "model", "photo.jpg"], tmp_path)


SECRET = "Alice Smith"
PLACES = ("/x/Alice Smith, private/flowers/", "file:///home/Alice Smith/a", "../Alice Smith's")


def test_nothing_that_names_a_person_or_a_folder_is_published(trained_classifier, tmp_path) -> None:
    """A run that a person started with such flags: its files have them in every place where a run
    writes them.
    """
    texts = "data model image_column label_column eval_only init notes own".split()
    original = read(trained_classifier / "best/run.json")
    for number, secret_path in enumerate(PLACES):
        run = copy_run(trained_classifier, tmp_path / f"run-{number}")
        model = tmp_path / f"model-{number}"
        flags = dict.fromkeys(texts, secret_path)
        update_json(run / "best/run.json", config=original["config"] | flags, notes=secret_path)
        update_json(
            run / "environment.json",
            command=f"recipes/cls.py --data {secret_path}",
            recipe=secret_path,
        )
        (run / "config.yaml").write_text(
            yaml.safe_dump(yaml.safe_load((run / "config.yaml").read_text()) | flags)
        )
        log = (run / "log.txt").read_text()
        (run / "log.txt").write_text(
            log.replace("digits", secret_path).replace("test_resnet", secret_path)
        )
        for file in (run / "best/notes.txt", run / "pictures/Alice Smith.png"):
            file.write_text(secret_path)
        publish(run, model)
        for file in model.rglob("*"):
            assert SECRET not in str(file) and (
                file.is_dir() or SECRET.encode() not in file.read_bytes()
            ), file
        settings = read(model / "run.json")["config"]
        assert settings["model"] == "test_resnet" and settings["lr"] == original["config"]["lr"], (
            "it can be evaluated"
        )


def test_names_in_a_card_are_no_markup(trained_classifier, tmp_path) -> None:
    run = copy_run(trained_classifier, tmp_path / "<i>a|*b*")
    odd = "a|b <i>*_`\n[x](https://x)"
    best = run / "best"
    names = list("0123456789")
    accuracies = read(best / "results.json")["per_class"]
    names[3] = odd
    update_json(best / "config.json", label_names=names)
    update_json(
        best / "results.json",
        per_class=dict(zip(names, accuracies.values(), strict=True)) | {"4": None},
    )
    (run / "status.json").write_text(
        json.dumps({"status": "resumable", "step": 20, "cause": "", "time": ""})
    )
    _, text = publish(run, tmp_path / "model")
    assert r"| a\|b \<i\>\*\_\`\\n\[x\]\(https\://x\) |" in text and "\n| 4 | - |" in text
    assert odd not in text and r"(run \<i\>a\|\*b\*, step" in text
    assert "The run was not finished (resumable)" in text


def test_what_cannot_be_published_is_refused_in_one_line(trained_classifier, tmp_path) -> None:
    def refuse(run: Path, flags: list) -> str:
        return catch_refusal(main, [run, "--to", "someone/digits"] + flags)

    new = ["--dry_run", tmp_path / "new"]
    assert "no run folder" in refuse(trained_classifier / "best", new)
    assert "must be OWNER/NAME" in refuse(trained_classifier, new + ["--to", "digits"])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    assert "is there already" in refuse(trained_classifier, ["--dry_run", tmp_path / "old"])
    message = refuse(trained_classifier, ["--dry_run", "/dev/null/x"])
    assert message.startswith("--dry_run /dev/null/x: ")
    run = tmp_path / "run"
    shutil.copytree(trained_classifier, run)
    weights = run / "best" / "model.safetensors"
    results = run / "best" / "results.json"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert "is not what the run saved" in refuse(run, new)
    results.write_text('{"top1": ' + "[" * 200_000)
    assert "not a whole run folder" in refuse(run, new)
    shutil.rmtree(run / "best")
    assert "has no best/" in refuse(run, new)
    assert not (tmp_path / "new").exists()


def test_a_failed_upload_is_told_in_one_line(trained_classifier, monkeypatch) -> None:
    pushed = {}
    monkeypatch.setattr(
        HfApi, "create_repo", lambda self, to, **options: pushed.update(options, to=to)
    )

    def upload(self, *, folder_path, **options):
        pushed.update(options, files={path.name for path in folder_path.iterdir()})
        raise OSError("401 Client Error\n\nInvalid credentials")

    monkeypatch.setattr(HfApi, "upload_folder", upload)
    message = catch_refusal(main, [trained_classifier, "--to", "someone/digits", "--private"])
    assert "--to someone/digits: 401 Client Error; log in with" in message
    assert pushed["private"] and pushed["repo_id"] == "someone/digits"
    assert "README.md" in pushed["files"]
