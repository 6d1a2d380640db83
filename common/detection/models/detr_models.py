"""DETRs of transformers: building one from its name, and saving one as a folder."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from common.detection.models.class_rows import class_rows, take_classes
from common.detection.models.detr_architectures import ARCHITECTURES, SMALL_OF
from common.detection.models.spec import DetectorSpec
from common.errors import Refused, get_first_line
from common.files import SMALL, check_regular, read_text
from common.training import timm_models

# Our name -> transformers'.
FAMILIES = {"rtdetr_v2": "rt_detr_v2", "dfine": "d_fine", "deimv2": "deimv2", "rf_detr": "rf_detr"}
_LAST = (-3, -2, -1)  # maps of a timm backbone, at strides 8, 16 and 32
# Published models take pixels in 0..1, except those with a vision transformer of DINO.
_PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
_IMAGENET = {"mean": timm.data.IMAGENET_DEFAULT_MEAN, "std": timm.data.IMAGENET_DEFAULT_STD}


def build_model(spec: DetectorSpec) -> tuple[nn.Module, dict]:
    """RTDetrV2Model, DFineModel or Deimv2Model with its heads in the decoder; mean and std of its images.

    `spec.model` is one that `load` takes, or a timm backbone (a name, `hf-hub:owner/name` or a
    folder), under the neck and the decoder of the smallest published model with `spec.width`
    channels. Raises `Refused`.
    """
    name = spec.model
    if name in ARCHITECTURES or not is_timm(name):
        if spec.drop_path:
            raise Refused(f"--drop_path {spec.drop_path}: {name} has none; a timm backbone has")
        return load(spec, _fresh, _whole_decoder)
    whole, normalization = _over_timm(spec)
    model = _whole_decoder(whole)
    model.begins_with = timm_models.format_loaded_backbone(
        features_of(model)._backbone, model, name, spec.pretrained
    )
    return model, normalization


def _whole_decoder(whole: nn.Module) -> nn.Module:
    """The model with its heads, each with parameters of its own, in the decoder."""
    model = whole.model
    decoder = model.decoder
    # Untied as in the published models; transformers unties only when it loads weights that differ.
    decoder.class_embed = nn.ModuleList(map(copy.deepcopy, decoder.class_embed))
    decoder.bbox_embed = nn.ModuleList(map(copy.deepcopy, decoder.bbox_embed))
    model.config.tie_word_embeddings = False
    if model.config.model_type == FAMILIES["deimv2"]:
        _mend_deimv2(model)
    return model


def features_of(model: nn.Module) -> nn.Module:
    """The backbone of a DETR of transformers, without what adapts its maps to the neck."""
    if not hasattr(model, "conv_encoder"):
        return model.backbone.model
    return getattr(model.conv_encoder, "backbone", None) or model.conv_encoder.model


def _mend_deimv2(model: nn.Module) -> None:
    """Let DEIMv2 compute in the precision of its weights, and train only what has a gradient."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "Deimv2RMSNorm":  # rounds to float32, under float64 too
                norm = nn.RMSNorm(child.weight.shape, child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    if _is_dinov3(model.config):
        embeddings = features_of(model).embeddings
        embeddings.mask_token.requires_grad_(False)  # of DINO's own training
        embeddings.register_tokens.requires_grad_(embeddings.register_tokens.numel() > 0)


def empty_model(config: Any, queries: int, classes: Sequence[str]) -> nn.Module:
    """A whole model of transformers with so many queries and these classes, without weights."""
    config = copy.deepcopy(config)
    config.num_queries = queries
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: number for number, name in enumerate(classes)}
    return import_transformers().AutoModelForObjectDetection.from_config(config)


def save_model(whole: nn.Module, normalization: dict, folder: Path, side: int) -> None:
    """Write a folder that transformers' `AutoModelForObjectDetection` and `AutoImageProcessor` load.

    The processor is RT-DETR's, which resizes to squares of `side` pixels with antialiasing, as we do.
    """
    whole.save_pretrained(folder)
    mean, std = (list(normalization[key]) for key in ("mean", "std"))
    import_transformers().RTDetrImageProcessor(
        size={"height": side, "width": side},
        do_normalize=not (mean == [0, 0, 0] and std == [1, 1, 1]),
        image_mean=mean,
        image_std=std,
    ).save_pretrained(folder)


def import_transformers():
    try:
        import transformers
    except ImportError:
        raise Refused("--detector: this family needs `pip install transformers`") from None
    transformers.utils.logging.disable_progress_bar()  # every process would show a bar
    return transformers


def is_timm(name: str) -> bool:
    """True for a timm model, `hf-hub:owner/name` or folder; timm refuses folders that can't be read."""
    if not Path(name).is_dir():
        return name.startswith(("hf-hub:", "hf_hub:")) or timm.is_model(name.split(".")[0])
    with contextlib.suppress(OSError, ValueError):
        check_regular(name)
        return '"model_type"' not in read_text(Path(name) / "config.json", SMALL)
    return True


def load(spec: DetectorSpec, fresh: Callable, prepare: Callable) -> tuple[nn.Module, dict]:
    """A model of transformers for the spec's classes, and what its images are normalised with.

    `spec.model` is one of `ARCHITECTURES`, whose weights are a function of the seed, owner/name on
    the hub or a folder, which brings its weights. With other classes, it keeps what it knows of
    those with the spec's names. `fresh` makes a whole model of (config, seed), `prepare` the model
    of a whole one. Raises `Refused`.
    """
    transformers, family, name = import_transformers(), spec.family, spec.model
    if name in ARCHITECTURES:
        if spec.pretrained:
            others = (
                "owner/name on the hub has them, such as ustc-community/dfine-small-coco and "
                "Roboflow/rf-detr-nano"
            )
            raise Refused(
                f"--pretrained: {name} is a configuration without weights; --model {others}"
            )
        if not name.startswith(family):
            raise Refused(f"--model {name}: not of --detector {family}; {known_models(family)}")
        architecture = copy.deepcopy(ARCHITECTURES[name]) | {"num_labels": spec.classes}
        config = _made_exact(transformers.AutoConfig.for_model(FAMILIES[family], **architecture))
        model = prepare(fresh(config, spec.seed))
        model.begins_with = ""
        is_vit = config.backbone_config.model_type in ("dinov3_vit", "rf_detr_dinov2")
        return model, _IMAGENET if is_vit else _PLAIN
    is_folder = Path(name).is_dir()
    if not is_folder and "/" not in name:
        raise Refused(f"--model {name}: no model of --detector {family}; {known_models(family)}")
    trained = None
    try:
        config = _made_exact(transformers.AutoConfig.from_pretrained(name))
        has_one_head = getattr(config, "share_bbox_head", False)  # DEIMv2's three smallest
        if config.model_type != FAMILIES[family] or has_one_head:
            kind = f"{config.model_type}{' with one head for all layers' * has_one_head}"
            raise Refused(f"--model {name}: a {kind}, which --detector {family} can't train")
        processor = transformers.AutoImageProcessor.from_pretrained(name)
        if spec.pretrained or is_folder:
            pretrained = transformers.AutoModelForObjectDetection.from_pretrained
            trained = prepare(pretrained(name, config=config, dtype=torch.float32))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = get_first_line(error)
        known = known_models(family)
        raise Refused(
            f"--model {name}: can't be loaded (is the hub in reach?), {known}: {reason}"
        ) from None
    model = _for_classes(spec, config, trained, lambda: prepare(fresh(config, spec.seed)))
    given = {"mean": tuple(processor.image_mean), "std": tuple(processor.image_std)}
    return model, given if processor.do_normalize else _PLAIN


def _made_exact(config: Any) -> Any:
    """The configuration for images of any size, with --batch_norm's batch norm and without dropout."""
    exact = {"freeze_backbone_batch_norms": False, "eval_size": None, "anchor_image_size": None}
    for part in (config, getattr(config, "backbone_config", None) or config):
        exact |= {name: 0.0 for name in vars(part) if "dropout" in name}
        part.update({name: value for name, value in exact.items() if hasattr(part, name)})
    return config


def _for_classes(
    spec: DetectorSpec, config, trained: nn.Module | None, fresh: Callable[[], nn.Module]
) -> nn.Module:
    """The `trained` model if it has the spec's classes, else a new one with what it knows of them."""
    known = [name for _, name in sorted(config.id2label.items())]
    new: list[int] = []
    if trained and config.num_labels == spec.classes and known == list(spec.names or known):
        model, names = trained, known
    else:
        config.num_labels = spec.classes
        model, names = fresh(), list(spec.names or map(str, range(spec.classes)))
        if trained:
            new = take_classes(model.state_dict(), trained.state_dict(), names, known)
    everything = model.state_dict()
    taken = len(everything) - len(class_rows(everything, spec.classes)) * bool(new)
    said = timm_models.format_loaded(
        taken, len(everything), spec.model, [names[row] for row in new], names
    )
    model.begins_with = said if trained else ""
    return model


def known_models(family: str) -> str:
    """Which `--model` a family takes, in words."""
    known = [name for name in ARCHITECTURES if name.startswith(family)]
    known += ["timm's backbones"] * (family != "rf_detr")
    return f"there are {', '.join(known)}, and owner/name on the hub"


def _over_timm(spec: DetectorSpec) -> tuple[nn.Module, dict]:
    """A small neck and decoder over a timm model, and what its images are normalised with."""
    name, width = spec.model, spec.width
    features = timm_models.create_model(
        name,
        pretrained=spec.pretrained,
        seed=spec.seed,
        requested={"drop_path_rate": spec.drop_path},
        features_only=True,
        out_indices=_LAST,
    )
    strides, channels_last = (
        features.feature_info.reduction(),
        getattr(features, "output_fmt", "") == "NHWC",
    )
    if strides != [8, 16, 32] or channels_last:
        raise Refused(
            f"--model {name}: ends in features at strides "
            f"{', '.join(map(str, strides))}{', channels last' * channels_last}; --detector "
            f"{spec.family} needs 8, 16 and 32, channels first, as convolutional networks have"
        )
    normalization = features.pretrained_cfg
    architecture = normalization["architecture"]  # all that transformers will know
    timm_models.check_features(features, {"model_name": architecture})
    config = import_transformers().AutoConfig.for_model(
        FAMILIES[spec.family],
        num_labels=spec.classes,
        backbone_config={
            "model_type": "timm_backbone",
            "backbone": architecture,
            "out_indices": _LAST,
        },
        encoder_in_channels=features.feature_info.channels(),
        decoder_in_channels=[width] * 3,
        d_model=width,
        encoder_hidden_dim=width,
        encoder_attention_heads=width // 32,
        decoder_attention_heads=width // 32,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        **copy.deepcopy(SMALL_OF[spec.family]),
    )
    whole = _fresh(_made_exact(config), spec.seed)
    features_of(whole.model)._backbone = features
    return whole, normalization


def _fresh(config, seed: int) -> nn.Module:
    """A model with its authors' initial weights; transformers' own are meant to be overwritten."""
    config.initializer_bias_prior_prob = 0.01
    torch.manual_seed(seed + 1)
    whole = import_transformers().AutoModelForObjectDetection.from_config(config)
    torch.manual_seed(seed + 2)
    layers = (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.LayerNorm)
    kept = {*features_of(whole.model).modules()} if _is_dinov3(config) else set()  # as it is
    modules = [module for module in whole.modules() if module not in kept]
    for module in modules:
        if isinstance(module, layers):
            module.reset_parameters()
    for module in modules:  # special ones: biases of scores, offsets of the sampling points, ...
        if not isinstance(module, layers):
            whole._init_weights(module)
    return whole


def _is_dinov3(config) -> bool:
    return config.backbone_config.model_type == "dinov3_vit"
