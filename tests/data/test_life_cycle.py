"""What loaders and workers need of every source: it can be pickled, works after a fork, and holds
no object for each row.
"""

import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest

from common.classification import sources as labelled
from common.detection.data import sources as annotated
from tests.harness.annotations import build_annotation, write_coco
from tests.harness.drawings import draw_pets
from tests.harness.launching import ROOT

ROWS = range(60)
LABELLED = ("digits", "folder", "table")
ANNOTATED = {"coco with masks": {"masks": True}, "table of objects": {"box_format": "xywh"}}


def build_data(kind: str, root: Path) -> Path | str:
    if kind == "folder":
        return draw_pets(root / "pets", cats=40, dogs=40)
    if kind.startswith("table"):
        files = sorted(draw_pets(root, cats=40, dogs=40).rglob("*.*"))
        images = [{"bytes": file.read_bytes(), "path": None} for file in files]
        objects = [{"bbox": [[1.0, 1.0, 2.0, 1.5]], "category": ["cat"]}] * 80
        columns = {"objects": objects} if "objects" in kind else {"label": [0, 1] * 40}
        table = datasets.Dataset.from_dict({"image": images} | columns).cast_column(
            "image", datasets.Image()
        )
        table.save_to_disk(root / "table")
        return root / "table"
    if kind == "digits":
        return kind
    outline = {"segmentation": [[1, 1, 6, 1, 6, 6]]}
    return write_coco(
        root, ids=ROWS, annotations=[build_annotation(n, [n % 9, 1, 5, 5]) | outline for n in ROWS]
    )


@pytest.mark.parametrize("kind", [*LABELLED, *ANNOTATED])
def test_a_source_lives_in_workers(kind: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".cache")
    task = annotated if kind in ANNOTATED else labelled
    spec = task.Spec(
        str(build_data(kind, tmp_path / "data")), seed=0, val_share=0.25, **ANNOTATED.get(kind, {})
    )
    source, _ = task.load(spec)
    count = 4 if kind in ANNOTATED else len(source)
    expected = [np.asarray(source.load_image(index)) for index in range(count)]
    twin = pickle.loads(pickle.dumps(source))
    facts = [
        (each.classes, each.fingerprint, each.get_name(3), each.notes) for each in (source, twin)
    ]
    assert facts[0] == facts[1]
    assert all(
        np.array_equal(np.asarray(twin.load_image(index)), expected[index])
        for index in range(count)
    )
    child = os.fork()
    if child == 0:
        same = all(
            np.array_equal(np.asarray(source.load_image(index)), expected[index])
            for index in range(count)
        )
        if task is annotated:
            same &= np.array_equal(
                source.load_sample(3, 0).image.decode().permute(1, 2, 0), expected[3]
            )
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    reachable = set()
    waiting = [source]
    while waiting:
        value = waiting.pop()
        if id(value) in reachable or isinstance(value, type | type(sys)) or callable(value):
            continue
        reachable.add(id(value))
        if isinstance(value, list | tuple | dict | set):
            assert len(value) < len(source), type(value)
        waiting.extend(gc.get_referents(value))
    assert len(reachable) > 3


def test_slow_imports_wait_until_they_are_needed() -> None:
    """Every process of every run imports these modules; most read neither digits nor tables."""
    code = (
        "import sys, common.classification.sources; first = {*sys.modules}; import "
        "common.detection.data.sources"
    )
    late = "{'torch', 'sklearn', 'datasets'} & first, {'sklearn', 'datasets'} & {*sys.modules}"
    command = [sys.executable, "-c", f"{code}; print({late})"]
    assert (
        subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout == "set() set()\n"
    )
