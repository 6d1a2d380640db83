"""Sources of weights for `--init` and `--eval_only`: their settings, and their tensors.

A source is `torchvision:NAME`, a file of torchvision's detectors (.pth, .safetensors; or
torchvision:NAME=FILE), an exported `best/` of this project, a folder of transformers, or owner/name
on the hub. Nothing in a file is executed.
"""

import argparse
import contextlib
import json
import pickle
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.checkpoints.store import READ_ERRORS
from common.config import origin
from common.config.origin import RUN_FILE, Origin
from common.config.parsing import suggest_path
from common.detection.models.detectors import build_detector
from common.detection.models.detr_models import TRANSFORMERS_FAMILIES
from common.detection.models.spec import DetectorSpec
from common.detection.weights import torchvision_weights
from common.detection.weights.weights import Weights
from common.errors import Refused, describe_error, get_first_line
from common.files import SMALL, check_regular, open_regular, read_text

# Keys for the weights in a checkpoint, an average first; without them the file is a state dict.
_STATE_KEYS = (
    "model_ema",
    "ema_state_dict",
    "model",
    "model_state_dict",
    "state_dict",
    "net",
    "weights",
)
_SUPPORTED = (
    f"a run's best/, {torchvision_weights.PREFIX}NAME, files of torchvision's detectors, and "
    f"models of transformers ({', '.join(TRANSFORMERS_FAMILIES)})"
)


def read_settings(source: str) -> dict:
    """Read the settings that the weights of `source` decide, by flag. Raises `Refused`."""
    return read_weights(source, load_tensors=False).settings


def read_origin(source: str, recorded: Sequence[str] = ()) -> Origin:
    """As `common.config.origin.read_origin`, also for sources that are no folders of runs.

    Raises `Refused`.
    """
    folder = Path(source)
    is_export = folder.is_dir() and not _is_transformers_folder(folder)
    if is_export or (folder / RUN_FILE).is_file():
        folder_origin = origin.read_origin(source, recorded)
        is_classifier = bool(folder_origin.config.get("model"))  # a folder of timm
        if folder_origin.run or folder_origin.is_state_dict or is_classifier:
            return folder_origin
        return replace(folder_origin, config={"data": ""} | read_settings(source))
    weights = read_weights(source, load_tensors=False)
    config = {"data": ""} | weights.settings
    config.pop("batch_norm", None)  # it doesn't matter: the recipe sets it
    class_names: tuple[str, ...] = ()
    if not weights.is_unnamed:
        class_names = weights.row_names[weights.has_background :]
    return Origin(
        path=source,
        is_state_dict=False,
        run={},
        config=config,
        classes=class_names,
        num_classes=None,  # checked when the weights are loaded
    )


def read_weights(source: str, load_tensors: bool = True) -> Weights:
    """Read the weights of `source`, perhaps without tensors if they are not needed. Raises `Refused`."""
    path = Path(source)
    if (path / "config.yaml").is_file() and (path / "best").is_dir():  # a run folder
        path = path / "best"
        source = str(path)
    try:
        return replace(_read_source(source, path, load_tensors), source=source)
    except READ_ERRORS as error:
        reason = describe_error(error)
        raise Refused(
            f"{source}: not a whole exported detector ({reason}); name a run's best/"
        ) from None


def _read_source(source: str, path: Path, load_tensors: bool) -> Weights:
    if source.startswith(torchvision_weights.PREFIX):
        return _read_torchvision(source, load_tensors)
    if path.is_dir():
        check_regular(path)
        if _is_transformers_folder(path):
            return _read_transformers(source, load_tensors)
        return _read_export(path, load_tensors)
    if path.exists():
        # Without tensors, nobody needs to know if they are published.
        return _read_file(path, is_published=not load_tensors)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not path.suffix.startswith(
        (".pt", ".safetensors")
    ):
        return _read_transformers(source, load_tensors)
    raise Refused(f"{source}: nothing is there{suggest_path(path)}; there are {_SUPPORTED}")


def _read_torchvision(source: str, load_tensors: bool) -> Weights:
    """Read `torchvision:NAME` or `torchvision:NAME=FILE`."""
    source_name, _, file = source.partition("=")
    name = torchvision_weights.parse_name(source_name)
    if file:
        return _read_file(Path(file), is_published=True)
    if not load_tensors:
        return torchvision_weights.describe_published(name)
    return _read_file(torchvision_weights.download_file(name), is_published=True)


# --- folders


def _read_export(folder: Path, load_tensors: bool) -> Weights:
    """Read a `best/` of a detector with torchvision's names."""
    if not (folder / "config.json").is_file():
        raise Refused(
            f"{folder}: no exported detector, no config.json is in it; name a run's best/"
        )
    config = json.loads(read_text(folder / "config.json", SMALL))
    if "architecture" in config:
        raise Refused(
            f"{folder}: a model of timm; give it as --model {folder}, which brings the backbone's "
            "weights"
        )
    levels = config["levels"]
    options = config["options"]
    settings = {
        "detector": config["family"],
        "model": config["model"],
        "levels": f"{levels[0]}-{levels[-1]}",
        "width": config["width"],
        "variant": config.get("variant", "own"),
        "short_sides": str(config["short_side"]),
        "long_side": config["long_side"],
    }
    if config["convolutions"]:
        settings["convolutions"] = config["convolutions"]
    classes: tuple[str | None, ...] = tuple(config["classes"])
    if config["family"].endswith("rcnn"):
        classes = (None, *classes)  # the background
    tensors: dict[str, Tensor] = {}
    if load_tensors:
        tensors = load_file(folder / "model.safetensors")
    return Weights(
        settings,
        tensors,
        classes,
        mean=tuple(options["image_mean"]),
        std=tuple(options["image_std"]),
    )


def _is_transformers_folder(folder: Path) -> bool:
    """True if a folder has a detector of transformers."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        return json.loads(read_text(folder / "config.json", SMALL)).get("model_type") is not None
    return False


def _read_transformers(source: str, load_tensors: bool) -> Weights:
    """Read a folder of transformers, or owner/name on the hub."""
    config = json.loads(_read_small_file(source, "config.json"))
    model_type = config.get("model_type")
    families = [name for name, value in TRANSFORMERS_FAMILIES.items() if value == model_type]
    if not families:
        raise Refused(
            f"{source}: a {config.get('model_type', 'model without a type')}, which no --detector "
            f"matches; of transformers there are {', '.join(TRANSFORMERS_FAMILIES)}"
        )
    labels = sorted(config["id2label"].items(), key=lambda item: int(item[0]))
    names = [name for _, name in labels]
    classes: list[str | None] = []
    for name in names:
        is_unnamed = re.fullmatch(r"N/A|LABEL_\d+", name)
        classes.append(None if is_unnamed else name)
    settings = {"detector": families[0], "model": source}
    processor = json.loads(_read_small_file(source, "preprocessor_config.json"))
    side = processor.get("size", {}).get("height")
    if side:
        settings["short_sides"] = str(side)
    weights = Weights(settings, {}, tuple(classes))
    if not load_tensors:
        return weights
    model = build_detector(
        DetectorSpec(
            family=families[0],
            model=source,
            num_classes=len(names),
            class_names=names,
            pretrained=True,
        )
    )
    return replace(
        weights,
        tensors=model.state_dict(),
        mean=tuple(model.pretrained_cfg["mean"]),
        std=tuple(model.pretrained_cfg["std"]),
    )


def _read_small_file(source: str, name: str) -> str:
    """Read a small file of a folder, or of a model on the hub."""
    path = Path(source) / name
    if not Path(source).is_dir():
        from huggingface_hub import hf_hub_download  # imported late: it takes a while

        try:
            path = Path(hf_hub_download(source, name))
        except (OSError, ValueError) as error:
            reason = get_first_line(error)
            raise Refused(
                f"{source}: nothing is there, nor can it be had from the hub ({reason}); there "
                f"are {_SUPPORTED}"
            ) from None
    return read_text(path, SMALL)


# --- files


def _read_file(path: Path, is_published: bool) -> Weights:
    """Read a file with a state dict, or a training program's checkpoint."""
    content = _load_content(path)
    keys = [key for key in _STATE_KEYS if isinstance(content.get(key), dict)]
    key = keys[0] if keys else ""
    tensors = {}
    for name, value in content.get(key, content).items():
        if isinstance(value, Tensor):
            tensors[str(name)] = value
    tensors.pop("n_averaged", None)
    # DDP, torch.compile and Lightning put a prefix before all names.
    backbone_name = next((name for name in tensors if "backbone." in name), "")
    prefix = backbone_name.partition("backbone.")[0]
    state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if not state:
        names = ", ".join(map(str, list(content)[:5]))
        raise Refused(
            f"{path}: has no weights of a model, it has {names or 'no names'}; save them as "
            f"torch.save(model.state_dict(), FILE), or take {_SUPPORTED}"
        )
    weights = torchvision_weights.convert_weights(state, path, is_published)
    if not weights:
        raise Refused(
            f"{path}: of no detector that is known here ({len(state)} tensors, first "
            f"{next(iter(state))}); there are {_SUPPORTED}; a backbone is a timm model or folder, "
            "given as --model"
        )
    if "ema" in key:
        return replace(weights, notes=(", its moving average", *weights.notes))
    return weights


def _load_content(path: Path) -> dict:
    """Load the content of a file of torch.save or safetensors."""
    try:
        open_regular(path).close()
        if path.suffix == ".safetensors":
            return load_file(path)
        # Checkpoints of torchvision's references have their arguments, a class of values.
        with (
            torch.serialization.safe_globals([argparse.Namespace]),
            warnings.catch_warnings(action="ignore"),
        ):
            content = torch.load(path, map_location="cpu", weights_only=True)
        return content if isinstance(content, dict) else {}
    except (
        pickle.UnpicklingError,
        EOFError,
        IndexError,
        RuntimeError,
        OSError,
        ValueError,
        SafetensorError,
    ) as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code:
            raise Refused(
                f"{path}: would execute code to be read ({code[1]}), as files of whole models "
                "do, Ultralytics' too; save its tensors alone where it was made, "
                "torch.save(model.state_dict(), FILE)"
            ) from None
        reason = get_first_line(error)
        raise Refused(
            f"{path}: not a whole file of torch.save or safetensors ({reason:.100}); copy it again"
        ) from None
