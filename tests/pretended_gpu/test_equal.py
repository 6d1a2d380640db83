"""Both recipes compute on GPUs what they compute on the CPU.

A case is a command line. In float64 one CPU process and two GPUs agree to 1e-10 in losses, gradient norms, weights, statistics,
moving averages, evaluation results and exported weights. In half precision they agree as far as it allows. The GPUs are
pretended: this proves everything that torch and the recipes do with a device, except the numbers of real kernels.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file

from tests.harness.drawings import draw_stripes
from tests.harness.outcomes import Outcome, Tensors, identical

STEPS, HALF = 6, 3
SHORT = f"--max_steps {STEPS} --log_every 1 --eval_every {STEPS} --checkpoint_every {HALF}"
CLS = f"{SHORT} --global_batch_size 16 --val_share 0.05 --lr 2e-3"
VARIED = "--mixup 0.2 --cutmix 1 --random_erasing 0.3 --color_jitter 0.3 --ema_decay 0.9 --clip 1"
DET = (
    f"{SHORT} --max_steps 4 --eval_every 4 --checkpoint_every 2 --global_batch_size 4 --model test_resnet --levels 3-4 "
    "--width 32 --short_sides 64,96 --warmup_epochs 0 --hflip 0.3 --scale_jitter 0.7-1.3 --ema_decay 0.9 --clip 1"
)
FLOAT64 = {
    "global": f"{CLS} {VARIED} --batch_norm global --label_smoothing 0.1 --channels_last",
    "group": f"{CLS} {VARIED} --batch_norm group --norm_batch_size 4 --max_micro_batch_size 4 --grad_checkpointing",
    "vit": f"{CLS} {VARIED} --model test_vit --drop_path 0.2 --max_micro_batch_size 4 --grad_checkpointing",
    "decoded": f"{CLS} --decode device --batch_norm frozen --image_size 32 --crop_scale 0.5",
    "fcos": f"{DET} --lr 2e-3 --detector fcos --batch_norm global --drop_path 0.1 --photometric 0.3",
    "faster_rcnn": f"{DET} --lr 2e-3 --detector faster_rcnn --batch_norm frozen --max_micro_batch_size 2",
    # Only in the long tests.
    "node": f"{CLS} --batch_norm node --clip 0.1 --clip_mode agc --opt sgd --lr 0.1 --ema_decay 0.9",
    "frozen": f"{CLS} --batch_norm frozen --loss bce --opt lamb --repeats 2 --class_weights sqrt",
    "convnext": f"{CLS} {VARIED} --model test_convnext --clip 0.1 --clip_mode agc --opt lion --lr 5e-4 --drop_path 0.1",
    "retinanet": f"{DET} --lr 2e-3 --detector retinanet --batch_norm group --norm_batch_size 2 --max_micro_batch_size 2",
    "rtdetr_v2": f"{DET} --lr 2e-4 --detector rtdetr_v2 --batch_norm frozen --max_micro_batch_size 2",
    "dfine": f"{DET} --lr 2e-4 --detector dfine --batch_norm frozen --max_micro_batch_size 2",
    "deimv2": f"{DET} --lr 2e-4 --detector deimv2 --batch_norm frozen --max_micro_batch_size 2",
    "mask_rcnn": f"{DET} --lr 2e-3 --detector mask_rcnn --global_batch_size 2 --max_steps 1 --eval_every 1",
}
LONG = set(list(FLOAT64)[6:])
if torchvision.__version__ < "0.27":
    del FLOAT64["decoded"]  # its code for nvJPEG crashes on a pretended GPU
# Relative tolerance of a loss for each gradient compression: the rounding of what is sent.
HOOKS = {"bf16": 2**-8, "fp16": 2**-11, "powersgd": None}
each = [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in FLOAT64]


@pytest.fixture(scope="module")
def data(scenes, tmp_path_factory) -> dict[str, Path]:
    """Scenes with outlines for detectors, and JPEGs that the device decodes."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copytree(scenes, folder / "scenes")
    for file in (folder / "scenes").glob("*.json"):
        content = json.loads(file.read_text())
        for annotation in content["annotations"]:
            x, y, width, height = annotation["bbox"]
            annotation["segmentation"] = [[x, y, x + width, y, x + width, y + height, x, y + height]]
        file.write_text(json.dumps(content))
    for part, counts in (("train", (14, 12)), ("val", (3, 4))):
        draw_stripes(folder / "jpegs" / part, counts)
    for file in (folder / "jpegs").rglob("*.png"):
        Image.open(file).resize((80, 64)).save(file.with_suffix(".jpg"), quality=90)
        file.unlink()
    return {"det": folder / "scenes", "decoded": folder / "jpegs"}


@pytest.fixture(scope="module")
def words(data, tmp_path_factory):
    """words(name, flags, place) -> the command line of a case; its run folder is in the folder of that place."""
    runs = tmp_path_factory.mktemp("runs")

    def of(name: str, flags: str, place: str) -> list[object]:
        is_det = "--detector" in flags
        flags = [
            *flags.split(),
            *(("--long_side", 96) if is_det and name not in ("rtdetr_v2", "dfine", "deimv2") else ()),
        ]
        own = data["det"] if is_det else data.get(name)
        flags += [*(("--data", own) if own else ()), "--output_dir", runs / place]
        return [f"recipes/{'det' if is_det else 'cls'}.py", *flags]

    return of


@pytest.fixture(scope="module")
def runs(run_several, run_on_gpus, words, thorough) -> dict[str, dict[str, Outcome]]:
    """Runs each case on two GPUs and on the CPU, in the long tests also on one GPU; one launch each.

    The first case is also resumed from its middle: on the GPUs and on the CPU from the GPUs' checkpoint, in the long tests on
    one GPU from the CPU's.
    """
    cases = {name: f"{flags} --dtype float64" for name, flags in FLOAT64.items() if thorough or name not in LONG}
    compiled = {"compiled": f"{cases['group']} --compile"} if thorough else {}
    hooks = {f"hook {name}": f"{cases['vit']} --comm_hook {name}" for name in HOOKS if thorough or name == "bf16"}

    def all_of(place: str, more: dict[str, str]) -> dict[str, list[object]]:
        return {name: words(name, flags, place) for name, flags in (cases | more).items()}

    def resumed(place: str) -> dict[str, str]:
        half = words("global", cases["global"], place)[-1] / "global" / "checkpoints" / f"step_{HALF:08d}"
        return {f"from {place}": f"{cases['global']} --resume {half}"}

    options = {"as_typed": True, "timeout": 1800 if thorough else 300}
    results = {"gpus": run_on_gpus(2, all_of("gpus", resumed("gpus") | hooks | compiled), **options)}
    results["cpu"] = run_several(1, all_of("cpu", resumed("gpus")), **options)
    if thorough:
        results["gpu"] = run_on_gpus(1, all_of("gpu", resumed("cpu")), **options)
    for outcomes in results.values():
        assert {outcome.outcome for outcome in outcomes.values()} == {"ok"}
    return results


def apart(one: Tensors, other: Tensors) -> float:
    """Distance of two states, relative to their norm."""
    assert one and one.keys() == other.keys()
    size, difference = (
        sum(part.double().square().sum() for part in parts)
        for parts in (one.values(), (tensor.double() - other[name].double() for name, tensor in one.items()))
    )
    return (difference / size).sqrt().item()


def assert_equal(one: Outcome, other: Outcome, from_step: int = 0) -> None:
    """Losses, gradient norms, results and states agree to 1e-10; after `from_step`, if `other` was resumed there."""
    rows = [[row for row in run.rows if row["step"] > from_step] for run in (one, other)]
    compared = {key for row in rows[0] for key in row if key.startswith(("train/loss", "train/grad_norm", "eval/"))}
    assert {"train/loss", "train/grad_norm", "eval/count"} <= compared
    for key in compared:
        values = [np.array([row[key] for row in of_run if key in row], float) for of_run in rows]  # None: NaN
        np.testing.assert_allclose(values[1], values[0], rtol=1e-10, atol=1e-14, err_msg=key)
    for file in ("model", "ema") if (one.checkpoint / "ema.safetensors").exists() else ("model",):
        assert apart(one.tensors(file), other.tensors(file)) < 1e-10, file
    best = [load_file(run.folder / "best" / "model.safetensors") for run in (one, other)]
    assert apart(*best) < (1e-10 if next(iter(best[0].values())).dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("name", each)
def test_two_gpus_train_and_evaluate_what_the_cpu_does(name: str, runs) -> None:
    assert_equal(runs["cpu"][name], runs["gpus"][name])


@pytest.mark.long
def test_a_compiled_model_trains_what_the_cpu_trains_without(runs) -> None:
    """Model, augmentation and loss, in graphs that are split where DDP sends gradients."""
    assert_equal(runs["cpu"]["group"], runs["gpus"]["compiled"])


@pytest.mark.long
@pytest.mark.parametrize("name", FLOAT64)
def test_one_gpu_trains_and_evaluates_what_the_cpu_does(name: str, runs) -> None:
    assert_equal(runs["cpu"][name], runs["gpu"][name])


def test_a_run_resumes_bit_equal_where_it_was_and_equal_elsewhere(runs) -> None:
    """A checkpoint of two GPUs, resumed on them and on the CPU."""
    whole, resumed = runs["gpus"]["global"], runs["gpus"]["from gpus"]
    assert [row["train/loss"] for row in whole.rows if "train/loss" in row][HALF:] == list(resumed.column("train/loss"))
    for file in ("model", "ema", "optimizer"):
        assert identical(whole.tensors(file), resumed.tensors(file)), file
    assert_equal(runs["cpu"]["global"], runs["cpu"]["from gpus"], HALF)


@pytest.mark.long
def test_a_checkpoint_of_the_cpu_is_resumed_on_a_gpu(runs) -> None:
    assert_equal(runs["cpu"]["global"], runs["gpu"]["from cpu"], HALF)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != "bf16")) for name in HOOKS])
def test_gradients_that_are_compressed_on_their_way_train_nearly_the_same(name: str, runs) -> None:
    plain, hooked = (runs["gpus"][case].column("train/loss") for case in ("vit", f"hook {name}"))
    if HOOKS[name]:
        np.testing.assert_allclose(hooked, plain, rtol=HOOKS[name])
    assert np.isfinite(hooked).all() and not np.allclose(hooked, plain, rtol=1e-12, atol=0)


@pytest.mark.long
def test_a_detector_that_has_learnt_finds_the_same_on_gpus(run_several, run_on_gpus, data, tmp_path) -> None:
    """A trained detector, since after the few steps of the other tests all evaluation results are still 0."""
    preset = ["--config", "recipes/presets/det_digits.yaml", "--output_dir", tmp_path]
    again = [*preset, "--data", data["det"], "--dtype", "float64", "--eval_only", tmp_path / "learnt" / "best"]
    cases = {"learnt": [*preset, "--max_steps", 150], "cpu": again}
    options = {"recipe": "recipes/det.py", "timeout": 1200}
    said = [run_several(1, cases, **options)["cpu"], run_on_gpus(2, {"gpus": again}, **options)["gpus"]]
    cpu, gpus = (json.loads(outcome.stdout.splitlines()[-1]) for outcome in said)
    assert cpu["count"] == 7 and 0.2 < cpu["AP50"] < 1 and cpu == gpus


# ---- Half precision

PRECISIONS = {
    "single_gpu_bf16": 1,
    "multi_gpu_fp16": 2,
    "single_gpu": 1,
    "multi_gpu": 2,
    "single_gpu_fp16": 1,
    "multi_gpu_bf16": 2,
}
ROUNDED = {  # with data workers, a tracker and plots, as users run them
    "resnet": f"{CLS} --batch_norm group --norm_batch_size 4 --max_micro_batch_size 8 --workers 2 --tracker wandb {VARIED}",
    "vit": f"{CLS} --model test_vit --workers 2 --mixup 0.2",
    "fcos": f"{DET} --detector fcos --batch_norm group --norm_batch_size 2 --workers 2 --lr 2e-3",
}
# For the first loss, which differs in the last bits of the type, and for all: batch norm and Adam amplify that step by step.
TOLERANCE = {"bf16": (2**-7, 2**-5), "fp16": (2**-10, 2**-5), "fp32": (1e-5, 4e-4)}


@pytest.fixture(scope="module")
def exact(run_several, words) -> dict[str, Outcome]:
    """The same runs in float64 on the CPU."""
    flags = {name: f"{flags} --dtype float64".replace("wandb", "none") for name, flags in ROUNDED.items()}
    return run_several(1, {name: words(name, flags[name], "exact") for name in ROUNDED}, as_typed=True)


@pytest.mark.parametrize(
    "config", [pytest.param(c, marks=[pytest.mark.long] * (n > 0)) for n, c in enumerate(PRECISIONS)]
)
def test_runs_in_any_precision_train_evaluate_draw_and_resume(config: str, run_on_gpus, words, exact) -> None:
    """Losses stay as close to float64 as the precision allows over a few steps."""
    cases = {name: words(name, flags, config) for name, flags in ROUNDED.items()}
    half = cases["resnet"][-1] / "resnet" / "checkpoints" / f"step_{HALF:08d}"
    cases["resumed"] = words("resumed", f"{ROUNDED['resnet']} --resume {half}", config)
    runs = run_on_gpus(PRECISIONS[config], cases, config=config, as_typed=True, pictures=True)
    for name in ROUNDED:
        assert runs[name].outcome == "ok" and "could not be drawn" not in runs[name].stdout, runs[name].stdout
        assert {"eval/count", "eval/loss" if name != "fcos" else "eval/AP"} <= runs[name].rows[-1].keys()
        first, later = TOLERANCE[config.removeprefix("single_gpu").removeprefix("multi_gpu").strip("_") or "fp32"]
        losses, expected = (run.column("train/loss") for run in (runs[name], exact[name]))
        np.testing.assert_allclose(losses[0], expected[0], rtol=first)
        np.testing.assert_allclose(losses, expected, rtol=later)
        assert list((runs[name].folder / "pictures").glob("confusion*")) and (runs[name].folder / "best").is_dir()
    assert list((runs["resnet"].folder / "wandb").glob("offline-run-*"))
    assert list(runs["resumed"].column("train/loss")) == list(runs["resnet"].column("train/loss")[HALF:])
    assert identical(runs["resumed"].tensors(), runs["resnet"].tensors())
