"""Classifiers and backbones of timm: building one from its name, and exporting a trained one."""

import copy
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import constants, get_session
from safetensors import SafetensorError
from safetensors.torch import save_file
from timm.data.transforms import str_to_interp_mode
from timm.models._hub import save_config_for_hf
from torch import nn

from common.checkpoints.resume import check_weights
from common.checkpoints.state import Tensors
from common.config.origin import find_indices, format_names, get_class_names, key_by_class
from common.config.parsing import suggest_names, suggest_path
from common.data.images import MAX_PIXELS
from common.distributed.collectives import is_main
from common.errors import Refused, get_line
from common.files import check_regular
from common.patches.huggingface_hub import go_offline

# Options that timm sets only with `pretrained=True`. Others load models that way, so they are
# trained with them, too.
PRETRAINED_OPTIONS = {"fbnetc_100": {"bn_eps": 1e-3}}
_MODEL_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    KeyError,
)  # of timm and models
_FLAG_BY_OPTION = {
    "drop_rate": "--drop",
    "drop_path_rate": "--drop_path",
    "img_size": "--image_size",
}


def build_classifier(
    name: str,
    classes: int,
    *,
    pretrained: bool = False,
    image_size: int = 0,
    drop: float = 0.0,
    drop_path: float = 0.0,
    seed: int = 0,
    names: Sequence[str] = (),
    in_chans: int = 0,
) -> nn.Module:
    """Build a timm model with a head for `classes` classes.

    `name` is a timm name, `hf-hub:owner/name` or a local timm folder. Initial weights are a
    function of `seed`, or loaded: from a local folder, or with `pretrained` by name; the model's
    `weights_summary` says which. The head keeps what it knows of classes with the same `names`, and is
    new for the others; if either side has no names, a head of the same number of classes is kept.
    `image_size` 0 and `in_chans` 0 are the model's own; for more channels, timm repeats the weights
    of the first layer, and mean and standard deviation are repeated, too. Raises `Refused` for an
    unknown name (with the nearest ones), an option the model lacks, and weights out of reach.
    """
    options = {"drop_rate": drop, "drop_path_rate": drop_path}
    architecture = name.split(".")[0]  # without the tag of its weights, which may be unknown
    default = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
    if image_size and default and default.fixed_input_size:
        options["img_size"] = image_size
    if in_chans:
        options["in_chans"] = in_chans
    create = partial(create_model, name, pretrained=pretrained, seed=seed, requested=options)
    model = create(num_classes=classes)
    if not pretrained and not Path(name).is_dir():
        model.weights_summary = ""
        return model
    return _match_head(model, create, name, classes, names)


def _match_head(
    model: nn.Module,
    create: Callable[..., nn.Module],
    source: str,
    classes: int,
    names: Sequence[str],
) -> nn.Module:
    """The model, whose head has the rows of the weights' classes, and `weights_summary`.

    `model` is as timm loads it; if its head has other classes, another one is created.
    """
    trained_names = get_class_names(model.pretrained_cfg)
    num_trained = model.pretrained_cfg["num_classes"]
    class_names = names if names else list(map(str, range(classes)))
    new_classes = class_names if num_trained != classes else []
    if names and trained_names and list(names) != trained_names:
        trained = model if num_trained == classes else create(num_classes=num_trained)
        # Or timm keeps the head.
        model = create(num_classes=classes, pretrained_cfg_overlay={"num_classes": 0})
        new_ids = copy_class_rows(
            _get_head_tensors(model), _get_head_tensors(trained), names, trained_names
        )
        new_classes = [names[class_id] for class_id in new_ids]
    num_tensors = len(model.state_dict())
    num_loaded = num_tensors
    if new_classes:
        num_loaded -= len(_get_head_tensors(model))
    model.weights_summary = format_loaded(num_loaded, num_tensors, source, new_classes, class_names)
    if names and not trained_names and not new_classes:
        model.weights_summary += ", its head as it is: it does not name its classes"
    return model


def format_loaded(
    num_loaded: int,
    num_tensors: int,
    source: str,
    new_classes: Sequence[str],
    class_names: Sequence[str],
) -> str:
    """Which weights a model begins with, for people; `new_classes` are new to its head."""
    text = f"{num_loaded} of {num_tensors} tensors of {source}"
    if not new_classes:
        return text
    new_names = set(new_classes)
    kept_classes = [name for name in class_names if name not in new_names]
    if not kept_classes:
        return f"{text}, head new for all classes"
    return (
        f"{text}, head new for {len(new_classes)} of {len(class_names)} classes "
        f"({format_names(new_classes)}), kept for {format_names(kept_classes)}"
    )


def format_loaded_backbone(
    backbone: nn.Module, model: nn.Module, source: str, pretrained: bool
) -> str:
    """As `format_loaded`, if only the backbone has weights of `source`, a name or a folder.

    "" if nothing was loaded.
    """
    if not pretrained and not Path(source).is_dir():
        return ""
    num_loaded = len(backbone.state_dict())
    return f"{num_loaded} of {len(model.state_dict())} tensors of {source}, its backbone"


def copy_class_rows(
    head: Tensors, trained: Tensors, names: Sequence[str], trained_names: Sequence[str]
) -> list[int]:
    """Copy the rows of `trained` for the classes that it has; return the ids of the other classes.

    `head` and `trained` are tensors [classes, ...] by name; their rows belong to `names` and to
    `trained_names`.
    """
    trained_ids = find_indices(names, trained_names)
    target_rows = []
    source_rows = []
    new_ids = []
    for class_id, trained_id in enumerate(trained_ids):
        if trained_id is None:
            new_ids.append(class_id)
        else:
            target_rows.append(class_id)
            source_rows.append(trained_id)
    with torch.no_grad():
        for name, tensor in head.items():
            # float64 of such a run: a model is built in float32.
            tensor[target_rows] = trained[name][source_rows].to(tensor)
    return new_ids


def _get_head_tensors(model: nn.Module) -> Tensors:
    """The tensors of the classifiers, as timm names these."""
    heads = model.pretrained_cfg.get("classifier")
    if not heads:
        return {}
    if isinstance(heads, str):
        heads = (heads,)
    state = model.state_dict()
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[0] in heads}


def create_model(
    name: str,
    *,
    pretrained: bool,
    seed: int,
    requested: dict,
    optional: Sequence[str] = (),
    **options: Any,
) -> nn.Module:
    """Create a model by `timm.create_model(name, **options)`, with the `requested` options it takes.

    A model that does not take a requested option is refused, unless that is 0 or one of `optional`.
    A 0 is passed on: some models drop by default. The model's `create_kwargs` has all arguments.
    Weights are a function of `seed`, or loaded; in that case an export of the model keeps their
    origin and licence. Raises `Refused` as `build_classifier` does.
    """
    architecture = name.split(".")[0]
    is_folder = Path(name).is_dir()
    on_hub = name.startswith(("hf-hub:", "hf_hub:"))
    if not (is_folder or on_hub or timm.is_model(architecture)):
        raise Refused(
            f"--model {name}: not a model of timm {timm.__version__}{_advise_on_name(name)}"
        )
    if on_hub or (pretrained and not is_folder):
        _go_offline_if_unreachable()
    options |= PRETRAINED_OPTIONS.get(architecture, {})
    try:
        if is_folder:
            check_regular(name)
        model = _create_with_requested(
            name, pretrained or is_folder, seed, requested, optional, options
        )
    except (*_MODEL_ERRORS, OSError, AttributeError, SafetensorError, EOFError) as error:
        raise Refused(_format_create_error(name, pretrained, error)) from None
    if is_folder:
        check_weights(model, Path(name) / "model.safetensors")
    if requested.get("in_chans"):
        _repeat_normalization(model.pretrained_cfg, requested["in_chans"])
    if not pretrained and not is_folder:
        for key in ("tag", "license", "url", "hf_hub_id", "origin_url"):
            model.pretrained_cfg.pop(key, None)
    return model


def _repeat_normalization(config: dict, channels: int) -> None:
    """Repeat mean and standard deviation in a `pretrained_cfg` for a model of so many channels."""
    config["input_size"] = (channels, *config["input_size"][1:])
    for key in ("mean", "std"):
        config[key] = (config[key] * channels)[:channels]


def _format_create_error(name: str, pretrained: bool, error: Exception) -> str:
    if Path(name).is_dir():
        problem = (
            "can't be loaded: expected a complete timm folder such as runs/NAME/best (for a "
            "detector: --init or --eval_only)"
        )
    elif pretrained:
        problem = (
            "can't be created with pretrained weights (is the hub in reach?); without --pretrained "
            "they are random"
        )
    else:
        problem = "can't be created"
    reason = get_line(error)
    # torch's message advises to leave `weights_only` out.
    if isinstance(error, EOFError) or "weights_only" in reason:
        reason = "its weights are no whole file of torch.save; copy the folder again"
    return f"--model {name}: {problem}: {reason:.250}"


def _advise_on_name(name: str) -> str:
    """Say what to do instead of a name that is no model's: the end of a message."""
    path = Path(name)
    if path.is_file():
        return (
            " but a file; a timm model's folder is taken whole, as best/ (here perhaps "
            f"{path.parent}); a file of weights becomes one by "
            "timm.models.save_for_hf(timm.create_model(NAME, num_classes=N, "
            "checkpoint_path=FILE), FOLDER, safe_serialization=True); a detector's file goes to "
            "--init"
        )
    if len(path.parts) > 1:
        return (
            f"; there is no such folder{suggest_path(path)}; a model of the hub is "
            "hf-hub:OWNER/NAME"
        )
    return suggest_names(name.lower(), timm.list_models()) or "; timm.list_models() lists them"


def _go_offline_if_unreachable() -> None:
    """Take the hub's files from the cache alone if it does not answer within seconds."""
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # of the libraries below it
        go_offline()


def _create_with_requested(
    name: str,
    has_weights: bool,
    seed: int,
    requested: dict,
    optional: Sequence[str],
    options: dict,
) -> nn.Module:
    """The model that timm creates with the `requested` options that it takes; see `create_model`."""
    source = f"local-dir:{name}" if Path(name).is_dir() else name
    requested = dict(requested)
    while True:
        torch.manual_seed(seed)
        try:
            model = timm.create_model(source, pretrained=has_weights, **options, **requested)
        except TypeError as error:
            unknown = _find_unknown_option(requested, error)
            if unknown is None:
                raise
            if requested.pop(unknown) and unknown not in optional:
                flag = _FLAG_BY_OPTION.get(unknown, unknown)
                raise Refused(
                    f"--model {name}: does not take {flag}: leave it out, or take another model"
                ) from None
            continue
        model.create_kwargs = options | requested
        return model


def _find_unknown_option(options: dict, error: TypeError) -> str | None:
    for option in options:
        if f"keyword argument '{option}'" in str(error):
            return option
    return None


def resolve_data_config(model: nn.Module, image_size: int = 0, crop_pct: float = 0.0) -> dict:
    """How images are prepared for the model; an `image_size` or `crop_pct` of 0 is the model's own.

    The keys are input_size (C, H, W), mean, std, interpolation, crop_pct and crop_mode. Raises
    `Refused` if images would have more than `MAX_PIXELS`, or if the model's folder has impossible
    values.
    """
    data_config = timm.data.resolve_data_config({"crop_pct": crop_pct}, model=model)
    try:
        if image_size:
            channels = data_config["input_size"][0]
            data_config["input_size"] = (channels, image_size, image_size)
        is_sound = _is_sound(data_config)
    except (TypeError, ValueError, KeyError, OverflowError, ZeroDivisionError):
        is_sound = False
    if not is_sound:
        keys = ("input_size", "crop_pct", "crop_mode", "mean", "std", "interpolation")
        text = ", ".join(f"{key} {data_config[key]}" for key in keys)
        raise Refused(
            f"the model's images can't be made ({text:.300}): each channel has a mean and a std, "
            f"and they are resized to input_size / crop_pct, at most {MAX_PIXELS} pixels; look at "
            "--image_size and --crop_pct"
        )
    return data_config


def _is_sound(data_config: dict) -> bool:
    """True if images can be prepared with these values, some of which a file may have.

    Raises TypeError, ValueError and the like for values of another kind.
    """
    channels, height, width = data_config["input_size"]
    mean = data_config["mean"]
    std = data_config["std"]
    if not channels == len(mean) == len(std):
        return False
    if not all(map(math.isfinite, mean)) or not min(std) > 0:
        return False
    if not 0 < height * width / data_config["crop_pct"] ** 2 <= MAX_PIXELS:
        return False
    str_to_interp_mode(data_config["interpolation"])
    return True


def get_classifier(model: nn.Module) -> nn.Module:
    """The head of a timm model, or of another module with a method `get_classifier` as timm's.

    Raises `Refused` for a module without that method.
    """
    if not hasattr(model, "get_classifier"):
        raise Refused(
            "--freeze_stages, --backbone_lr_factor, --head_lr_factor: "
            f"{type(model).__name__} does not say which part is its head; give it a method "
            "get_classifier()"
        )
    head = model.get_classifier()
    return nn.ModuleList(head) if isinstance(head, tuple) else head  # of a distilled model


def is_timm_model(model: nn.Module) -> bool:
    """True if timm made a model: nothing tells timm how to make a module of one's own."""
    return hasattr(model, "pretrained_cfg")


def checkpoint_gradients(model: nn.Module, name: str) -> None:
    """Recompute activations in the backward pass. Raises `Refused` for a model that can't."""
    try:
        model.set_grad_checkpointing(True)
    except (AssertionError, AttributeError):
        title = name if is_timm_model(model) else type(model).__name__
        raise Refused(
            f"--grad_checkpointing: {title} does not offer it; lower --max_micro_batch_size instead"
        ) from None


def describe_model(name: str, model: nn.Module) -> dict[str, str]:
    """Rows of the start table. A module of one's own is called by its `title`, else by its class."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    title = getattr(model, "title", "")
    if not title:
        title = name if is_timm_model(model) else type(model).__name__
    return {
        "model": f"{title}: {num_parameters:,} parameters",
        "begins with": getattr(model, "weights_summary", ""),
    }


def export_classifier(
    model: nn.Module,
    classes: Sequence[str],
    config: dict,
    multi_label: bool,
    results: dict,
    folder: Path,
) -> None:
    """Write a folder of weights, class names, preprocessing and `results`, which must not exist.

    `timm.create_model("local-dir:FOLDER", pretrained=True)` and
    `transformers.pipeline("image-classification", FOLDER)` load it.
    """
    folder.mkdir(parents=True)
    save_weights(model, folder)
    _save_config(model, classes, config, folder, multi_label)
    (folder / "results.json").write_text(
        json.dumps(key_by_class(results, classes), indent=2) + "\n"
    )


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write the state dict of `model` as model.safetensors, readable as `folder` is."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        # Copies: safetensors refuses memory that two names share, such as tied weights.
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    weights_file = folder / "model.safetensors"
    save_file(tensors, weights_file, metadata={"format": "pt"})
    # It was written for its owner alone.
    weights_file.chmod(folder.stat().st_mode & 0o666)


def _save_config(
    model: nn.Module, classes: Sequence[str], config: dict, folder: Path, multi_label: bool = False
) -> None:
    file = folder / "config.json"
    labels: dict[str, Any] = {}
    # Without names if the outputs are no classes, but an embedding.
    if getattr(model, "num_classes", len(classes)) == len(classes):
        labels["label_names"] = list(classes)
    if multi_label:  # transformers then gives each class a probability of its own
        labels["problem_type"] = "multi_label_classification"
    if is_timm_model(model):
        save_config_for_hf(model, file, model_config=labels, data_config=config)
        content = json.loads(file.read_text())
        # Is stored beside them, and transformers would pass it twice.
        content["model_args"].pop("num_classes", None)
    else:  # what its weights mean, for people who have the class
        content = {
            "module": type(model).__name__,
            "num_classes": len(classes),
            **labels,
            "pretrained_cfg": config,
        }
    file.write_text(json.dumps(content, indent=2) + "\n")


def check_export(config: Any, model: nn.Module) -> None:
    """Raise `Refused` before the first step if an exported classifier would load as another model.

    Main process only. The weights make no difference to that. A module of another kind is exported
    as it is, and has to give logits. With --eval_only nothing is exported, and nothing checked.
    """
    if config.eval_only or not is_main():
        return
    data_config = resolve_data_config(model, config.image_size, config.crop_pct)
    if not is_timm_model(model):
        _check_logits(model, data_config["input_size"])
        return
    model = _copy_without_zeros(model)
    class_names = list(map(str, range(model.num_classes)))
    with tempfile.TemporaryDirectory(prefix="export_check_") as folder:
        _save_config(model, class_names, data_config, Path(folder))
        try:
            # Passed directly: the disk may have no room for a file.
            weights = {"source": "", "state_dict": model.state_dict()}
            loaded = timm.create_model(
                f"local-dir:{folder}", pretrained=True, pretrained_cfg_overlay=weights
            )
        except _MODEL_ERRORS as error:
            raise Refused(
                "what would be exported to best/ can't be loaded by timm: "
                f"{str(error).strip():.250}; put a model with parts of your own into a "
                "torch.nn.Module of your own, which is exported as it is"
            ) from None
    _check_same_outputs(model, loaded, data_config["input_size"])


@torch.no_grad()
def _check_logits(model: nn.Module, input_size: Sequence[int]) -> None:
    """Raise `Refused` unless a module, as it is evaluated, makes logits [1, classes] of an image."""
    was_training = model.training
    try:
        logits = model.eval()(torch.zeros(1, *input_size))
    except Exception:
        return  # The trial of a step says why, on the device that the model may be made for.
    finally:
        model.train(was_training)
    if not isinstance(logits, torch.Tensor):
        outputs = f"a {type(logits).__name__}"
    elif logits.dim() != 2 or len(logits) != 1:
        outputs = f"{list(logits.shape)}"
    else:
        return
    raise Refused(
        f"{type(model).__name__} makes {outputs} of images {[1, *input_size]} in evaluation, not "
        "logits [1, classes]; return these, or put it into a torch.nn.Module that does"
    )


def check_features(features: nn.Module, arguments: dict) -> None:
    """Raise `Refused` if timm makes other features than `features` with these `arguments`.

    Called as `timm.create_model(features_only=True, **arguments)`. Main process only.
    """
    if not is_main():
        return
    model = _copy_without_zeros(features)
    arguments = arguments | {"out_indices": features.feature_info.out_indices}
    created = timm.create_model(features_only=True, **arguments)
    created.load_state_dict(model.state_dict())
    _check_same_outputs(model, created, features.pretrained_cfg["input_size"])


def _copy_without_zeros(model: nn.Module) -> nn.Module:
    """A copy on the CPU where tensors of zeros are 0.1.

    A branch with a scale of 0 would hide a difference.
    """
    model = copy.deepcopy(model).to("cpu", torch.float32)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and not tensor.any():
            tensor.fill_(0.1)
    return model


@torch.no_grad()
def _check_same_outputs(model: nn.Module, loaded: nn.Module, input_size: Sequence[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, *input_size, generator=generator)
    # The logits of the only image, or the last feature map.
    try:
        expected = model.eval()(image)[-1]
    except _MODEL_ERRORS:
        return  # It can't take this size; the trial of a step will say so.
    actual = loaded.eval()(image)[-1]
    tolerance = 1e-4 * expected.abs().max().item()
    if not torch.allclose(expected, actual, rtol=0, atol=tolerance, equal_nan=True):
        architecture = model.pretrained_cfg["architecture"]
        raise Refused(
            f"--model {architecture}: timm.create_model(pretrained=True) of timm {timm.__version__} "
            "would not rebuild this model from its export; choose another model"
        )
