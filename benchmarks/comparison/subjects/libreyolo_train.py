"""LibreYOLO's train(), of its YOLOX."""

import libreyolo
from data import DETECTION
from launching import Launch
from libreyolo.models.yolox.model import LibreYOLOX

SIZES = DETECTION
VARIANTS = {"LibreYOLO": 16}
VERSION = libreyolo.__version__
METRIC = r"metrics/mAP50-95\D*([\d.]+)"
CHANGES = (
    "CPU, gloo; YOLOX nano at 64 pixels, not pretrained; no synchronized batch norm, no warm-up"
)
NO_AUGMENTATION = dict.fromkeys(
    ("mosaic_prob", "mixup_prob", "hsv_prob", "flip_prob", "degrees", "translate", "shear"), 0.0
)


def train(launch: Launch) -> None:
    weights = None
    if launch.resume:
        weights = "runs/run/weights/last.pt"
    if launch.weights:
        weights = str(launch.weights / "runs/run/weights/last.pt")
    model = LibreYOLOX(weights, size="n", nb_classes=10, device="cpu")
    if launch.weights:
        print(model.val(data=f"{launch.data}/data.yaml", imgsz=64, batch=launch.batch_size))
        return
    options = {} if launch.augment else NO_AUGMENTATION
    if launch.resume:
        options = options | {"resume": True}
    model.train(
        data=f"{launch.data}/data.yaml",
        epochs=2,
        batch=launch.global_batch_size,
        imgsz=64,
        device="cpu",
        workers=0,
        project="runs",
        name="run",
        exist_ok=True,
        seed=launch.seed,
        amp=False,
        sync_bn=False,
        warmup_epochs=0,
        lr0=0.01,
        save_period=1,
        **options,
    )
