"""Sources of images with boxes: reads the data that `--data` names, and holds out a share for evaluation."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from common.config.origin import Origin
from common.config.parsing import suggest_path
from common.data import data_spec, splits
from common.data.data_spec import DataSpec, DataSplits, LoadedSplits
from common.data.huggingface import open_table
from common.data.splits import get_split_kind
from common.detection.class_map import parse_class_map
from common.detection.data import annotation_cache, scenes
from common.detection.data.annotated import Annotated, AnnotatedImages
from common.detection.data.coco_files import find_coco_files, open_coco_folder
from common.detection.data.folders import Folder, describe_unknown_format
from common.detection.data.object_tables import BOX_FORMATS, open_object_tables
from common.detection.data.voc_files import find_voc_folder, find_xml_folder
from common.detection.data.yolo_files import find_yolo_folder
from common.detection.models.spec import MASK_FAMILIES
from common.errors import Refused

A = TypeVar("A", bound=Annotated)


@dataclass(frozen=True)
class Spec(DataSpec):
    """Which images with boxes a run reads."""

    objects_column: str = ""
    box_format: str = ""
    masks: bool = False

    table_fields = ("image_column", "objects_column", "box_format")


def load_data(config: Any, weights: Origin | None = None) -> tuple[Annotated, Annotated]:
    """The images to train on and to evaluate on, which the flags name; see `load`.

    With the `weights` of --eval_only, both are the images to evaluate them on: the first has the
    model's classes, the second the data's, matched by name.
    """
    train, val = load(Spec.from_config(config, weights, masks=config.detector in MASK_FAMILIES))
    if weights is None:
        return train, val
    class_map = parse_class_map(config.init_classes, val.classes)
    return data_spec.match_classes(weights, config.data, val, class_map)


def load(spec: Spec) -> tuple[Annotated, Annotated]:
    """The images to train on and those to evaluate on, (train, val), with the same classes; see docs/data.md.

    If the data have no split to validate on, `val_share` of the images is held out, with that share
    of the boxes of each class; `seed` and the image's path or row decide among equals. With
    `spec.is_eval_only`, both are the split to evaluate a trained model on, with the classes that are in
    it. Raises `Refused`.
    """
    if spec.box_format and spec.box_format not in BOX_FORMATS:
        raise Refused(f"--box_format {spec.box_format}: is none of {', '.join(BOX_FORMATS)}")

    sources: tuple[Annotated, ...]
    if spec.is_sharded():
        sources = _load_shards(spec)
    else:
        with data_spec.guard_reading(spec.data):
            sources = _load_files(spec)
    return data_spec.check_train_and_val(sources)


def _load_shards(spec: Spec) -> tuple[AnnotatedImages, ...]:
    """The sources of shards. A collective. Raises `Refused`."""
    # Imported here, since most data are no shards.
    from common.detection.data.shard_objects import open_splits
    from common.shards import share_blocks

    parts = open_splits(spec)
    with data_spec.guard_reading(spec.data):
        sources = _read_sources(spec, parts)
    if spec.is_eval_only:  # images to evaluate are read one by one, in the order of their sizes
        return sources
    (images,) = share_blocks([sources[0].images], spec.shard_memory)
    return (replace(sources[0], images=images),) + sources[1:]


def _load_files(spec: Spec) -> tuple[Annotated, ...]:
    """The sources of files, of tables or of digits. Raises `Refused`."""
    if spec.data == "digits":
        spec.refuse_columns()
        train, val = scenes.load(spec.seed, spec.masks)
        return _read_sources(spec, LoadedSplits({"train": train, "val": val}))
    table = open_table(spec.data)
    if table:
        return _read_sources(spec, open_object_tables(table, spec))
    return _load_folder(spec)


def _read_sources(spec: Spec, parts: DataSplits[A]) -> tuple[A, ...]:
    """The splits that are used; one of them divided, if there is none to evaluate on."""
    subsets = spec.choose_subsets(parts.split_texts)
    undivided = data_spec.read_splits(parts, subsets)
    if spec.masks and not all(source.has_masks for source in undivided.values()):
        raise Refused(
            f"--data {spec.data}: its objects are boxes without outlines, and masks are learnt "
            "from digits or a folder in COCO's format with segmentations; give one, or choose a "
            "detector of boxes"
        )
    sources = spec.divide(parts.split_texts, subsets, undivided)
    for subset, source in zip(subsets, sources, strict=True):
        if subset.side != splits.WHOLE and not len(source.boxes):
            purpose = "evaluate on" if subset.side == splits.HELD_OUT else "train on"
            raise Refused(
                f"--val_share {spec.val_share}: none of the {len(source)} images to {purpose} has "
                "a box; choose another"
            )
    return sources


def _load_folder(spec: Spec) -> tuple[AnnotatedImages, ...]:
    """The sources of a folder, from the annotation cache or read again."""
    path = Path(os.path.abspath(Path(spec.data).expanduser()))
    folder = _find_folder(path, spec.masks)
    if not folder:
        table = open_table(spec.data, has_metadata=True)
        if table:
            return _read_sources(spec, open_object_tables(table, spec))
        raise Refused(
            f"--data {spec.data}: {describe_unknown_format(path)}; expected digits, a folder with "
            "train.json (COCO), JPEGImages/ (Pascal VOC), or data.yaml or labels/ (YOLO), or a "
            f"Hugging Face data set with a column of objects{suggest_path(path)}"
        )
    spec.refuse_columns()
    subsets = spec.choose_subsets(folder.split_texts)
    held_out = None
    if any(subset.side != splits.WHOLE for subset in subsets):
        held_out = (spec.seed, spec.val_share, spec.group_column)
    identity = (folder.identity, spec.masks, subsets, held_out)
    cache_file = annotation_cache.get_cache_file(identity, folder.origins[subsets[0].name])
    if cache_file:
        cached = annotation_cache.load(cache_file)
        if cached:
            return cached
    sources = _read_sources(spec, DataSplits(folder.split_texts, folder.read))
    pa.default_memory_pool().release_unused()  # gigabytes, of COCO's annotations
    if cache_file:
        annotation_cache.save(cache_file, sources, folder.stats)
    return sources


def _find_folder(path: Path, masks: bool) -> Folder | None:
    if path.suffix == ".json" and path.is_file():
        root = path.parent.parent if path.parent.name == "annotations" else path.parent
        return open_coco_folder(root, {"train": path}, masks)
    files = find_coco_files(path)
    kinds = [get_split_kind(name) for name in files]
    if not any(kind.startswith("train") for kind in kinds):
        for find_folder in (find_voc_folder, find_yolo_folder, find_xml_folder):
            folder = find_folder(path)
            if folder:
                return folder
    if len(files) == 1 and not any(kinds):
        (file,) = files.values()
        files = {"train": file}
        kinds = ["train"]
    if not any(kinds):
        return None
    return open_coco_folder(path, files, masks)
