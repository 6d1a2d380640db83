"""RF-DETR's train(), around Lightning."""

from importlib.metadata import version

import rfdetr
from data import DETECTION
from launching import Launch
from lightning_fabric import seed_everything
from rfdetr.models.backbone.dinov2 import DinoV2

SIZES = DETECTION
VARIANTS = {"RF-DETR": 17}
VERSION = version("rfdetr")
METRIC = r"val/loss=([\d.]+)"
CHANGES = "CPU, gloo; nano at 64 pixels, 30 queries, not pretrained; no EMA; learning rate 1e-4"


def train(launch: Launch) -> None:
    initialize = DinoV2.__init__
    untrained = {"load_dinov2_weights": False}
    DinoV2.__init__ = lambda *args, **kwargs: initialize(*args, **kwargs | untrained)
    seed_everything(launch.seed)
    model = rfdetr.RFDETRNano(
        pretrain_weights=None,
        resolution=64,
        positional_encoding_size=4,
        num_queries=30,
        num_select=30,
        group_detr=2,
        num_classes=10,
        amp=False,
        device="cpu",
    )
    options = {}
    if not launch.augment:
        options = {"multi_scale": False, "expanded_scales": False, "aug_config": {}}
        options["scale_jitter"] = False
    if launch.num_processes > 1:
        options["strategy"] = "ddp"
    if launch.resume or launch.weights:  # evaluates after an epoch of steps that change nothing
        options["resume"] = str((launch.weights or launch.folder) / "checkpoint_0.ckpt")
    model.train(
        dataset_dir=str(launch.data),
        dataset_file="coco",
        epochs=2,
        batch_size=launch.batch_size,
        num_workers=0,
        output_dir=".",
        use_ema=False,
        accelerator="cpu",
        devices=launch.num_processes,
        seed=launch.seed,
        checkpoint_interval=1,
        augmentation_backend="torchvision",
        tensorboard=False,
        progress_bar="tqdm",
        compute_val_loss=True,
        **options,
    )
