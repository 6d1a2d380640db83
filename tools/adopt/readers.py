"""Readers: finds out which tool a file is of."""

from pathlib import Path

from common.config.parsing import nearest_path
from common.errors import Refused
from tools.adopt import detectron2_config, mmengine_config, timm_train, ultralytics_run
from tools.adopt.adoption import Adoption, known, read_settings


def read(file: Path, gpus: int = 0, images: int = 0, batch: int = 0) -> Adoption:
    """What becomes of the settings in `file`. Raises `Refused`, in one line, if it can't become a preset.

    Args:
        gpus, images, batch: what the file does not say (0: unknown).
    """
    if not file.is_file():
        raise Refused(f"{file}: {'a folder, not a' if file.is_dir() else 'no such'} file{nearest_path(file)}")
    try:
        if file.suffix == ".py":
            return mmengine_config.read(file, gpus, images)
        values = read_settings(file)
        if detectron2_config.is_mine(values):
            return detectron2_config.read(values, file, gpus, images)
        if {"imgsz", "lr0", "close_mosaic"} & values.keys():
            return ultralytics_run.read(values, file, batch)
        if len(values.keys() & known("timm_train").keys()) * 2 > len(values):
            return timm_train.read(values, file, gpus, images)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise Refused(f"{file}: a setting has a value of another kind than its tool writes ({error})") from None
    raise Refused(f"{file}: not args.yaml of timm or Ultralytics, nor the config that MMDetection or detectron2 writes")
