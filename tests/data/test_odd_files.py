"""Files that a stranger may have put there are refused in one line, in bounded time and memory, by
whatever reads them.
"""

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
import timm
import torch

from common.checkpoints.resume import load_model
from common.checkpoints.store import Checkpoints, Damaged, verify
from common.classification import sources
from common.config.fields import RunConfig
from common.config.parsing import parse
from common.data.decoding import Picture
from common.data.images import BrokenImage, open_rgb
from common.detection.data import sources as detection
from common.detection.data.image_headers import read_file_headers
from common.detection.weights.sources import read_weights
from common.errors import Refused
from common.run.folder import read_json
from common.training import timm_models
from tests.harness.drawings import draw_tree
from tests.harness.odd_files import bounded, link_to_fifo, write_huge

Place = Callable[[Path], None]
KINDS = {"a link to a FIFO": link_to_fifo, "a huge file": write_huge}


def write_at(file: str, read: Callable[[str], object]) -> Callable[[Path, Place], None]:
    """Puts the odd thing at `file`, and gives its path to `read`."""

    def reader(root: Path, put: Place) -> None:
        put(root / file)
        read(str(root / file))

    return reader


def write_labelled(data: str | Path) -> None:
    sources.load(sources.Spec(str(data), seed=0, val_share=0.2))


def write_annotated(data: str | Path) -> None:
    detection.load(detection.Spec(str(data), seed=0, val_share=0.2))


def save_data_set(root: Path, put: Place) -> None:
    datasets.Dataset.from_dict({"image": ["x"], "label": [0]}).save_to_disk(root / "saved")
    (root / "saved/data-00000-of-00001.arrow").unlink()
    put(root / "saved/data-00000-of-00001.arrow")
    write_labelled(root / "saved")


def write_model_weights(root: Path, put: Place) -> None:
    model = timm.create_model("test_vit", num_classes=3)
    timm_models.export_classifier(
        model, "abc", timm_models.resolve_data_config(model), False, {}, root / "best"
    )
    (root / "best/model.safetensors").unlink()
    put(root / "best/model.safetensors")
    timm_models.build_classifier(str(root / "best"), 3)


def write_detector_config(root: Path, put: Place) -> None:
    put(root / "config.json")
    if not (root / "config.json").is_file():
        raise Refused("no config.json is in it")  # as the recipe says before
    read_weights(str(root))


def save_checkpoint(file: str) -> Callable[[Path, Place], None]:
    def read(root: Path, put: Place) -> None:
        path = Checkpoints(root).save({"step": 1}, {"model": {"a": torch.zeros(3)}})
        (path / file).unlink()
        put(path / file)
        with pytest.raises(Refused):
            load_model(torch.nn.Linear(1, 1), path)
        verify(path)

    return read


def write_annotation(file: str, content: dict) -> Callable[[Path, Place], None]:
    """A file of a folder with annotations."""

    def read(root: Path, put: Place) -> None:
        draw_tree(root, content)
        (root / file).unlink(missing_ok=True)
        put(root / file)
        write_annotated(root)

    return read


VOC = {"Annotations": None, "ImageSets/Main": None, "JPEGImages": 1}
YOLO = {"images/train": 1, "labels/train": None, "data.yaml": "names: [a]\ntrain: images/train"}
READERS = {
    "--config": write_at("preset.yaml", lambda file: parse(RunConfig, ["--config", file])),
    "an image": write_at("image.jpg", open_rgb),
    "an image that is read in part": write_at("image.jpg", Picture),
    "a parquet file": write_at("data.parquet", write_labelled),
    "a CSV file": write_at("data.csv", write_labelled),
    "a saved data set": save_data_set,
    "weights of a model": write_model_weights,
    "weights of a detector": write_at("weights.pth", read_weights),
    "config.json of a detector": write_detector_config,
    **{
        f"{file} of a checkpoint": save_checkpoint(file)
        for file in ("manifest.json", "record.json", "model.safetensors")
    },
    "train.json of COCO": write_at("train.json", lambda file: write_annotated(Path(file).parent)),
    "an XML file of VOC": write_annotation("Annotations/0.xml", VOC),
    "a list of VOC": write_annotation("ImageSets/Main/train.txt", VOC),
    "a label file of YOLO": write_annotation("labels/train/0.txt", YOLO),
    "data.yaml of YOLO": write_annotation("data.yaml", YOLO),
    "a list of YOLO": write_annotation(
        "list.txt", YOLO | {"data.yaml": "names: [a]\ntrain: list.txt"}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_none_is_refused_in_one_line(
    tmp_path: Path, monkeypatch, reader: str, kind: str
) -> None:
    monkeypatch.setenv("VISION_RECIPES_CACHE", str(tmp_path / "index"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "data").mkdir()
    if kind == "a huge file" and reader == "weights of a model":
        pytest.skip("has no limit: weights are mapped into memory")
    with bounded(), pytest.raises((Refused, BrokenImage, Damaged)) as raised:
        READERS[reader](tmp_path / "data", KINDS[kind])
    assert str(raised.value).strip() and "\n" not in str(raised.value)


def test_a_fifo_counts_as_absent_or_as_an_unreadable_image(tmp_path: Path) -> None:
    link_to_fifo(tmp_path / "a.jpg")
    with bounded():
        assert read_json(tmp_path / "a.jpg") == {}
        assert read_file_headers(
            str(tmp_path), pa.array([b"a.jpg"], pa.large_binary())
        ).tolist() == [[0, 0, 1, 0]]


def test_names_that_no_file_can_have_are_missing(tmp_path: Path) -> None:
    for name in (b"a\0b.jpg", b"x" * 300):
        with pytest.raises(Refused, match="1 of 1 annotated images are missing"):
            read_file_headers(str(tmp_path), pa.array([name], pa.large_binary()))


def test_a_checkpoint_names_no_file_elsewhere(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save({"step": 1}, {"model": {"a": torch.zeros(3)}})
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("/dev/zero", "../manifest.json"):
        (path / "manifest.json").write_text(
            json.dumps(manifest | {name: {"bytes": 0, "sha256": ""}})
        )
        with bounded(), pytest.raises(Damaged, match="is no file of it"):
            verify(path)
