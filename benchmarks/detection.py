"""Measures what `recipes/det.py` adds to the detector's own step.

    python benchmarks/detection.py [--quick] [--turns N]

The recipe's own `main` is compared with a loop written by hand around the same detector, as in
`loop.py`: the same scenes in the same order, resizing, loss, optimizer, gradient norm and learning
rate per step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from paired import TOTAL_STEPS, Setting, build_recipe_loop, compare_loops, train_by_hand
from peers import CONVOLUTIONS, FCOS_FLAGS, LEVELS, WIDTH, collate_boxes
from table import Row, run_script
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from common.detection.data import sources
from common.detection.data.annotated import Annotated
from common.detection.models import detectors
from common.detection.models.spec import DetectorSpec


def build_flags(setting: Setting) -> dict:
    return {
        "short_sides": setting.image_size,
        "long_side": setting.image_size,
        **FCOS_FLAGS,
    }


@dataclass
class Scenes(Dataset):
    """Maps the number of a scene to its resized image and boxes."""

    source: Annotated
    transform: Callable

    def __len__(self) -> int:
        return 2**62  # scenes are drawn on access

    def __getitem__(self, index: int):
        image, boxes, labels, _ = self.source.draw_scene(index)
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=image.shape[:2])
        image, boxes = self.transform(image, boxes)
        crowd = torch.zeros(len(labels), dtype=torch.bool)
        return image, {"boxes": boxes, "labels": torch.from_numpy(labels), "crowd": crowd}


def train_bare(setting: Setting) -> None:
    """The loop written by hand."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source, _ = sources.load(sources.Spec("digits", seed=0, val_share=0.2))
    shape = {"levels": LEVELS, "width": WIDTH, "convolutions": CONVOLUTIONS}
    model = detectors.build_detector(
        DetectorSpec("fcos", setting.model, len(source.classes), **shape)
    ).to(device)
    mean, std = (
        255 * torch.tensor(model.pretrained_cfg[key], device=device)[:, None, None]
        for key in ("mean", "std")
    )
    loader = DataLoader(
        Scenes(
            source,
            v2.Compose([v2.ToImage(), v2.Resize([setting.image_size] * 2), v2.ToPureTensor()]),
        ),
        setting.batch_size,
        sampler=range(TOTAL_STEPS * setting.batch_size),
        collate_fn=collate_boxes,
        pin_memory=device.type == "cuda",
    )

    def compute_loss(
        images: tuple[torch.Tensor, ...], targets: tuple[dict[str, torch.Tensor], ...]
    ) -> torch.Tensor:
        batch = (
            torch.stack(images).to(device, non_blocking=True).to(torch.float32).sub_(mean).div_(std)
        )
        moved = [
            {key: value.to(device, non_blocking=True) for key, value in target.items()}
            for target in targets
        ]
        divisors = model.count_divisors(moved, batch.shape[2:])
        losses, _ = model.compute_losses(batch, moved, divisors)
        return losses.sum()

    train_by_hand(model, loader, compute_loss)


def measure(turns: int, quick: bool) -> list[Row]:
    """Settings as loop.py's."""
    usual = Setting("resnet18", 128, 4, 6)
    if torch.cuda.is_available():
        usual = Setting("resnet50", 800, 8, 30)
    settings = [usual, Setting("test_resnet", 64, 2, 24), Setting("test_resnet", 64, 16, 12)]
    return compare_loops(
        "det.py", build_recipe_loop("det", build_flags), train_bare, settings, turns, quick
    )


if __name__ == "__main__":
    run_script(__doc__, measure)
