"""LibreYOLO's train(), of its YOLOX: CPU, gloo; nano at 64 pixels, not pretrained.

No synchronized batch norm, no warm-up.
"""

from data import DETECTION
from launching import Launch
from libreyolo.models.yolox.model import LibreYOLOX

VARIANTS = {"LibreYOLO": DETECTION}
METRIC = r"metrics/mAP50-95\D*([\d.]+)"
NO_AUGMENTATION = dict.fromkeys(
    ("mosaic_prob", "mixup_prob", "hsv_prob", "flip_prob", "degrees", "translate", "shear"), 0.0
)


def train(launch: Launch) -> None:
    data = f"{launch.data}/data.yaml"
    weights = launch.get_checkpoint("runs/run/weights/last.pt")
    model = LibreYOLOX(weights, size="n", nb_classes=10, device="cpu")
    if launch.weights:
        print(model.val(data=data, imgsz=64, batch=launch.batch_size))
        return
    options = {} if launch.augment else NO_AUGMENTATION
    model.train(
        data=data,
        epochs=2,
        batch=launch.global_batch_size,
        imgsz=64,
        device="cpu",
        project="runs",
        name="run",
        exist_ok=True,
        resume=launch.resume,
        seed=launch.seed,
        amp=False,
        sync_bn=False,
        warmup_epochs=0,
        lr0=0.01,
        save_period=1,
        **options,
    )
