"""What is read in these tests leaves its caches in the test's folder."""

import datasets
import pytest


@pytest.fixture(autouse=True)
def _caches_in_the_test_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".cache")
    datasets.disable_progress_bars()
