"""Both recipes compute on GPUs what they compute on the CPU.

A case is a command line. In float64 one CPU process and two GPUs agree to 1e-10 (real GPUs: 1e-8)
in losses, gradient norms, weights, statistics, moving averages, evaluation results and exported
weights. In half precision they agree as far as it allows. Pretended GPUs prove everything that
torch and the recipes do with a device, except the numbers of real kernels.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common.detection.models.detr_models import TRANSFORMERS_FAMILIES
from tests.harness.launching import add_small_defaults
from tests.harness.outcomes import Outcome, Tensors, identical
from tests.recipes import copied
from tests.recipes.test_layout import CHANGE, HEAD, KINDS

pytestmark = pytest.mark.gpu
IS_REAL = torch.cuda.is_available()
EXACT = 1e-8 if IS_REAL else 1e-10
REPEATS = "--deterministic" if IS_REAL else ""  # a pretended GPU repeats its bits without

STEPS = 3
HALF = 2
SHORT = f"--max_steps {STEPS} --log_every 1 --eval_every {STEPS} --checkpoint_every {HALF}"
CLS = f"{SHORT} --global_batch_size 16 --val_share 0.02 --lr 2e-3"
VARIED = "--mixup 0.2 --cutmix 1 --random_erasing 0.3 --color_jitter 0.3 --ema_decay 0.9 --clip 1"
DET = (
    f"{SHORT} --global_batch_size 4 --model test_resnet --levels 3-4 "
    "--width 32 --short_sides 64,96 --warmup_epochs 0 --hflip 0.3 --ema_decay 0.9 --clip 1"
)
FLOAT64 = {
    "global": f"{CLS} {VARIED} {REPEATS} --batch_norm global --label_smoothing 0.1 --channels_last",
    "group": (
        f"{CLS} {VARIED} --batch_norm group --norm_batch_size 4 --max_micro_batch_size 4 "
        "--grad_checkpointing"
    ),
    "vit": f"{CLS} {VARIED} --model test_vit --drop_path 0.2",
    "fcos": f"{DET} --lr 2e-3 --detector fcos --batch_norm global --drop_path 0.1 --photometric 0.3",
    # Only in the long tests.
    "faster_rcnn": f"{DET} --lr 2e-3 --detector faster_rcnn --batch_norm frozen --max_micro_batch_size 2",
    "node": f"{CLS} --batch_norm node --clip 0.1 --clip_mode agc --opt sgd --lr 0.1 --ema_decay 0.9",
    "frozen": f"{CLS} --batch_norm frozen --loss bce --opt lamb --repeats 2 --class_weights sqrt",
    "convnext": (
        f"{CLS} {VARIED} --model test_convnext --clip 0.1 --clip_mode agc --opt lion --lr 5e-4 "
        "--drop_path 0.1"
    ),
    "retinanet": (
        f"{DET} --lr 2e-3 --detector retinanet --batch_norm group --norm_batch_size 2 "
        "--max_micro_batch_size 2"
    ),
    "rtdetr_v2": f"{DET} --lr 2e-4 --detector rtdetr_v2 --batch_norm frozen --max_micro_batch_size 2",
    "dfine": f"{DET} --lr 2e-4 --detector dfine --batch_norm frozen --max_micro_batch_size 2",
    "deimv2": f"{DET} --lr 2e-4 --detector deimv2 --batch_norm frozen --max_micro_batch_size 2",
    # cut by class
    "head": f"{CLS} --model test_vit --max_micro_batch_size 4 --ema_decay 0.9 --clip 1",
    "mask_rcnn": f"{DET} --lr 2e-3 --detector mask_rcnn --global_batch_size 2 --max_steps 1 --eval_every 1",
}
LONG = set(list(FLOAT64)[4:])
HEAD_IN_PARTS = CHANGE.replace(HEAD, KINDS["sampled"])
# A copy for which the device has no streams, as Apple's GPUs.
STREAMLESS = """\
@@ main
     config = parse(Config)
+    from common.distributed import devices
+
+    devices.has_streams = lambda device=None: False
"""
each = [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in FLOAT64]


@pytest.fixture(scope="module")
def build_argv(scenes, tmp_path_factory):
    """`build_argv(name, flags, device)`: the command line of a case, whose run folder is in the
    folder `device`.
    """
    runs = tmp_path_factory.mktemp("runs")
    head = copied.copy(runs / "head.py", HEAD_IN_PARTS)

    def build_argv(name: str, flags: str, device: str) -> list:
        argv = flags.split()
        task = "cls"
        if "--detector" in flags:
            task = "det"
            argv += ["--data", scenes]
            argv += ["--levels", "3-7"] if name in TRANSFORMERS_FAMILIES else ["--long_side", 96]
        recipe = head if name == "head" else f"recipes/{task}.py"
        return [recipe] + add_small_defaults(argv, task) + ["--output_dir", runs / device]

    return build_argv


@pytest.fixture(scope="module")
def runs(run_several, gpus, run_on_gpus, build_argv, thorough) -> dict[str, dict[str, Outcome]]:
    """Runs each case on two GPUs and on the CPU.

    The first case is also resumed from its middle, on the GPUs and on the CPU from the GPUs'
    checkpoint. A machine with one real GPU runs on that one what others run on two.
    """
    flags = {}
    for name, case_flags in FLOAT64.items():
        if thorough or name not in LONG:
            flags[name] = f"{case_flags} --dtype float64"
    output = build_argv("global", flags["global"], "gpus")[-1]
    half = output / "global" / "checkpoints" / f"step_{HALF:08d}"
    flags["from gpus"] = f"{flags['global']} --resume {half}"
    on_cpu = {name: build_argv(name, flags[name], "cpu") for name in flags}
    if thorough and IS_REAL:
        flags["compiled"] = f"{flags['group']} --compile"
    on_gpus = {name: build_argv(name, flags[name], "gpus") for name in flags}

    options = {"as_typed": True, "timeout": 1800 if thorough else 300}
    results = {"gpus": run_on_gpus(gpus.at_most(2), on_gpus, **options)}
    results["cpu"] = run_several(1, on_cpu, **options)
    for outcomes in results.values():
        for name, outcome in outcomes.items():
            assert outcome.outcome == "ok", (name, outcome.text)
    return results


def compute_distance(left: Tensors, right: Tensors) -> float:
    """Distance of two states, relative to their norm."""
    assert left and left.keys() == right.keys()
    size = 0
    difference = 0
    for name, tensor in left.items():
        size += tensor.double().square().sum()
        difference += (tensor.double() - right[name].double()).square().sum()
    return (difference / size).sqrt().item()


def assert_equal(actual: Outcome, expected: Outcome, from_step: int = 0) -> None:
    """Losses, gradient norms, results and states agree exactly; after `from_step`, if a run was
    resumed there.
    """
    actual_rows = [row for row in actual.rows if row["step"] > from_step]
    expected_rows = [row for row in expected.rows if row["step"] > from_step]
    keys = set()
    for row in actual_rows:
        keys |= row.keys()
    compared = {key for key in keys if key.startswith(("train/loss", "train/grad_norm", "eval/"))}
    assert {"train/loss", "train/grad_norm", "eval/count"} <= compared
    for key in compared:
        # None: NaN.
        values = np.array([row[key] for row in actual_rows if key in row], float)
        reference = np.array([row[key] for row in expected_rows if key in row], float)
        np.testing.assert_allclose(reference, values, rtol=EXACT, atol=1e-14, err_msg=key)
    files = {path.stem for path in actual.checkpoint.glob("*.safetensors")}
    for file in files - {"optimizer"}:
        assert compute_distance(actual.tensors(file), expected.tensors(file)) < EXACT, file
    best = load_file(actual.folder / "best" / "model.safetensors")
    expected_best = load_file(expected.folder / "best" / "model.safetensors")
    is_double = next(iter(best.values())).dtype == torch.float64
    assert compute_distance(best, expected_best) < (EXACT if is_double else 1e-6)


@pytest.mark.parametrize("name", each)
def test_two_gpus_train_and_evaluate_what_the_cpu_does(name: str, runs, record_property) -> None:
    on_cpu = runs["cpu"][name]
    on_gpus = runs["gpus"][name]
    record_property("weights apart", compute_distance(on_cpu.tensors(), on_gpus.tensors()))
    assert_equal(on_cpu, on_gpus)


@pytest.mark.long
def test_a_device_without_streams_trains_what_the_cpu_does(
    runs, run_on_gpus, build_argv, tmp_path
) -> None:
    """Copies and reports then wait for the device."""
    argv = build_argv("streamless", f"{FLOAT64['vit']} --dtype float64", "streamless")
    argv[0] = copied.copy(tmp_path / "streamless.py", STREAMLESS)
    [run] = run_on_gpus(1, {"streamless": argv}, as_typed=True).values()
    assert "perf/gpu_memory_gb" not in run.rows[0]
    assert "perf/gpu_memory_gb" in runs["gpus"]["vit"].rows[0]
    assert_equal(runs["cpu"]["vit"], run)


@pytest.mark.long
@pytest.mark.skipif(not IS_REAL, reason="compiled kernels run on real GPUs alone")
def test_a_compiled_model_trains_what_the_cpu_trains_without(runs) -> None:
    """Model, augmentation and loss, in graphs that are split where DDP sends gradients."""
    assert_equal(runs["cpu"]["group"], runs["gpus"]["compiled"])


def test_a_run_resumes_bit_equal_and_equal_elsewhere(runs) -> None:
    """A checkpoint of two GPUs, resumed on them and on the CPU."""
    whole = runs["gpus"]["global"]
    resumed = runs["gpus"]["from gpus"]
    losses = whole.column("train/loss").tolist()
    assert losses[HALF:] == resumed.column("train/loss").tolist()
    for file in ("model", "ema", "optimizer"):
        assert identical(whole.tensors(file), resumed.tensors(file)), file
    assert_equal(runs["cpu"]["global"], runs["cpu"]["from gpus"], HALF)


@pytest.mark.long
def test_a_detector_that_has_learnt_finds_the_same_on_gpus(
    run_several, gpus, run_on_gpus, scenes, tmp_path
) -> None:
    """A trained detector, since after the few steps of the other tests all evaluation results are still 0."""
    preset = ["--config", "recipes/presets/det_digits.yaml", "--output_dir", tmp_path]
    evaluated = preset + ["--data", scenes, "--dtype", "float64"]
    evaluated += ["--eval_only", tmp_path / "learnt" / "best"]
    cases = {"learnt": preset + ["--max_steps", 150], "cpu": evaluated}
    options = {"recipe": "recipes/det.py", "timeout": 1200}
    outcomes = [
        run_several(1, cases, **options)["cpu"],
        run_on_gpus(gpus.at_most(2), {"gpus": evaluated}, **options)["gpus"],
    ]
    cpu, gpu = (json.loads(outcome.stdout.splitlines()[-1]) for outcome in outcomes)
    assert cpu["count"] == 7 and 0.2 < cpu["AP50"] < 1
    assert cpu == (pytest.approx(gpu) if IS_REAL else gpu)


# ---- Half precision

PRECISIONS = [(1, "bf16"), (2, "fp16"), (2, "")]
ROUNDED = {  # with data workers, a tracker and plots, as users run them
    "resnet": (
        f"{CLS} --batch_norm group --norm_batch_size 4 --max_micro_batch_size 8 --workers 2 "
        f"--tracker wandb {VARIED} {REPEATS}"
    ),
    "vit": f"{CLS} --model test_vit --workers 2 --mixup 0.2",
    "fcos": f"{DET} --detector fcos --batch_norm group --norm_batch_size 2 --workers 2 --lr 2e-3",
}
# For the first loss, which differs in the last bits of the type, and for all: batch norm and Adam
# amplify that step by step.
TOLERANCE = {"bf16": (2**-7, 2**-5), "fp16": (2**-10, 2**-5), "": (1e-5, 4e-4)}
if IS_REAL:
    TOLERANCE[""] = TOLERANCE["fp16"]  # TF32 has as many digits


@pytest.fixture(scope="module")
def exact(run_several, build_argv, thorough) -> dict[str, Outcome]:
    """The same runs in float64 on the CPU."""
    cases = {}
    for name in ROUNDED if thorough else ["resnet"]:
        flags = f"{ROUNDED[name]} --dtype float64".replace("wandb", "none")
        cases[name] = build_argv(name, flags, "exact")
    return run_several(1, cases, as_typed=True)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=[pytest.mark.long] * (n > 0)) for n, each in enumerate(PRECISIONS)
    ],
)
def rounded(request, run_on_gpus, build_argv, exact) -> tuple[str, dict[str, Outcome]]:
    """A precision, and the runs in it."""
    devices, precision = request.param
    folder = f"{devices}{precision}"
    cases = {name: build_argv(name, ROUNDED[name], folder) for name in exact}
    half = cases["resnet"][-1] / "resnet" / "checkpoints" / f"step_{HALF:08d}"
    cases["resumed"] = build_argv("resumed", f"{ROUNDED['resnet']} --resume {half}", folder)
    return precision, run_on_gpus(devices, cases, precision=precision, as_typed=True, pictures=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "resnet")) for name in ROUNDED]
)
def test_losses_stay_as_close_to_float64_as_precision_allows(name: str, rounded, exact) -> None:
    precision = rounded[0]
    run = rounded[1][name]
    assert run.outcome == "ok" and "could not be drawn" not in run.stdout, run.stdout
    assert {"eval/count", "eval/AP" if name == "fcos" else "eval/loss"} <= run.rows[-1].keys()
    rtol_first, rtol = TOLERANCE[precision]
    losses = run.column("train/loss")
    expected = exact[name].column("train/loss")
    np.testing.assert_allclose(losses[0], expected[0], rtol=rtol_first)
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    assert list((run.folder / "pictures").glob("confusion*")) and (run.folder / "best").is_dir()


def test_a_run_in_any_precision_resumes_bit_equal(rounded) -> None:
    _, runs = rounded
    assert list((runs["resnet"].folder / "wandb").glob("offline-run-*"))
    losses = runs["resnet"].column("train/loss").tolist()
    assert runs["resumed"].column("train/loss").tolist() == losses[HALF:]
    assert identical(runs["resumed"].tensors(), runs["resnet"].tensors())


# ---- What only real GPUs can show


@pytest.mark.long
@pytest.mark.skipif(not IS_REAL, reason="a pretended GPU takes hours")
@pytest.mark.parametrize("precision", ["", "bf16", "fp16"])
@pytest.mark.parametrize(
    "preset, metric, promised, gpus_at_most",
    [("digits", "top1", 0.98, 16), ("det_digits", "AP50", 0.9, 2)],
)
def test_the_demo_reaches_what_its_preset_promises(
    gpus, run_on_gpus, record_property, tmp_path, preset, metric, promised, gpus_at_most, precision
) -> None:
    """On as many GPUs as it can use: each needs a group of samples for batch norm."""
    devices = gpus.at_most(gpus_at_most)
    recipe = "recipes/det.py" if preset.startswith("det") else "recipes/cls.py"
    cases = {"demo": ["--config", f"recipes/presets/{preset}.yaml", "--workers", 2]}
    [run] = run_on_gpus(devices, cases, precision=precision, recipe=recipe, timeout=600).values()
    assert np.isfinite(run.column("train/loss")).all()
    reached = run.column(f"eval/{metric}")[-1]
    record_property(metric, reached)
    record_property("GiB", run.column("perf/gpu_memory_gb").max())
    assert reached >= promised
