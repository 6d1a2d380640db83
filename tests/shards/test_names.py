"""What `--data` names decides whether the room of shards is entered at all."""

import subprocess
import sys

import pytest

from common.data.data_spec import list_tars, names_shards
from tests.harness.drawings import draw_stripes
from tests.harness.launching import ROOT

SHARDS = [
    "train.tar",
    "/data/train-{000..127}.tar,/data/val-{000..006}.tar",
    "train-*.tar",
    "https://h/a.tar?$SIGNATURE",
    "https://h/train-{0..3}.parquet",
    "hf://datasets/owner/name/a.parquet",
    "s3://bucket/folder",
    "simplecache::https://h/a.tar",
]
OTHERS = [
    "digits",
    "~/flowers",
    "owner/name",
    "owner/name:config",
    "labels.csv",
    "train.parquet",
    "a.tar.gz",
    "tars/",
]


@pytest.mark.parametrize("data", SHARDS + OTHERS)
def test_the_text_alone_decides(data) -> None:
    assert names_shards(data) == (data in SHARDS)


def test_a_folder_of_tars_has_more_tars_than_images(tmp_path) -> None:
    for file in (
        "a.tar train/b.tar train/.hidden.tar deep/er/c.tar notes.txt preview.png more/preview.png"
    ).split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert list_tars(tmp_path) == [f"{tmp_path}/a.tar", f"{tmp_path}/train/b.tar"]
    (tmp_path / "more/other.jpg").touch()
    assert list_tars(tmp_path) == []
    assert list_tars(tmp_path / "a.tar") == list_tars(tmp_path / "nothing") == []


PROGRAM = """
import sys
from common.classification import batches, sources
from common.detection import batches
from common.detection.data import sources as detection_sources
for data in sys.argv[1:]:
    sources.load(sources.Spec(data, seed=0, val_share=0.2))
detection_sources.load(detection_sources.Spec("digits", seed=0, val_share=0.2))
print([name for name in sys.modules if name.startswith("common.shards")])
"""


def test_folders_tables_and_digits_do_not_enter_the_room(tmp_path) -> None:
    draw_stripes(tmp_path / "folder", (4, 4))
    lines = [f"{image},{image.parent.name}" for image in (tmp_path / "folder").rglob("*.*")]
    (tmp_path / "table.csv").write_text("\n".join(["image,label", *lines]))
    argv = [
        sys.executable,
        "-c",
        PROGRAM,
        str(tmp_path / "folder"),
        str(tmp_path / "table.csv"),
        "digits",
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout == "[]\n", done.stderr
