"""RF-DETR's train(), around Lightning: CPU, gloo; nano at 64 pixels, 30 queries, not pretrained.

No EMA; learning rate 1e-4. It evaluates after an epoch, of steps that change nothing.
"""

import rfdetr
from data import DETECTION
from launching import Launch
from rfdetr.models.backbone.dinov2 import DinoV2

VARIANTS = {"RF-DETR": DETECTION}
METRIC = r"val/loss=([\d.]+)"
NO_AUGMENTATION = {
    "aug_config": {},
    "multi_scale": False,
    "expanded_scales": False,
    "scale_jitter": False,
}


def train(launch: Launch) -> None:
    initialize = DinoV2.__init__
    untrained = {"load_dinov2_weights": False}
    DinoV2.__init__ = lambda *args, **kwargs: initialize(*args, **kwargs | untrained)
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
    options = {} if launch.augment else NO_AUGMENTATION
    model.train(
        dataset_dir=str(launch.data),
        dataset_file="coco",
        epochs=2,
        batch_size=launch.batch_size,
        output_dir=".",
        use_ema=False,
        accelerator="cpu",
        devices=launch.num_processes,
        strategy="ddp" if launch.num_processes > 1 else "auto",
        seed=launch.seed,
        resume=launch.get_checkpoint("checkpoint_0.ckpt"),
        checkpoint_interval=1,
        augmentation_backend="torchvision",
        tensorboard=False,
        progress_bar="tqdm",
        compute_val_loss=True,
        **options,
    )
