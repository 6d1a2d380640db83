"""The shortest command on a folder of photographs trains with settings for photographs, and says so."""

import re

import numpy as np
import yaml

from tests.harness.annotations import build_annotation, write_coco
from tests.harness.photographs import encode_jpeg

SHAPES = ((320, 240), (240, 320), (300, 300), (427, 200))

# Of the start table.
TABLE = (r"^  pretrained +no; --pretrained ", r"^  batch norm +none in this model")


def test_a_folder_is_trained_on_as_photographs_on_any_layout(run_several, tmp_path) -> None:
    """With an odd batch."""
    for number in range(10):
        file = tmp_path / "flowers" / ("rose", "tulip")[number % 2] / f"IMG_{number:04}.JPG"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encode_jpeg(*SHAPES[number // 2 % len(SHAPES)]))
    command = [
        "--data",
        tmp_path / "flowers",
        "--max_steps",
        2,
        "--global_batch_size",
        3,
        "--log_every",
        1,
    ]
    one_rank, two_ranks = (
        run_several(count, {"run": command}, as_typed=True)["run"] for count in (1, 2)
    )
    for run in (one_rank, two_ranks):
        for pattern in (*TABLE, r"^  input +3 x 224 x 224$"):
            assert re.search(pattern, run.stdout, re.MULTILINE), run
        config = yaml.safe_load((run.folder / "config.yaml").read_text())
        assert (config["image_size"], config["hflip"], config["model"]) == (0, 0.5, "convnext_atto")
        assert run.read("best/config.json")["pretrained_cfg"]["input_size"] == [3, 224, 224]
    assert len(one_rank.column("train/loss")) == 2
    np.testing.assert_allclose(
        two_ranks.column("train/loss"), one_rank.column("train/loss"), rtol=1e-3
    )


def test_photographs_with_boxes_are_trained_on_as_photographs(run_several, tmp_path) -> None:
    boxes = [build_annotation(number, [5, 5, 20, 15], (3, 7)[number % 2]) for number in range(5)]
    command = [
        "--data",
        write_coco(tmp_path, ids=range(5), annotations=boxes),
        "--max_steps",
        1,
        "--global_batch_size",
        2,
    ]
    run = run_several(1, {"one": command}, recipe="recipes/det.py", as_typed=True)["one"]
    assert all(re.search(pattern, run.stdout, re.MULTILINE) for pattern in TABLE), run
    exported = run.read("best/config.json")
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert (exported["short_side"], exported["long_side"], config["levels"]) == (480, 800, "3-7")
