"""Export of a trained segmenter to a folder, and the settings that an evaluation needs."""

import json
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from common.config.origin import key_by_class
from common.training.timm_models import save_weights


def export_segmenter(
    model: nn.Module, classes: Sequence[str], short_side: int, results: dict, folder: Path
) -> None:
    """Write weights, config.json with classes and preprocessing, and results.json into a folder,
    which must not exist.
    """
    folder.mkdir(parents=True)
    save_weights(model, folder)
    config = {
        "module": type(model).__name__,
        "num_classes": len(classes),
        "classes": list(classes),
        "short_side": short_side,
    }
    description = getattr(model, "description", None)
    if description:
        config |= description._asdict()
        config["architecture"] = model.pretrained_cfg["architecture"]
    preprocessing = getattr(model, "pretrained_cfg", {})
    config |= {key: preprocessing[key] for key in ("mean", "std") if key in preprocessing}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    text = json.dumps(key_by_class(results, classes), indent=2)
    (folder / "results.json").write_text(f"{text}\n")
