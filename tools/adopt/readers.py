"""Readers: finds out which tool a file is of."""

from pathlib import Path

from common.config.parsing import nearest_path
from common.errors import Refused
from tools.adopt import mmengine_config, timm_train
from tools.adopt.adoption import Adoption, known, read_settings


def read(file: Path, gpus: int = 0, images: int = 0) -> Adoption:
    """What becomes of the settings in `file`. Raises `Refused`, in one line, if it can't become a preset.

    Args:
        gpus, images: what the file does not say (0: unknown).
    """
    if not file.is_file():
        raise Refused(f"{file}: {'a folder, not a' if file.is_dir() else 'no such'} file{nearest_path(file)}")
    try:
        if file.suffix == ".py":
            return mmengine_config.read(file, gpus, images)
        values = read_settings(file)
        if len(values.keys() & known("timm_train").keys()) * 2 > len(values):
            return timm_train.read(values, file, gpus)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise Refused(f"{file}: a setting has a value of another kind than its tool writes ({error})") from None
    raise Refused(f"{file}: not args.yaml of timm, nor the config that a run of MMDetection writes")
