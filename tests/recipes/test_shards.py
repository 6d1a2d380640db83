"""Both recipes train on shards as on files: on any layout, from a disk or a web server, also resumed."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness.outcomes import read
from tests.harness.range_server import RangeServer
from tests.harness.shards import COUNTS, add, draw_noise, write_parquet, write_tars

STEPS = 12  # of 32 samples: an epoch of 349 samples, and some of the next
WORDS = (
    f"--model test_vit --dtype float64 --global_batch_size 32 --max_steps {STEPS} --schedule "
    "constant"
).split()
WORDS += "--log_every 1 --eval_every 6".split()
CLOSE = 1e-9
KEY = {"SHARDS_KEY": "Signature=s3cr3t"}
# Of answers about each shard.
FAULTS = ("", "", "status 503", "", "reset", "short", "", "other", "", "status 429 1")
BOXES = (
    "--model test_resnet --levels 3-4 --convolutions 1 --short_sides 80 --long_side 128 --width "
    "32 --batch_norm frozen --global_batch_size 6 --max_steps 4 --log_every 1 --eval_every 4 "
    "--dtype float64"
).split()
XYWH = ["--box_format", "xywh"]


@pytest.fixture(scope="module")
def data(scenes, tmp_path_factory) -> Path:
    """The same images as files, tars and Parquet, in parts train and val; and `scenes` in `boxes`."""
    root = tmp_path_factory.mktemp("shards")
    (root / "boxes").mkdir()
    for part, counts in (("train", (1, 7, 17)), ("val", (7,))):
        content = read(scenes / f"{part}.json")
        names = {annotation["id"]: int(annotation["name"]) for annotation in content["categories"]}
        rows = []
        for image in content["images"]:
            its = [
                annotation
                for annotation in content["annotations"]
                if annotation["image_id"] == image["id"]
            ]
            objects = [
                {"bbox": annotation["bbox"], "category": names[annotation["category_id"]]}
                for annotation in its
            ]
            file = (scenes / image["file_name"]).read_bytes()
            rows.append({"image": file, "objects": objects, "image_id": image["id"]})
        schema = pa.Table.from_pylist(rows).schema
        for number, count in enumerate(counts):
            shard = rows[:count]
            rows = rows[count:]
            with tarfile.open(root / f"boxes/{part}-{number:03}.tar", "w") as tar:
                for index, row in enumerate(shard):
                    add(tar, f"{index:03}.png", row["image"])
                    described = {
                        "objects": row["objects"],
                        "image_id": row["image_id"],
                        "caption": "no matter",
                    }
                    add(tar, f"{index:03}.json", json.dumps(described).encode())
            table = pa.Table.from_pylist(shard, schema)
            pq.write_table(table, root / f"boxes/{part}-{number:03}.parquet", row_group_size=4)
    for part, counts, of_shards in (
        ("train", (130, 110, 109), COUNTS),
        ("val", (9, 8, 7), (5, 19)),
    ):
        folder = draw_noise(root / "files" / part, counts, seed=len(part))
        write_tars(folder, root / "tars", part, of_shards)
        write_parquet(folder, root / "parquet", part, of_shards)
    return root


@pytest.fixture(scope="module")
def server(data):
    with RangeServer() as server:
        server.files = {
            f"/{file.relative_to(data)}": file.read_bytes() for file in data.glob("*/*-*")
        }
        yield server


def build_data_argument(server, kind: str) -> str:
    """The shards of both parts as `--data` names them."""
    base = f"{server.url}/{kind}"
    suffix = "tar" if kind == "tars" else "parquet"
    val = "000" if kind == "boxes" else "{000..001}"
    return f"{base}/train-{{000..002}}.{suffix}?$SHARDS_KEY,{base}/val-{val}.{suffix}?$SHARDS_KEY"


@pytest.fixture(scope="module")
def runs(run_several, scenes, data, server, tmp_path_factory):
    """Runs on one process and, from a server with faults, on three, which also end what one has begun."""
    blocks = ["--data", build_data_argument(server, "parquet"), "--shard_memory", 1]
    begun = ["--name", "begun", "--output_dir", tmp_path_factory.mktemp("begun")]
    single_rank_cases = {
        "files": ["--data", data / "files"],
        "tars": ["--data", data / "tars"],
        "parquet": ["--data", data / "parquet", "--workers", 2],
        "tars from a server": ["--data", build_data_argument(server, "tars")]
        + ["--workers", 2, "--cache", 32],
        "blocks": blocks + ["--workers", 0],
        "first half": blocks + begun + ["--max_steps", 5],
    }
    three = {
        "tars": ["--data", data / "tars", "--workers", 2],
        "blocks": blocks + ["--workers", 3],
        "second half": blocks + begun,
        "evaluated": ["--data", data / "tars", "--eval_only", "BEST", "--split", "val"],
        "tried": ["--data", build_data_argument(server, "tars"), "--dry_run"],
    }
    cases = {name: WORDS + args for name, args in single_rank_cases.items()}
    boxes = {
        "folder": [scenes],
        "tars": [data / "boxes/*.tar"] + XYWH,
        "parquet": [build_data_argument(server, "boxes")] + XYWH,
    }
    cases |= {
        f"boxes of {kind}": ["recipes/det.py"] + BOXES + ["--data"] + args
        for kind, args in boxes.items()
    }
    outcomes = {1: run_several(1, cases, env=KEY)}
    server.faults |= {
        path: list(FAULTS) for path in server.files if path.startswith("/parquet/train")
    }
    best = outcomes[1]["tars"].folder / "best"
    args_by_case = {
        name: [str(word).replace("BEST", str(best)) for word in args]
        for name, args in three.items()
    }
    return outcomes | {
        3: run_several(
            3,
            {name: WORDS + args for name, args in args_by_case.items()},
            env=KEY,
        )
    }


KEYS = ("train/loss", "eval/loss", "eval/top1")


@pytest.mark.parametrize("kind", ["tars", "parquet", "tars from a server"])
def test_shards_train_as_their_files_bit_for_bit(runs, kind):
    assert len(runs[1]["files"].column("train/loss")) == STEPS
    for key in KEYS:
        assert np.array_equal(runs[1][kind].column(key), runs[1]["files"].column(key)), key


@pytest.mark.parametrize("kind", ["tars", "parquet"])
def test_shards_of_boxes_train_as_their_folder_bit_for_bit(runs, kind):
    folder = runs[1]["boxes of folder"]
    shards = runs[1][f"boxes of {kind}"]
    assert len(folder.column("train/loss")) == 4
    for key in ("train/loss", "eval/ap"):
        assert np.array_equal(shards.column(key), folder.column(key)), key


@pytest.mark.long
def test_shards_of_boxes_train_the_same_on_three_processes(runs, run_several, data, server):
    """Of blocks also with mosaics, whose other images come from the same step."""
    args = BOXES + XYWH + ["--data"]
    det = {"recipe": "recipes/det.py", "env": KEY}
    tars = args + [data / "boxes/*.tar"]
    blocks = args + [build_data_argument(server, "boxes"), "--shard_memory", 1]
    blocks += ["--mosaic", 1, "--mixup", 0.5]
    single_rank = {"tars": runs[1]["boxes of tars"]} | run_several(
        1, {"blocks": blocks + ["--workers", 2]}, **det
    )
    three = {
        "tars": tars,
        "blocks": blocks,
        "evaluated": tars + ["--eval_only", single_rank["tars"].folder / "best"],
    }
    outcomes = run_several(3, three, **det)
    for kind in ("tars", "blocks"):
        np.testing.assert_allclose(
            outcomes[kind].column("train/loss"), single_rank[kind].column("train/loss"), rtol=1e-9
        )
    assert outcomes["evaluated"].outcome == "ok"


@pytest.mark.parametrize("kind", ["tars", "blocks"])
def test_shards_train_the_same_on_three_processes_and_workers(runs, server, kind):
    assert not server.faults["/parquet/train-002.parquet"], "all of them were met"
    for key in KEYS:
        assert np.abs(runs[3][kind].column(key) - runs[1][kind].column(key)).max() < CLOSE, key


def test_blocks_are_an_order_that_a_resumed_run_keeps(runs):
    whole = runs[1]["blocks"]
    halves = runs[3]["second half"]
    assert not np.array_equal(whole.column("train/loss"), runs[1]["files"].column("train/loss"))
    assert "resuming from step 5 of 12" in halves.stdout
    assert np.abs(halves.column("train/loss") - whole.column("train/loss")).max() < CLOSE


def test_shards_are_evaluated_alone_and_tried_in_a_dry_run(runs):
    assert [runs[3][name].outcome for name in ("evaluated", "tried")] == ["ok", "ok"]
    assert "images in" not in runs[3]["tried"].text and "duplicates" in runs[3]["tried"].stdout


def test_a_signature_reaches_the_server_and_stands_nowhere_else(runs, server, tmp_path_factory):
    assert {path.partition("?")[2] for path, _, _ in server.requests} == {"Signature=s3cr3t"}
    for of_world in runs.values():
        for outcome in of_world.values():
            assert "s3cr3t" not in outcome.text + outcome.stdout
            files = [file for file in outcome.folder.rglob("*") if file.is_file()]
            assert not [file for file in files if b"s3cr3t" in file.read_bytes()]
