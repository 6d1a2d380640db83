"""A head that is cut by class over two GPUs trains what it trains in one CPU process, and in fp16 skips what overflows."""

from pathlib import Path

import numpy as np
import pytest

from tests.harness.drawings import draw_stripes
from tests.harness.launching import small
from tests.pretended_gpu.test_equal import EXACT, SHORT, apart
from tests.recipes.copied import copy
from tests.recipes.test_margin_head import CHANGE, HEAD, KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.long]
FLAGS = f"{SHORT} --model test_vit --lr 2e-3 --global_batch_size 7 --max_micro_batch_size 2 --ema_decay 0.9 --clip 1"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """words(kind, place) -> the command line of a run."""
    folder = tmp_path_factory.mktemp("identities")
    draw_stripes(folder / "data/train", (4,) * 11)
    draw_stripes(folder / "data/val", (2,) * 11, seed=1)
    recipes = {kind: copy(folder / f"{kind}.py", CHANGE.replace(HEAD, head)) for kind, head in KINDS.items()}

    def of(kind: str, place: str, *more: str) -> list[str | Path]:
        return [
            recipes[kind],
            *small([*FLAGS.split(), "--data", folder / "data", "--output_dir", folder / place, *more]),
        ]

    return of


@pytest.fixture(scope="module")
def exact(run_several, words) -> dict:
    return run_several(1, {kind: words(kind, "cpu", "--dtype", "float64") for kind in KINDS}, as_typed=True)


def test_two_gpus_train_what_the_cpu_does(exact, gpus, run_on_gpus, words) -> None:
    cases = {kind: words(kind, "gpus", "--dtype", "float64") for kind in KINDS}
    for kind, run in run_on_gpus(gpus.at_most(2), cases, as_typed=True, timeout=500).items():
        assert run.outcome == "ok", run.text
        for key in ("train/loss", "train/grad_norm", "eval/ema_recall_at_1", "eval/ema_verification_accuracy"):
            np.testing.assert_allclose(run.column(key), exact[kind].column(key), rtol=EXACT, err_msg=key)
        for file in ("model", "ema", "margin_head"):
            assert apart(exact[kind].tensors(file), run.tensors(file)) < EXACT, (kind, file)


def test_in_fp16_steps_that_overflow_are_skipped_on_both_gpus(exact, gpus, run_on_gpus, words) -> None:
    """Gradients of a head are large, so that the first scale is too: it is halved until they fit."""
    cases = {kind: words(kind, "fp16", "--max_steps", "8", "--eval_every", "8") for kind in KINDS}
    for kind, run in run_on_gpus(gpus.at_most(2), cases, precision="fp16", as_typed=True, timeout=500).items():
        assert run.outcome == "ok", run.text
        losses, norms = run.column("train/loss"), run.column("train/grad_norm")
        np.testing.assert_allclose(losses[0], exact[kind].column("train/loss")[0], rtol=0.01)
        taken = [norm is not None for norm in norms]
        assert len(losses) == 8 and taken[-1] and taken == sorted(taken), (kind, norms)
        assert kind != "cosface" or not taken[0]
        first = exact[kind].column("train/grad_norm")
        assert first.min() / 3 < norms[-1] < 3 * first.max(), "undone of the scale"
