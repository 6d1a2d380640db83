"""The detection recipe trains on shards as on a folder: tars with a .json of objects, and Parquet from a web server."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness.range_server import RangeServer
from tests.harness.shards import add

STEPS = 4
FLAGS = (
    "--model test_resnet --levels 3-4 --convolutions 1 --short_sides 80 --long_side 128 --width 32 --batch_norm frozen "
    f"--global_batch_size 6 --max_steps {STEPS} --log_every 1 --eval_every {STEPS} --dtype float64"
)
PARTS = {"train": (1, 7, 17), "val": (7,)}  # images of each shard


@pytest.fixture(scope="module")
def data(scenes: Path, tmp_path_factory) -> Path:
    """The images of `scenes` as tars and Parquet."""
    root = tmp_path_factory.mktemp("boxes")
    for part, counts in PARTS.items():
        content = json.loads((scenes / f"{part}.json").read_text())
        names, rows = {one["id"]: int(one["name"]) for one in content["categories"]}, []
        for image in content["images"]:
            its = [one for one in content["annotations"] if one["image_id"] == image["id"]]
            objects = [{"bbox": one["bbox"], "category": names[one["category_id"]]} for one in its]
            file = (scenes / image["file_name"]).read_bytes()
            rows.append({"image": file, "objects": objects, "image_id": image["id"]})
        schema = pa.Table.from_pylist(rows).schema
        for number, count in enumerate(counts):
            shard, rows = rows[:count], rows[count:]
            with tarfile.open(root / f"{part}-{number}.tar", "w") as tar:
                for place, row in enumerate(shard):
                    add(tar, f"{place:03}.png", row["image"])
                    described = {"objects": row["objects"], "image_id": row["image_id"], "caption": "no matter"}
                    add(tar, f"{place:03}.json", json.dumps(described).encode())
            table = pa.Table.from_pylist(shard, schema)
            pq.write_table(table, root / f"{part}-{number}.parquet", row_group_size=4)
    return root


@pytest.fixture(scope="module")
def server(data):
    with RangeServer() as server:
        server.files = {f"/{file.name}": file.read_bytes() for file in data.glob("*-*")}
        yield server


def from_server(server, kind: str) -> list[str]:
    return ["--data", f"{server.url}/train-{{0..2}}.{kind},{server.url}/val-0.{kind}", "--box_format", "xywh"]


@pytest.fixture(scope="module")
def runs(run_several, scenes, data, server):
    cases = {
        "folder": ["--data", scenes],
        "tars": ["--data", data / "*.tar", "--box_format", "xywh", "--workers", 1],
        "parquet": from_server(server, "parquet"),
    }
    return run_several(1, {name: [*FLAGS.split(), *words] for name, words in cases.items()}, recipe="recipes/det.py")


@pytest.mark.parametrize("kind", ["tars", "parquet"])
def test_shards_train_as_their_folder_bit_for_bit(runs, kind):
    assert len(runs["folder"].column("train/loss")) == STEPS and runs[kind].outcome == "ok", runs[kind].text
    for key in ("train/loss", "eval/ap"):
        assert np.array_equal(runs[kind].column(key), runs["folder"].column(key)), key


@pytest.mark.long
def test_shards_train_the_same_on_three_processes(runs, run_several, data, server):
    """Of blocks also with mosaics, whose other images come from the same step."""
    blocks = [*FLAGS.split(), *from_server(server, "parquet"), "--shard_memory", 1, "--mosaic", 1, "--mixup", 0.5]
    alone = run_several(1, {"blocks": [*blocks, "--workers", 2]}, recipe="recipes/det.py")["blocks"]
    cases = {
        "tars": [*FLAGS.split(), "--data", data / "*.tar", "--box_format", "xywh", "--workers", 1],
        "blocks": [*blocks, "--workers", 1],
        "evaluated": [*FLAGS.split(), *from_server(server, "tar"), "--eval_only", runs["tars"].folder / "best"],
    }
    found = run_several(3, cases, recipe="recipes/det.py")
    for kind, one in (("tars", runs["tars"]), ("blocks", alone)):
        np.testing.assert_allclose(found[kind].column("train/loss"), one.column("train/loss"), rtol=1e-9)
    assert found["evaluated"].outcome == "ok"
