"""DETRs of transformers: building one from its name, and saving one as a folder."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from common.detection.models.class_rows import copy_tensors, view_class_rows
from common.detection.models.detr_architectures import ARCHITECTURES, SMALLEST_BY_FAMILY
from common.detection.models.spec import MASK_FAMILIES, DetectorSpec
from common.errors import Refused, get_first_line
from common.files import SMALL, check_regular, read_text
from common.training import timm_models

# Our name of a family -> transformers'.
TRANSFORMERS_FAMILIES = {
    "rtdetr_v2": "rt_detr_v2",
    "dfine": "d_fine",
    "deimv2": "deimv2",
    "rf_detr": "rf_detr",
    "rf_detr_seg": "rf_detr",
}
_OUT_INDICES = (-3, -2, -1)  # maps of a timm backbone, at strides 8, 16 and 32
# Published models take pixels in 0..1, except those with a vision transformer of DINO.
_NO_NORMALIZATION = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
_IMAGENET = {"mean": timm.data.IMAGENET_DEFAULT_MEAN, "std": timm.data.IMAGENET_DEFAULT_STD}


def build_model(spec: DetectorSpec) -> tuple[nn.Module, dict]:
    """Build RTDetrV2Model, DFineModel or Deimv2Model with its heads; mean and std of its images.

    `spec.model` is one that `load_model` takes, or a timm backbone (a name, `hf-hub:owner/name` or a
    folder), under the neck and the decoder of the smallest published model with `spec.width`
    channels. Raises `Refused`.
    """
    if spec.model in ARCHITECTURES or not is_timm(spec.model):
        if spec.drop_path:
            raise Refused(
                f"--drop_path {spec.drop_path}: {spec.model} has none; a timm backbone has"
            )
        return load_model(spec, build=_build_untrained, prepare=_prepare)
    whole, normalization = _build_on_timm(spec)
    model = _prepare(whole)
    model.weights_summary = timm_models.format_loaded_backbone(
        get_backbone(model)._backbone, model, spec.model, spec.pretrained
    )
    return model, normalization


def _prepare(whole: nn.Module) -> nn.Module:
    """Return the base model of a whole one, with its heads in the decoder.

    Each head has parameters of its own, as in the published models; transformers unties them only
    when it loads weights that differ.
    """
    model = whole.model
    decoder = model.decoder
    decoder.class_embed = nn.ModuleList(copy.deepcopy(head) for head in decoder.class_embed)
    decoder.bbox_embed = nn.ModuleList(copy.deepcopy(head) for head in decoder.bbox_embed)
    model.config.tie_word_embeddings = False
    if model.config.model_type == TRANSFORMERS_FAMILIES["deimv2"]:
        _fix_deimv2(model)
    return model


def get_backbone(model: nn.Module) -> nn.Module:
    """Return the backbone of a DETR of transformers, without what adapts its maps to the neck."""
    if not hasattr(model, "conv_encoder"):
        return model.backbone.model
    return getattr(model.conv_encoder, "backbone", None) or model.conv_encoder.model


def _fix_deimv2(model: nn.Module) -> None:
    """Let DEIMv2 compute in the precision of its weights, and train only what has a gradient."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "Deimv2RMSNorm":  # rounds to float32, under float64 too
                norm = nn.RMSNorm(child.weight.shape, child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    if _has_dinov3(model.config):
        embeddings = get_backbone(model).embeddings
        embeddings.mask_token.requires_grad_(False)  # of DINO's own training
        embeddings.register_tokens.requires_grad_(embeddings.register_tokens.numel() > 0)


def find_family(config: dict) -> str | None:
    """Our name of the family of a configuration of transformers, None for another model.

    RF-DETR has the same type with masks and without.
    """
    architectures = config.get("architectures") or []
    has_masks = any("InstanceSegmentation" in name for name in architectures)
    for family, model_type in TRANSFORMERS_FAMILIES.items():
        if config.get("model_type") == model_type and has_masks == (family in MASK_FAMILIES):
            return family
    return None


def get_auto_class(has_masks: bool = False) -> Any:
    """The class of transformers that builds and loads whole models, of boxes alone or with masks."""
    transformers = import_transformers()
    if has_masks:
        return transformers.AutoModelForInstanceSegmentation
    return transformers.AutoModelForObjectDetection


def build_empty_model(
    config: Any, num_queries: int, class_names: Sequence[str], has_masks: bool = False
) -> nn.Module:
    """Build a whole model of transformers with these queries and classes, without weights."""
    config = copy.deepcopy(config)
    config.num_queries = num_queries
    config.id2label = dict(enumerate(class_names))
    config.label2id = {name: index for index, name in enumerate(class_names)}
    return get_auto_class(has_masks).from_config(config)


def save_model(whole: nn.Module, normalization: dict, folder: Path, side: int) -> None:
    """Write a folder that the model's `get_auto_class` and `AutoImageProcessor` load.

    The processor is RT-DETR's, which resizes to squares of `side` pixels with antialiasing, as we do.
    """
    whole.save_pretrained(folder)
    mean = list(normalization["mean"])
    std = list(normalization["std"])
    is_identity = mean == [0, 0, 0] and std == [1, 1, 1]
    processor = import_transformers().RTDetrImageProcessor(
        size={"height": side, "width": side},
        do_normalize=not is_identity,
        image_mean=mean,
        image_std=std,
    )
    processor.save_pretrained(folder)


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


def load_model(spec: DetectorSpec, build: Callable, prepare: Callable) -> tuple[nn.Module, dict]:
    """Load a model of transformers for the spec's classes, with mean and std of its images.

    `spec.model` is one of `ARCHITECTURES`, whose weights are a function of the seed, owner/name on
    the hub or a folder, which brings its weights. With other classes, the model keeps the rows of
    classes with the spec's names. `build` makes a whole model of (config, seed), and `prepare` the
    model to train of a whole one. Raises `Refused`.
    """
    if spec.model in ARCHITECTURES:
        return _build_architecture(spec, build, prepare)
    transformers = import_transformers()
    family = spec.family
    name = spec.model
    is_folder = Path(name).is_dir()
    if not is_folder and "/" not in name:
        raise Refused(f"--model {name}: no model of --detector {family}; {describe_models(family)}")
    trained = None
    try:
        config = _make_exact(transformers.AutoConfig.from_pretrained(name))
        _check_family(spec, config)
        processor = transformers.AutoImageProcessor.from_pretrained(name)
        if spec.pretrained or is_folder:
            pretrained = get_auto_class(family in MASK_FAMILIES).from_pretrained
            trained = prepare(pretrained(name, config=config, dtype=torch.float32))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = get_first_line(error)
        models = describe_models(family)
        raise Refused(
            f"--model {name}: can't be loaded (is the hub in reach?), {models}: {reason}"
        ) from None
    model = _adapt_to_classes(spec, config, trained, lambda: prepare(build(config, spec.seed)))
    if not processor.do_normalize:
        return model, _NO_NORMALIZATION
    return model, {"mean": tuple(processor.image_mean), "std": tuple(processor.image_std)}


def _build_architecture(
    spec: DetectorSpec,
    build: Callable,
    prepare: Callable,
) -> tuple[nn.Module, dict]:
    """Build one of `ARCHITECTURES`; see `load_model`."""
    transformers = import_transformers()
    name = spec.model
    if spec.pretrained:
        raise Refused(
            f"--pretrained: {name} is a configuration without weights; --model owner/name on the "
            "hub has them, such as ustc-community/dfine-small-coco and Roboflow/rf-detr-nano"
        )
    if name not in list_architectures(spec.family):
        models = describe_models(spec.family)
        raise Refused(f"--model {name}: not of --detector {spec.family}; {models}")
    config = transformers.AutoConfig.for_model(
        TRANSFORMERS_FAMILIES[spec.family],
        **copy.deepcopy(ARCHITECTURES[name]),
        num_labels=spec.num_classes,
    )
    model = prepare(build(_make_exact(config), spec.seed))
    model.weights_summary = ""
    is_dino = config.backbone_config.model_type in ("dinov3_vit", "rf_detr_dinov2")
    return model, _IMAGENET if is_dino else _NO_NORMALIZATION


def _check_family(spec: DetectorSpec, config: Any) -> None:
    """Raise `Refused` if the configuration is of another family, or of a kind that can't be trained."""
    has_shared_head = getattr(config, "share_bbox_head", False)  # DEIMv2's three smallest
    family = find_family(config.to_dict())
    if family == spec.family and not has_shared_head:
        return
    kind = config.model_type
    if family in MASK_FAMILIES:
        kind += " with masks"
    if has_shared_head:
        kind += " with one head for all layers"
    raise Refused(f"--model {spec.model}: a {kind}, which --detector {spec.family} can't train")


def _make_exact(config: Any) -> Any:
    """Set up `config` for images of any size, --batch_norm's batch norm, and no dropout."""
    exact = {"freeze_backbone_batch_norms": False, "eval_size": None, "anchor_image_size": None}
    for section in (config, getattr(config, "backbone_config", None) or config):
        exact |= {name: 0.0 for name in vars(section) if "dropout" in name}
        section.update({name: value for name, value in exact.items() if hasattr(section, name)})
    return config


def _adapt_to_classes(
    spec: DetectorSpec,
    config,
    trained: nn.Module | None,
    build: Callable[[], nn.Module],
) -> nn.Module:
    """Return `trained` if it has the spec's classes, else a new model with its rows of known classes."""
    trained_names = [name for _, name in sorted(config.id2label.items())]
    class_names = list(spec.class_names)
    is_same = config.num_labels == spec.num_classes and class_names in ([], trained_names)
    if trained and is_same:
        num_tensors = len(trained.state_dict())
        trained.weights_summary = timm_models.format_loaded(
            num_tensors, num_tensors, spec.model, [], trained_names
        )
        return trained
    config.num_labels = spec.num_classes
    model = build()
    model.weights_summary = ""
    if trained:
        if not class_names:
            class_names = [str(index) for index in range(spec.num_classes)]
        state = model.state_dict()
        new_rows = copy_tensors(state, trained.state_dict(), class_names, trained_names)
        num_loaded = len(state)
        if new_rows:
            num_loaded -= len(view_class_rows(state, spec.num_classes))
        new_names = [class_names[row] for row in new_rows]
        model.weights_summary = timm_models.format_loaded(
            num_loaded, len(state), spec.model, new_names, class_names
        )
    return model


def list_architectures(family: str) -> list[str]:
    """List the names in `ARCHITECTURES` of a family."""
    return [name for name in ARCHITECTURES if name.rpartition("_")[0] == family]


def describe_models(family: str) -> str:
    """Describe which `--model` a family takes."""
    names = list_architectures(family)
    if TRANSFORMERS_FAMILIES[family] != "rf_detr":
        names.append("timm's backbones")
    return f"there are {', '.join(names)}, and owner/name on the hub"


def _create_features(spec: DetectorSpec) -> nn.Module:
    """Create a timm model that returns maps at strides 8, 16 and 32. Raises `Refused`."""
    features = timm_models.create_model(
        spec.model,
        pretrained=spec.pretrained,
        seed=spec.seed,
        requested={"drop_path_rate": spec.drop_path},
        features_only=True,
        out_indices=_OUT_INDICES,
    )
    strides = features.feature_info.reduction()
    is_channels_last = getattr(features, "output_fmt", "") == "NHWC"
    if strides != [8, 16, 32] or is_channels_last:
        layout = ", channels last" if is_channels_last else ""
        raise Refused(
            f"--model {spec.model}: ends in features at strides {', '.join(map(str, strides))}"
            f"{layout}; --detector {spec.family} needs 8, 16 and 32, channels first, as "
            "convolutional networks have"
        )
    architecture = features.pretrained_cfg["architecture"]
    timm_models.check_features(features, {"model_name": architecture})
    return features


def _build_on_timm(spec: DetectorSpec) -> tuple[nn.Module, dict]:
    """Build a small neck and decoder over a timm model, with mean and std of its images."""
    features = _create_features(spec)
    width = spec.width
    config = import_transformers().AutoConfig.for_model(
        TRANSFORMERS_FAMILIES[spec.family],
        num_labels=spec.num_classes,
        backbone_config={
            "model_type": "timm_backbone",
            "backbone": features.pretrained_cfg["architecture"],  # all that transformers will know
            "out_indices": _OUT_INDICES,
        },
        encoder_in_channels=features.feature_info.channels(),
        decoder_in_channels=[width] * 3,
        d_model=width,
        encoder_hidden_dim=width,
        encoder_attention_heads=width // 32,
        decoder_attention_heads=width // 32,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        **copy.deepcopy(SMALLEST_BY_FAMILY[spec.family]),
    )
    whole = _build_untrained(_make_exact(config), spec.seed)
    get_backbone(whole.model)._backbone = features
    return whole, features.pretrained_cfg


def _build_untrained(config, seed: int) -> nn.Module:
    """Build a model with its authors' initial weights; transformers' own are meant to be overwritten."""
    config.initializer_bias_prior_prob = 0.01
    torch.manual_seed(seed + 1)
    whole = import_transformers().AutoModelForObjectDetection.from_config(config)
    torch.manual_seed(seed + 2)
    plain_layers = (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.LayerNorm)
    excluded = set()
    if _has_dinov3(config):
        excluded = set(get_backbone(whole.model).modules())  # keep transformers' weights
    modules = [module for module in whole.modules() if module not in excluded]
    for module in modules:
        if isinstance(module, plain_layers):
            module.reset_parameters()
    for module in modules:  # special ones: biases of scores, offsets of the sampling points, ...
        if not isinstance(module, plain_layers):
            whole._init_weights(module)
    return whole


def _has_dinov3(config) -> bool:
    return config.backbone_config.model_type == "dinov3_vit"
