"""An evaluation counts every image exactly once on any layout, and an exported model is as good as the run says."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.harness.drawings import save_colours
from tests.harness.outcomes import Outcome

PROCESSES = (1, 2)
DIGITS = (  # 359 images to evaluate on, a prime, in batches of 32
    "--data digits --model test_convnext --lr 3e-3 --max_micro_batch_size 32 --max_steps 12 --dtype float64 --ema_decay 0.5"
)
STRIPES = (
    "--image_size 32 --crop_pct 1 --model test_vit --lr 2e-3 --max_micro_batch_size 10 --max_steps 15 --log_every 1 "
    "--eval_every 15"
)
LABELS = "--model test_vit --lr 2e-3 --loss bce --max_steps 15 --dtype float64 --mixup 0.2 --ema_decay 0.7"


@pytest.fixture(scope="module")
def data(stripes, tmp_path_factory) -> dict[str, Path]:
    """Folders: stripes, these with but two images to evaluate on, and several labels."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "train").symlink_to(stripes / "train")
    for name in ("stuff_1", "stuff_3"):
        (folder / "tiny" / "val" / name).mkdir(parents=True)
        shutil.copy(stripes / "val" / name / "0.png", folder / "tiny" / "val" / name)
    save_colours(folder / "labels")
    return {"stripes": stripes} | {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def runs(run_several, data, tmp_path_factory) -> dict[int, dict[str, Outcome]]:
    """On one and two processes: training runs, and evaluations of what those on one process left."""
    root = tmp_path_factory.mktemp("runs")
    stripes, digits = root / "1" / "stripes", root / "1" / "digits"
    commands = {
        "labels": f"--data {data['labels']} {LABELS}",
        "one label": f"--data {data['labels']} --max_steps 2",
        "stripes": f"--data {data['stripes']} {STRIPES}",
        "digits best": f"--eval_only {digits}/best {DIGITS}",
        "digits checkpoint": f"--eval_only {digits}/checkpoints/step_00000012 {DIGITS}",
        "tiny": f"--eval_only {stripes}/best --data {data['tiny']} {STRIPES} --max_micro_batch_size 1",
        "labels best": f"--eval_only {root}/1/labels/best --data {data['labels']} {LABELS}",
    }
    outcomes = {}
    for processes in PROCESSES:
        output = ["--output_dir", root / str(processes)]
        cases = {name: [*flags.split(), *output] for name, flags in commands.items()}
        outcomes[processes] = run_several(processes, {"digits": [*DIGITS.split(), *output]}, pictures=True)
        outcomes[processes] |= run_several(processes, cases)
    return outcomes


def printed(run: Outcome) -> dict:
    """What --eval_only prints."""
    assert run.outcome == "ok", run.text
    return json.loads(run.stdout.splitlines()[-1])


def recorded(run: Outcome, prefix: str = "") -> dict:
    """The results in a run's last row that are of the weights (or with `ema_`, of their average), without their prefix."""
    results = {
        key.removeprefix("eval/"): value for key, value in run.rows[-1].items() if key.startswith(f"eval/{prefix}")
    }
    return {key.removeprefix(prefix): value for key, value in results.items() if prefix or not key.startswith("ema_")}


def assert_same_results(one: dict, other: dict, tolerance: float = 1e-9) -> None:
    """Counts and what is made of them are equal; the loss is but for the order of its sum, confidences as weights are."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        if key in ("loss", "ema_loss"):
            assert other[key] == pytest.approx(value, rel=tolerance)
        elif key in ("ece", "ema_ece"):
            assert other[key] == pytest.approx(value, abs=1e-7)
        else:
            assert other[key] == value, key


@pytest.mark.parametrize("name, count", [("digits", 359), ("labels", 23), ("stripes", 23)])
def test_a_run_records_the_same_results_on_any_layout(name: str, count: int, runs) -> None:
    one, two = runs[1][name], runs[2][name]
    assert one.rows[-1]["eval/count"] == count
    if name == "stripes":  # trained in float32: its weights agree only nearly
        assert recorded(two)["loss"] == pytest.approx(recorded(one)["loss"], rel=1e-2)
    else:
        assert_same_results(recorded(one), recorded(two))
        assert_same_results(recorded(one, "ema_"), recorded(two, "ema_"))


def test_pictures_are_the_same_on_any_layout(runs) -> None:
    """Every count of the matrix, every mistake, and the first samples with their augmentation: they are equal to the byte."""
    for picture in ("confusion", "mistakes", "first_batch"):
        one, two = (runs[number]["digits"].folder / "pictures" / f"{picture}.png" for number in PROCESSES)
        assert one.read_bytes() == two.read_bytes(), picture


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("what", ["best", "checkpoint"])
def test_eval_only_prints_what_the_run_recorded(what: str, processes: int, runs) -> None:
    """Of the averaged weights of an exported model, which timm rounds to float32, and of a checkpoint."""
    case, one = runs[processes][f"digits {what}"], printed(runs[1][f"digits {what}"])
    results = printed(case)
    per_class, thresholds = results.pop("per_class"), results.pop("thresholds")
    assert results.pop("eval_only").startswith(str(runs[1]["digits"].folder / what))
    assert_same_results(recorded(runs[1]["digits"], "ema_"), results, 1e-7 if what == "best" else 1e-9)
    assert np.mean([*per_class.values()]) == pytest.approx(results["mean_class_accuracy"])
    assert (per_class, thresholds) == (one["per_class"], one["thresholds"])
    assert not case.folder.exists()


def test_averaged_weights_are_evaluated_beside_the_others(runs) -> None:
    """With --ema_decay both have results, and they differ; without it there is nothing about an average."""
    weights, average = recorded(runs[1]["digits"]), recorded(runs[1]["digits"], "ema_")
    assert weights.keys() == average.keys()
    assert weights["top1"] != average["top1"]
    assert min(weights["top1"], average["top1"]) > 0.2  # well above chance: results worth comparing
    assert not recorded(runs[1]["stripes"], "ema_")
    leading = [runs[1][name].read("summary.json")["leading"] for name in ("digits", "stripes")]
    assert leading == ["eval/ema_top1", "eval/top1"], "the result of the weights that are exported chooses best/"


@pytest.mark.parametrize("processes", PROCESSES)
def test_fewer_images_than_processes_count_once_each(processes: int, runs) -> None:
    results = printed(runs[processes]["tiny"])
    assert results["count"] == 2
    assert list(results["per_class"]) == ["stuff_1", "stuff_3"]
    assert results == printed(runs[1]["tiny"])


@pytest.mark.parametrize("processes", PROCESSES)
def test_images_of_several_labels_are_learnt_and_judged_by_f1(processes: int, runs) -> None:
    run = runs[processes]["labels"]
    assert recorded(run, "ema_")["f1"] > 0.9 > recorded(run, "ema_")["loss"]
    assert "top1" not in recorded(run)
    results = printed(runs[processes]["labels best"])
    assert results["f1"] == recorded(run, "ema_")["f1"]
    assert len(results["per_class"]) == 3
    refused = runs[processes]["one label"]
    assert (refused.outcome, "--loss bce" in refused.text, refused.text.count("\n")) == ("refused", True, 0)


TIMM_ALONE = """
import json, sys
from pathlib import Path
import timm, torch
from PIL import Image

folder, images = sys.argv[1:]
model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
names = model.pretrained_cfg["label_names"]
look = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
paths = sorted(Path(images).rglob("*.png"))
batch = torch.stack([look(Image.open(path).convert("RGB")) for path in paths])
labels = torch.tensor([names.index(path.parent.name) for path in paths])
with torch.no_grad():
    logits = model(batch)
assert not any(name.startswith("common") for name in sys.modules)
print(json.dumps({
    "top1": (logits.argmax(1) == labels).double().mean().item(),
    "loss": torch.nn.functional.cross_entropy(logits, labels).item(),
}))
"""


def test_timm_alone_loads_the_exported_model_and_gets_its_results(runs, data, launch, tmp_path) -> None:
    """By name, with the class names and the preprocessing that stand in the folder; nothing of this repository."""
    best = runs[1]["stripes"].folder / "best"
    (tmp_path / "alone.py").write_text(TIMM_ALONE)
    done = launch.start_python("-I", tmp_path / "alone.py", best, data["stripes"] / "val", cwd=tmp_path).finish()
    assert done.returncode == 0, done.stderr
    theirs, ours = json.loads(done.stdout), recorded(runs[1]["stripes"])
    assert theirs["top1"] == ours["top1"]
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-4)
    assert json.loads((best / "results.json").read_text())["top1"] == ours["top1"]


@pytest.mark.long
def test_compiled_models_train_as_eager_ones(run_several, data) -> None:
    """Three graphs for each size of a micro-batch, whatever the steps; the losses agree."""
    flags = f"--data {data['stripes']} --log_every 1 --eval_every 5 --lr 2e-3 --max_steps 10 --drop_path 0.1".split()
    cases = {
        "vit": [*flags, *"--model test_vit --global_batch_size 50 --max_micro_batch_size 15".split()],
        "group": [*flags, *"--model test_resnet --batch_norm group --norm_batch_size 8".split()],
    }
    cases |= {f"{name} compiled": [*words, "--compile"] for name, words in cases.items()}
    outcomes = run_several(2, cases, recipe="tests/recipes/counted.py", timeout=3000)
    for name, graphs in (("vit", 6), ("group", 3)):  # the vit has two sizes
        eager, compiled = outcomes[name], outcomes[f"{name} compiled"]
        np.testing.assert_allclose(compiled.column("train/loss"), eager.column("train/loss"), rtol=1e-3)
        counted = json.loads(compiled.stdout.splitlines()[-1])
        assert counted["compiled"] == graphs and not counted["broken"]
