"""Evaluated images are decoded once a run, within a share of the memory, and stay the same pixels."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from common.classification.batches import EvalDataset
from common.classification.sources import Spec, load
from common.data.cache import EVAL_MEMORY_SHARE, EvalCache
from common.data.loader import create_eval_loader
from common.distributed import environment

DATA_CONFIG = {"input_size": (3, 48, 48), "interpolation": "bilinear", "crop_pct": 0.9}


@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_decoded_once_and_stay_the_same(stripes, tmp_path, workers) -> None:
    """After the first evaluation their files are not missed."""
    folder = shutil.copytree(stripes, tmp_path / "stripes")
    _, val = load(Spec(str(folder), seed=0, val_share=0.2))
    transforms = SimpleNamespace(data_config=DATA_CONFIG, normalize=None)
    expected = [batch.images for batch in create_eval_loader(EvalDataset(val, transforms), 8, 0)]
    dataset = EvalDataset(val, transforms)
    dataset.cache = EvalCache(num_ranks=1)
    batches = create_eval_loader(dataset, 8, workers)
    for _ in range(3):
        actual = [batch.images.clone() for batch in batches]
        assert len(actual) == len(expected) > 2
        assert all(map(torch.equal, actual, expected))
        shutil.rmtree(folder, ignore_errors=True)


def test_a_cache_takes_its_share_of_the_memory(monkeypatch, tmp_path) -> None:
    image = torch.zeros(3, 10, 10, dtype=torch.uint8)
    limit = int(2 * 2.5 * image.nbytes / EVAL_MEMORY_SHARE)
    for name, text in {"max": limit, "current": 0, "stat": "inactive_file 0"}.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(environment, "_CGROUP", tmp_path)
    cache = EvalCache(num_ranks=2)
    decoded = []
    for index in [0, 1, 2, 3] * 2:
        cache.get(index, lambda index=index: decoded.append(index) or image)
    assert decoded == [0, 1, 2, 3, 2, 3], "two images fit"


def test_available_memory_is_the_containers_if_it_has_less(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(environment, "_CGROUP", tmp_path)
    of_machine = environment.get_available_memory()
    # 3 GiB, 2.5 of them used, 1 of these by files that were read.
    facts = {
        "memory.max": 3 * 2**30,
        "memory.current": 5 * 2**29,
        "memory.stat": f"anon 1\ninactive_file {2**30}",
    }
    for name, text in facts.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert environment.get_available_memory() == min(of_machine, 3 * 2**29)
    (tmp_path / "memory.max").write_text("max\n")
    assert environment.get_available_memory() == pytest.approx(of_machine, rel=0.2)
