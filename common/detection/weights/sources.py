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

from common.config.origin import RUN_FILE, Origin, read_origin
from common.config.parsing import nearest_path
from common.detection.models.detectors import OF_TRANSFORMERS, build_detector
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
_FITTING = (
    f"a run's best/, {torchvision_weights.PREFIX}NAME, files of torchvision's detectors, and "
    f"models of transformers ({', '.join(OF_TRANSFORMERS)})"
)
_READABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    SafetensorError,
)


def settings(source: str) -> dict:
    """The settings that the weights of `source` decide, by flag. Raises `Refused`."""
    return read(source, peeking=True).settings


def origin(source: str, recorded: Sequence[str] = ()) -> Origin:
    """As `common.config.origin.read_origin` for folders of runs; the same for other sources. Raises
    `Refused`.
    """
    folder = Path(source)
    if (folder.is_dir() and not _is_of_transformers(folder)) or (folder / RUN_FILE).is_file():
        of_folder = read_origin(source, recorded)
        # A folder of timm names its architecture.
        is_classifier = bool(of_folder.config.get("model"))
        if of_folder.run or of_folder.is_alone or is_classifier:
            return of_folder
        return replace(of_folder, config={"data": ""} | settings(source))
    weights = read(source, peeking=True)
    # Batch norm doesn't matter: the recipe sets it.
    config = {name: value for name, value in weights.settings.items() if name != "batch_norm"}
    names = () if weights.is_unnamed else weights.row_names[weights.has_background :]
    # Their number is checked when they are loaded.
    return Origin(source, False, {}, {"data": ""} | config, names, None)


def read(source: str, peeking: bool = False) -> Weights:
    """The weights of `source`; with `peeking` perhaps without tensors. Raises `Refused`."""
    path = Path(source)
    if (path / "config.yaml").is_file() and (path / "best").is_dir():  # a run folder
        path = path / "best"
        source = str(path)
    try:
        if source.startswith(torchvision_weights.PREFIX):
            source_name, _, file = source.partition("=")
            name = torchvision_weights.published(source_name)
            if peeking and not file:
                weights = torchvision_weights.peek(name)
            else:
                weights = _of_file(
                    Path(file) if file else torchvision_weights.file_of(name), is_published=True
                )
        elif path.is_dir():
            check_regular(path)
            weights = (
                _of_transformers(source, peeking)
                if _is_of_transformers(path)
                else _of_export(path, peeking)
            )
        elif path.exists():
            weights = _of_file(path, is_published=peeking)  # when peeking, nobody needs the answer
        elif re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not path.suffix.startswith(
            (".pt", ".safetensors")
        ):
            weights = _of_transformers(source, peeking)
        else:
            raise Refused(f"{source}: nothing is there{nearest_path(path)}; there are {_FITTING}")
    except _READABLE as error:
        reason = describe_error(error)
        raise Refused(
            f"{source}: not a whole exported detector ({reason}); name a run's best/"
        ) from None
    return replace(weights, source=source)


# --- folders


def _of_export(folder: Path, peeking: bool) -> Weights:
    """A `best/` of a detector with torchvision's names."""
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
    levels, options = config["levels"], config["options"]
    settings = {
        "detector": config["family"],
        "model": config["model"],
        "levels": f"{levels[0]}-{levels[-1]}",
        "width": config["width"],
        "variant": config.get("variant", "own"),
        "short_sides": str(config["short_side"]),
        "long_side": config["long_side"],
    }
    settings |= {"convolutions": config["convolutions"]} if config["convolutions"] else {}
    background = (None,) * config["family"].endswith("rcnn")
    tensors = {} if peeking else load_file(folder / "model.safetensors")
    mean, std = tuple(options["image_mean"]), tuple(options["image_std"])
    return Weights(settings, tensors, (*background, *config["classes"]), mean, std)


def _is_of_transformers(folder: Path) -> bool:
    """True if a folder has a detector of transformers."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        return json.loads(read_text(folder / "config.json", SMALL)).get("model_type") is not None
    return False


def _of_transformers(source: str, peeking: bool) -> Weights:
    """A folder of transformers, or owner/name on the hub."""
    config = json.loads(_text_of(source, "config.json"))
    family = next(
        (name for name, theirs in OF_TRANSFORMERS.items() if theirs == config.get("model_type")),
        None,
    )
    if family is None:
        raise Refused(
            f"{source}: a {config.get('model_type', 'model without a type')}, which no --detector "
            f"matches; of transformers there are {', '.join(OF_TRANSFORMERS)}"
        )
    names = [
        name
        for _, name in sorted((int(number), name) for number, name in config["id2label"].items())
    ]
    settings = {"detector": family, "model": source}
    side = json.loads(_text_of(source, "preprocessor_config.json")).get("size", {}).get("height")
    settings |= {"short_sides": str(side)} if side else {}
    weights = Weights(
        settings,
        {},
        tuple(None if re.fullmatch(r"N/A|LABEL_\d+", name) else name for name in names),
    )
    if peeking:
        return weights
    model = build_detector(DetectorSpec(family, source, len(names), names, pretrained=True))
    mean, std = (tuple(model.pretrained_cfg[key]) for key in ("mean", "std"))
    return replace(weights, tensors=model.state_dict(), mean=mean, std=std)


def _text_of(source: str, name: str) -> str:
    """A small file of a folder, or of a model on the hub."""
    path = Path(source) / name
    if not Path(source).is_dir():
        from huggingface_hub import hf_hub_download  # imported late: it takes a while

        try:
            path = Path(hf_hub_download(source, name))
        except (OSError, ValueError) as error:
            reason = get_first_line(error)
            raise Refused(
                f"{source}: nothing is there, nor can it be had from the hub ({reason}); there "
                f"are {_FITTING}"
            ) from None
    return read_text(path, SMALL)


# --- files


def _of_file(path: Path, is_published: bool) -> Weights:
    """A file with a state dict, or a training program's checkpoint."""
    content = _content(path)
    key = next((key for key in _STATE_KEYS if isinstance(content.get(key), dict)), "")
    tensors = {
        str(name): value
        for name, value in content.get(key, content).items()
        if isinstance(value, Tensor)
    }
    tensors.pop("n_averaged", None)
    # DDP, torch.compile and Lightning put something before all names.
    prefix = next((name for name in tensors if "backbone." in name), "").partition("backbone.")[0]
    state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if not state:
        raise Refused(
            f"{path}: has no weights of a model, it has "
            f"{', '.join(map(str, [*content][:5])) or 'no names'}; save them as "
            f"torch.save(model.state_dict(), FILE), or take {_FITTING}"
        )
    weights = torchvision_weights.convert(state, path, is_published)
    if not weights:
        raise Refused(
            f"{path}: of no detector that is known here ({len(state)} tensors, first "
            f"{next(iter(state))}); there are {_FITTING}; a backbone is a timm model or folder, "
            "given as --model"
        )
    average = ", its moving average" if "ema" in key else ""
    return replace(weights, notes=(average, *weights.notes))


def _content(path: Path) -> dict:
    """The content of a file of torch.save or safetensors."""
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
        RuntimeError,
        OSError,
        ValueError,
        SafetensorError,
    ) as error:
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise Refused(
                f"{path}: would execute code to be read ({found[1]}), as files of whole models "
                "do, Ultralytics' too; save its tensors alone where it was made, "
                "torch.save(model.state_dict(), FILE)"
            ) from None
        reason = get_first_line(error)
        raise Refused(
            f"{path}: not a whole file of torch.save or safetensors ({reason:.100}); copy it again"
        ) from None
