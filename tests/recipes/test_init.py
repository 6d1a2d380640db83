"""A detector that begins with torchvision's weights has their numbers before its first step.

The weights are random ones of torchvision's FCOS, the data have one class that they know and one
that they don't.
"""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.transforms.v2 import functional as F

from tests.detection.weights.test_torchvision_weights import build_random_model
from tests.harness.annotations import build_annotation, write_coco
from tests.harness.detections import evaluate_with_pycocotools
from tests.harness.outcomes import read

SIDE = 96  # of the images, which are evaluated at scale 1


def test_an_evaluation_of_a_file_has_the_numbers_of_torchvision(forks, tmp_path) -> None:
    reference = build_random_model("fcos_resnet50_fpn")
    file = tmp_path / "x.pth"
    data = tmp_path / "data"
    with torch.no_grad():
        # Person and cup are what it finds.
        reference.head.classification_head.cls_logits.bias[[1, 47]] += 3
    torch.save(reference.state_dict(), file)
    photo = load_sample_images().images[0]
    random = np.random.default_rng(0)
    for part, numbers in (("train", [1]), ("val", range(9, 13))):
        boxes = [
            build_annotation(
                n,
                [*random.uniform(0, 40, 2), *random.uniform(20, 50, 2)],
                1 + k,
                id=10 * n + k,
                area=900,
            )
            for n in numbers
            for k in range(2)
        ]
        size = {"width": SIDE + 16, "height": SIDE}
        write_coco(
            data,
            part,
            list(numbers),
            boxes,
            [{"id": 1, "name": "Person"}, {"id": 2, "name": "mug"}],
            **size,
        )
        for n in numbers:
            top, left = random.integers(0, 300, 2)
            crop = Image.fromarray(photo[top : top + SIDE, left : left + SIDE + 16])
            crop.save(data / part / f"{n}.jpg", quality=100)
    args = (
        f"--eval_only {file} --data {data} --init_classes mug=cup --short_sides {SIDE} "
        "--long_side 1000"
    )
    content = read(data / "val.json")
    reference.transform.min_size = (SIDE,)
    reference.transform.max_size = 1000
    rows = []
    for number in (image["id"] for image in content["images"]):
        image = F.to_image(Image.open(data / "val" / f"{number}.jpg").convert("RGB"))
        with torch.no_grad():
            detections = reference([image / 255])[0]
        for box, label, score in zip(
            *(detections[key].tolist() for key in ("boxes", "labels", "scores")), strict=True
        ):
            if label in (1, 47):  # COCO's person and cup
                sides = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
                rows.append(
                    {
                        "image_id": number,
                        "category_id": 1 + (label == 47),
                        "bbox": sides,
                        "score": score,
                    }
                )
    for target in content["annotations"]:  # objects where it finds some, a little narrower
        best = [
            row
            for row in rows
            if (row["image_id"], row["category_id"]) == (target["image_id"], target["category_id"])
        ]
        if best:
            left, top, width, height = best[0]["bbox"]
            target["bbox"] = [left + 0.07 * width, top, 0.93 * width, height]
    (data / "val.json").write_text(json.dumps(content))
    ended = forks(args.split(), recipe="det")
    assert ended.code == 0, ended.stderr
    results = json.loads(ended.stdout.splitlines()[-1])
    evaluation = evaluate_with_pycocotools(content, rows)
    assert rows and evaluation.stats[8] > 0  # some recall
    for index, name in enumerate(
        ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100")
    ):
        expected = evaluation.stats[index]
        assert results[name] == (None if expected == -1 else pytest.approx(expected, abs=1e-4)), (
            name
        )
