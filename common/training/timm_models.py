"""Classifiers and backbones of timm: building one from its name, and exporting a trained one."""

import copy
import json
import math
import tempfile
from collections.abc import Sequence
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
from common.config.origin import by_name, label_names, places_of, some
from common.config.parsing import nearest, nearest_path
from common.data.images import MAX_PIXELS
from common.distributed.collectives import is_main
from common.errors import Refused
from common.files import check_regular
from common.patches.huggingface_hub import go_offline

# Options that timm sets only with `pretrained=True`. Others load models that way, so they are
# trained with them, too.
AS_PRETRAINED = {"fbnetc_100": {"bn_eps": 1e-3}}
# Raised by timm and by models.
_UNFIT = (RuntimeError, ValueError, TypeError, AssertionError, KeyError)
_WISHES = {"drop_rate": "--drop", "drop_path_rate": "--drop_path", "img_size": "--image_size"}


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
    """A timm model with a head for `classes` classes: a timm name, `hf-hub:owner/name` or a local
    timm folder.

    Initial weights are a function of `seed`, or loaded: from a local folder, or with `pretrained`
    by name; the model's `begins_with` says which. The head keeps what it knows of classes with the
    same `names`, and is new for the others; if either side has no names, a head of the same number
    of classes is kept. `image_size` 0 and `in_chans` 0 are the model's own; for more channels, timm
    repeats the weights of the first layer, and mean and standard deviation are repeated, too.
    Raises `Refused` for an unknown name (with the nearest ones), an option the model lacks, and
    weights out of reach.
    """
    options = {"drop_rate": drop, "drop_path_rate": drop_path}
    architecture = name.split(".")[0]  # without the tag of its weights, which may be unknown
    default = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
    if image_size and default and default.fixed_input_size:
        options["img_size"] = image_size
    if in_chans:
        options["in_chans"] = in_chans
    make = partial(create, name, pretrained=pretrained, seed=seed, wishes=options)
    model = make(num_classes=classes)
    if not (pretrained or Path(name).is_dir()):
        model.begins_with = ""
        return model
    known, theirs = label_names(model.pretrained_cfg), model.pretrained_cfg["num_classes"]
    everyone = names or [str(number) for number in range(classes)]
    fresh = everyone if theirs != classes else []  # classes that the head does not know
    if names and known and list(names) != known:
        trained = model if theirs == classes else make(num_classes=theirs)
        # Or timm keeps the head.
        model = make(num_classes=classes, pretrained_cfg_overlay={"num_classes": 0})
        fresh = [names[row] for row in take_rows(_head(model), _head(trained), names, known)]
    everything = len(model.state_dict())
    model.begins_with = begins_with(
        everything - len(_head(model)) * bool(fresh), everything, name, fresh, everyone
    )
    if names and not known and not fresh:
        model.begins_with += ", its head as it is: it does not name its classes"
    return model


def begins_with(
    taken: int, everything: int, source: str, fresh: Sequence[str], classes: Sequence[str]
) -> str:
    """Which weights a model begins with, in words; `fresh` of its `classes` are new to its head."""
    said, kept = (
        f"{taken} of {everything} tensors of {source}",
        [name for name in classes if name not in {*fresh}],
    )
    if not fresh:
        return said
    if not kept:
        return f"{said}, head new for all classes"
    return (
        f"{said}, head new for {len(fresh)} of {len(classes)} classes ({some(fresh)}), kept for "
        f"{some(kept)}"
    )


def begins_with_backbone(
    backbone: nn.Module, model: nn.Module, source: str, pretrained: bool
) -> str:
    """As `begins_with`, if only the backbone has weights of `source`, a name or a folder; "" if
    nothing was loaded.
    """
    loaded, everything = len(backbone.state_dict()), len(model.state_dict())
    return (
        f"{loaded} of {everything} tensors of {source}, its backbone"
        if pretrained or Path(source).is_dir()
        else ""
    )


def take_rows(
    head: Tensors, trained: Tensors, names: Sequence[str], known: Sequence[str]
) -> list[int]:
    """Copy the rows of `trained` for the classes in `names` that it knows, and return the rows of
    those that it does not.

    `head` and `trained` are tensors [classes, ...] by name; their rows belong to `names` and to `known`.
    """
    places = places_of(names, known)
    mine = [row for row, place in enumerate(places) if place is not None]
    theirs = [place for place in places if place is not None]
    with torch.no_grad():
        for name, tensor in head.items():
            # float64 of such a run: a model is built in float32.
            tensor[mine] = trained[name][theirs].to(tensor)
    return [row for row, place in enumerate(places) if place is None]


def _head(model: nn.Module) -> Tensors:
    """The tensors of the classifiers, as timm names these."""
    heads = model.pretrained_cfg.get("classifier") or ()
    heads = (heads,) if isinstance(heads, str) else heads
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[0] in heads
    }


def create(
    name: str,
    *,
    pretrained: bool,
    seed: int,
    wishes: dict,
    optional: Sequence[str] = (),
    **options: Any,
) -> nn.Module:
    """`timm.create_model(name, **options)` with the `wishes` that the model accepts; `created_with`
    has all arguments.

    A wish may be left out if it is 0 or one of `optional`. A wish of 0 is passed on: some models
    drop by default. Weights are a function of `seed`, or loaded; in that case an export of the
    model keeps their origin and licence. Raises `Refused` as `build_classifier` does.
    """
    is_folder = Path(name).is_dir()
    on_hub = name.startswith(("hf-hub:", "hf_hub:"))
    if not (is_folder or on_hub or timm.is_model(name.split(".")[0])):
        raise Refused(
            f"--model {name}: not a model of timm {timm.__version__}{_advise_on_name(name)}"
        )
    if on_hub or (pretrained and not is_folder):
        _go_offline_if_out_of_reach()
    source = f"local-dir:{name}" if is_folder else name
    has_weights = pretrained or is_folder
    options |= AS_PRETRAINED.get(name.split(".")[0], {})
    try:
        if is_folder:
            check_regular(name)
        model = _create_with_wishes(source, name, has_weights, seed, wishes, optional, options)
    except (*_UNFIT, OSError, AttributeError, SafetensorError, EOFError) as error:
        hint = ""
        if is_folder:
            hint = (
                " of this folder, which has to be a timm model's best/, whole (a detector goes to "
                "--init or --eval_only)"
            )
        elif pretrained:
            hint = (
                " with pretrained weights (is the hub in reach?); without --pretrained they are "
                "random"
            )
        reason = " ".join(str(error).split()) or type(error).__name__
        # Which torch advises to leave out.
        if isinstance(error, EOFError) or "weights_only" in reason:
            reason = "its weights are no whole file of torch.save; copy the folder again"
        raise Refused(f"--model {name}: can't be made{hint}: {reason:.250}") from None
    if is_folder:
        check_weights(model, Path(name) / "model.safetensors")
    channels = wishes.get("in_chans")
    if channels:
        config = model.pretrained_cfg
        config["input_size"] = (channels, *config["input_size"][1:])
        for key in ("mean", "std"):
            config[key] = (config[key] * channels)[:channels]
    if not has_weights:
        for key in ("tag", "license", "url", "hf_hub_id", "origin_url"):
            model.pretrained_cfg.pop(key, None)
    return model


def _advise_on_name(name: str) -> str:
    """The end of a message about a name that is no model's: what to do instead."""
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
            f"; there is no such folder{nearest_path(path)}; a model of the hub is "
            "hf-hub:OWNER/NAME"
        )
    return nearest(name.lower(), timm.list_models()) or "; timm.list_models() lists them"


def _go_offline_if_out_of_reach() -> None:
    """Ask the hub for an answer, and take its files from the cache alone if none comes within seconds."""
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # of the libraries below it
        go_offline()


def _create_with_wishes(
    source: str,
    name: str,
    has_weights: bool,
    seed: int,
    wishes: dict,
    optional: Sequence[str],
    options: dict,
) -> nn.Module:
    """The model that timm makes of `source`, with the `wishes` that it accepts. See `create`."""
    wishes = dict(wishes)
    while True:
        torch.manual_seed(seed)
        try:
            model = timm.create_model(source, pretrained=has_weights, **options, **wishes)
        except TypeError as error:
            unknown = next(
                (wish for wish in wishes if f"keyword argument '{wish}'" in str(error)), None
            )
            if unknown is None:
                raise
            if wishes.pop(unknown) and unknown not in optional:
                flag = _WISHES.get(unknown, unknown)
                raise Refused(
                    f"--model {name}: does not take {flag}: leave it out, or take another model"
                ) from None
            continue
        model.created_with = {**options, **wishes}
        return model


def resolve_data_config(model: nn.Module, image_size: int = 0, crop_pct: float = 0.0) -> dict:
    """How images are prepared for the model: input_size (C, H, W), mean, std, interpolation,
    crop_pct, crop_mode.

    0 keeps the model's own.

    Raises `Refused` if images would have more than `MAX_PIXELS`, or if the model's folder has
    impossible values.
    """
    found = timm.data.resolve_data_config({"crop_pct": crop_pct}, model=model)
    try:
        if image_size:
            found["input_size"] = (found["input_size"][0], image_size, image_size)
        channels, height, width = found["input_size"]
        is_sound = channels == len(found["mean"]) == len(found["std"]) and all(
            map(math.isfinite, found["mean"])
        )
        is_sound &= (
            min(found["std"]) > 0 and 0 < height * width / found["crop_pct"] ** 2 <= MAX_PIXELS
        )
        str_to_interp_mode(found["interpolation"])
    except (TypeError, ValueError, KeyError, OverflowError, ZeroDivisionError):
        is_sound = False
    if not is_sound:
        said = ", ".join(
            f"{key} {found[key]}"
            for key in ("input_size", "crop_pct", "crop_mode", "mean", "std", "interpolation")
        )
        raise Refused(
            f"the model's images can't be made ({said:.300}): each channel has a mean and a std, "
            f"and they are resized to input_size / crop_pct, at most {MAX_PIXELS} pixels; look at "
            "--image_size and --crop_pct"
        )
    return found


def classifier(model: nn.Module) -> nn.Module:
    """The head of a timm model; another module has to tell by a method `get_classifier`, as timm's do."""
    if not hasattr(model, "get_classifier"):
        flags, title = (
            "--freeze_stages, --backbone_lr_factor, --head_lr_factor",
            type(model).__name__,
        )
        raise Refused(
            f"{flags}: {title} does not say which part is its head; give it a method "
            "get_classifier()"
        )
    head = model.get_classifier()
    return nn.ModuleList(head) if isinstance(head, tuple) else head  # of a distilled model


def is_of_timm(model: nn.Module) -> bool:
    """True if timm made a model: nothing tells timm how to make a module of one's own."""
    return hasattr(model, "pretrained_cfg")


def checkpoint_gradients(model: nn.Module, name: str) -> None:
    """Recompute activations in the backward pass. Raises `Refused` for a model that can't."""
    try:
        model.set_grad_checkpointing(True)
    except (AssertionError, AttributeError):
        title = name if is_of_timm(model) else type(model).__name__
        told = f"--grad_checkpointing: {title} does not offer it"
        raise Refused(f"{told}; lower --max_micro_batch_size instead") from None


def describe(name: str, model: nn.Module) -> dict[str, str]:
    """Rows of the start table. A module of one's own is called by its `title`, else by its class."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    title = getattr(model, "title", "") or (name if is_of_timm(model) else type(model).__name__)
    return {
        "model": f"{title}: {parameters:,} parameters",
        "begins with": getattr(model, "begins_with", ""),
    }


def export(
    model: nn.Module,
    classes: Sequence[str],
    config: dict,
    multi_label: bool,
    results: dict,
    folder: Path,
) -> None:
    """Write a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` loads, with
    class names and preprocessing.

    `transformers.pipeline("image-classification", FOLDER)` loads it, too. `results.json` has its
    results. The folder must not exist.
    """
    folder.mkdir(parents=True)
    # Copies: safetensors refuses memory that two names share, such as tied weights.
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # It was written for its owner alone.
    (folder / "model.safetensors").chmod(folder.stat().st_mode & 0o666)
    _save_config(model, classes, config, folder, multi_label)
    (folder / "results.json").write_text(json.dumps(by_name(results, classes), indent=2) + "\n")


def _save_config(
    model: nn.Module, classes: Sequence[str], config: dict, folder: Path, multi_label: bool = False
) -> None:
    file = folder / "config.json"
    # Without names if the outputs are no classes, but an embedding.
    is_named = getattr(model, "num_classes", len(classes)) == len(classes)
    labels: dict[str, Any] = {"label_names": [*classes]} if is_named else {}
    if multi_label:  # transformers then gives each class a probability of its own
        labels["problem_type"] = "multi_label_classification"
    if is_of_timm(model):
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
    Main process only.

    The weights make no difference to that. A module of another kind is exported as it is, and has
    to give logits. With --eval_only nothing is exported, and nothing checked.
    """
    if config.eval_only or not is_main():
        return
    data_config = resolve_data_config(model, config.image_size, config.crop_pct)
    if not is_of_timm(model):
        _check_logits(model, data_config["input_size"])
        return
    model = _without_zeros(model)
    with tempfile.TemporaryDirectory(prefix="export_check_") as folder:
        _save_config(
            model, [str(number) for number in range(model.num_classes)], data_config, Path(folder)
        )
        try:
            # Passed directly: the disk may have no room for a file.
            weights = {"source": "", "state_dict": model.state_dict()}
            loaded = timm.create_model(
                f"local-dir:{folder}", pretrained=True, pretrained_cfg_overlay=weights
            )
        except _UNFIT as error:
            raise Refused(
                "what would be exported to best/ can't be loaded by timm: "
                f"{str(error).strip():.250}; put a model with parts of your own into a "
                "torch.nn.Module of your own, which is exported as it is"
            ) from None
    _refuse_another(model, loaded, data_config["input_size"])


@torch.no_grad()
def _check_logits(model: nn.Module, size: Sequence[int]) -> None:
    """See that a module, as it is evaluated, makes logits [1, classes] of an image. Raises `Refused`."""
    title, was_training = type(model).__name__, model.training
    try:
        logits = model.eval()(torch.zeros(1, *size))
    except Exception:
        return  # The trial of a step says why, on the device that the model may be made for.
    finally:
        model.train(was_training)
    if not (isinstance(logits, torch.Tensor) and logits.dim() == 2 and len(logits) == 1):
        found = (
            list(logits.shape) if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
        )
        told = (
            f"{title} makes {found} of images {[1, *size]} in evaluation, not logits [1, classes]"
        )
        raise Refused(f"{told}; return these, or put it into a torch.nn.Module that does")


def check_features(features: nn.Module, arguments: dict) -> None:
    """Raise `Refused` if `timm.create_model(features_only=True, **arguments)` makes other features.
    Main process only.
    """
    if not is_main():
        return
    model = _without_zeros(features)
    again = timm.create_model(
        features_only=True, **arguments | {"out_indices": features.feature_info.out_indices}
    )
    again.load_state_dict(model.state_dict())
    _refuse_another(model, again, features.pretrained_cfg["input_size"])


def _without_zeros(model: nn.Module) -> nn.Module:
    """A copy on the CPU where tensors of zeros are 0.1: a branch with a scale of 0 would hide a
    difference.
    """
    model = copy.deepcopy(model).to("cpu", torch.float32)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and not tensor.any():
            tensor.fill_(0.1)
    return model


@torch.no_grad()
def _refuse_another(model: nn.Module, loaded: nn.Module, size: Sequence[int]) -> None:
    image = torch.randn(1, *size, generator=torch.Generator().manual_seed(0))
    # The logits of the only image, or the last feature map.
    try:
        own = model.eval()(image)[-1]
    except _UNFIT:
        return  # It can't take this size; the trial of a step will say so.
    theirs = loaded.eval()(image)[-1]
    if not torch.allclose(own, theirs, 0, 1e-4 * own.abs().max().item(), equal_nan=True):
        architecture = model.pretrained_cfg["architecture"]
        raise Refused(
            f"--model {architecture}: others would load another model than is trained here, since "
            f"timm {timm.__version__} builds it differently then; take another model"
        )
