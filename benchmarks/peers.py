"""The peers of the other scripts, as people write them with the parts of timm and torchvision;
nothing of this repository.

    torchrun --nproc_per_node 2 benchmarks/peers.py {cls,det} FOLDER SIZE EPOCHS OUTPUT

is a whole run: of timm's data set, loader, optimizer, scheduler and saver in the order of its train
script, or of torchvision's data set, transforms and FCOS in the order of its references/detection.
It evaluates once per epoch and writes a checkpoint.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOS, FCOSHead
from torchvision.ops import FeaturePyramidNetwork
from torchvision.transforms import v2

MODEL = "test_resnet"
BATCH_SIZE = 64  # of whole runs
BOX_BATCH_SIZE = 8
CROP_SCALE = 0.08
LEVELS = (3, 4)  # of FCOS
WIDTH = 64
CONVOLUTIONS = 2
# Of det.py.
FCOS_FLAGS = {"detector": "fcos", "levels": "3-4", "width": WIDTH, "convolutions": CONVOLUTIONS}


# ---- readers, without an end


def open_long_folder(folder: Path) -> ImageFolder:
    """The images so many times that no epoch ends: loaders pause there."""
    images = ImageFolder(folder)
    images.samples = images.samples * 2000
    return images


def timm_loader(
    folder: Path, size: int, batch_size: int, workers: int, device: torch.device
) -> Iterator:
    """timm's loader as it comes, with colour jitter; normalised on the device."""
    loader = create_loader(
        open_long_folder(folder),
        (3, size, size),
        batch_size,
        is_training=True,
        num_workers=workers,
        device=device,
        pin_memory=device.type == "cuda",
    )
    return iter(loader)


def open_boxes(folder: Path, split: str, short_side: int = 0) -> Dataset:
    """Images with boxes; with `short_side` augmented as `--data-augmentation multiscale` of
    torchvision's references does.
    """
    transforms: list[nn.Module] = []
    if short_side:
        transforms += [
            v2.RandomShortestSize([short_side], max_size=1333),
            v2.RandomHorizontalFlip(),
        ]
    transforms += [
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.SanitizeBoundingBoxes(),
        v2.ToPureTensor(),
    ]
    with contextlib.redirect_stdout(None):
        images = torchvision.datasets.CocoDetection(
            str(folder), str(folder / f"{split}.json"), transforms=v2.Compose(transforms)
        )
    return torchvision.datasets.wrap_dataset_for_transforms_v2(
        images, ("image_id", "boxes", "labels")
    )


def collate_boxes(samples: list) -> tuple:
    return tuple(zip(*samples, strict=True))


def build_mask_reader(
    min_side: int, max_side: int, crop_size: int
) -> Callable[[Path], tuple[torch.Tensor, torch.Tensor]]:
    """Reads and augments a JPEG with the PNG of its class ids: the short side is drawn, the rest follows."""
    transform = v2.Compose(
        [
            v2.RandomResize(min_side, max_side),
            v2.RandomCrop(crop_size, pad_if_needed=True, fill={tv_tensors.Mask: 255, "others": 0}),
            v2.RandomHorizontalFlip(),
            v2.RandomPhotometricDistort(),
        ]
    )

    def read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
        image = decode_image(str(path), ImageReadMode.RGB)
        mask = decode_image(str(path.with_suffix(".png")), ImageReadMode.GRAY)
        return transform(tv_tensors.Image(image), tv_tensors.Mask(mask))

    return read


# ---- whole runs


@dataclass
class Run:
    """The parts of a run that differ between tasks."""

    model: nn.Module
    train_loader: DataLoader
    compute_loss: Callable[[nn.Module, tuple], torch.Tensor]  # of the wrapped model and a batch
    evaluate: Callable[[], float]


def build_cls(folder: Path, size: int) -> Run:
    model = timm.create_model(MODEL, num_classes=2)
    data_config = resolve_data_config({"img_size": size}, model=model)
    loaders = []
    for split in ("train", "val"):
        loader = create_loader(
            create_dataset("", root=str(folder), split=split, is_training=split == "train"),
            data_config["input_size"],
            BATCH_SIZE // dist.get_world_size(),
            is_training=split == "train",
            scale=(CROP_SCALE, 1.0),
            color_jitter=None,
            num_workers=1,
            **{name: data_config[name] for name in ("interpolation", "mean", "std", "crop_pct")},
            distributed=True,
            device=torch.device("cpu"),
        )
        loaders.append(loader)
    train_loader, val_loader = loaders

    def evaluate() -> float:
        """Top-1 over all ranks."""
        counts = torch.zeros(2)
        for images, labels in val_loader:
            counts += torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
        dist.all_reduce(counts)
        return float(counts[0] / counts[1])

    return Run(
        model,
        train_loader,
        lambda network, batch: F.cross_entropy(network(batch[0]), batch[1]),
        evaluate,
    )


class Pyramid(nn.Module):
    """Feature pyramid on a timm model."""

    out_channels = WIDTH

    def __init__(self):
        super().__init__()
        self.body = timm.create_model(
            MODEL, features_only=True, out_indices=[level - 1 for level in LEVELS]
        )
        self.fpn = FeaturePyramidNetwork(self.body.feature_info.channels(), WIDTH)

    def forward(self, images: torch.Tensor) -> dict[int, torch.Tensor]:
        return self.fpn(dict(zip(LEVELS, self.body(images), strict=True)))


def build_det(folder: Path, short_side: int) -> Run:
    train_set = open_boxes(folder, "train", short_side)
    val_set = open_boxes(folder, "val")
    options = {"num_workers": 1, "collate_fn": collate_boxes}
    batch_size = BOX_BATCH_SIZE // dist.get_world_size()
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **options)
    val_loader = DataLoader(
        val_set, 1, sampler=DistributedSampler(val_set, shuffle=False), **options
    )
    num_classes = 1 + max(val_set.coco.cats)
    anchors = AnchorGenerator([(2**level,) for level in LEVELS], [(1.0,)] * len(LEVELS))
    head = FCOSHead(WIDTH, num_anchors=1, num_classes=num_classes, num_convs=CONVOLUTIONS)
    model = FCOS(
        Pyramid(), num_classes, short_side, anchor_generator=anchors, head=head, score_thresh=0.05
    )

    def evaluate() -> float:
        """AP by pycocotools over all ranks, on the first; 0 on the others."""
        detections = []
        for images, targets in val_loader:
            for target, output in zip(targets, model(images), strict=True):
                boxes = torchvision.ops.box_convert(output["boxes"], "xyxy", "xywh").tolist()
                for box, score, label in zip(
                    boxes, output["scores"].tolist(), output["labels"].tolist(), strict=True
                ):
                    result = {
                        "image_id": target["image_id"],
                        "bbox": box,
                        "score": score,
                        "category_id": label,
                    }
                    detections.append(result)
        by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, detections)
        gathered = list(itertools.chain.from_iterable(by_rank))
        if dist.get_rank() or not gathered:
            return 0.0
        from pycocotools.cocoeval import COCOeval

        with contextlib.redirect_stdout(None):
            evaluation = COCOeval(val_set.coco, val_set.coco.loadRes(gathered), "bbox")
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        return float(evaluation.stats[0])

    return Run(model, train_loader, lambda network, batch: sum(network(*batch).values()), evaluate)


def main() -> None:
    task, folder, size, epochs, output = sys.argv[1:]
    dist.init_process_group("gloo")
    build = build_cls if task == "cls" else build_det
    run = build(Path(folder), int(size))
    network = DistributedDataParallel(run.model)
    optimizer = create_optimizer_v2(run.model, "adamw", lr=1e-3, weight_decay=0.05)
    updates = len(run.train_loader)
    options = {"num_epochs": int(epochs), "step_on_epochs": False, "updates_per_epoch": updates}
    scheduler, _ = create_scheduler_v2(optimizer, **options)
    saver = CheckpointSaver(run.model, optimizer, checkpoint_dir=output, recovery_dir=output)
    for epoch in range(int(epochs)):
        run.train_loader.sampler.set_epoch(epoch)
        network.train()
        for index, batch in enumerate(run.train_loader):
            loss = run.compute_loss(network, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step_update(epoch * updates + index + 1)
            if index % 50 == 0:
                loss.item()  # as for a line of the log
        run.model.eval()
        with torch.inference_mode():
            metric = run.evaluate()
        if dist.get_rank() == 0:
            saver.save_checkpoint(epoch, metric)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
