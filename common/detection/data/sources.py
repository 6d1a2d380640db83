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
from common.detection.data.coco_files import coco_files, coco_folder
from common.detection.data.folders import Folder, describe_unread
from common.detection.data.object_tables import BOX_FORMATS, object_parts
from common.detection.data.voc_files import voc_folder, xml_folder
from common.detection.data.yolo_files import yolo_folder
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
    train, val = load(Spec.from_config(config, weights, masks=config.detector == "mask_rcnn"))
    if weights is None:
        return train, val
    return data_spec.match_classes(
        weights, config.data, val, parse_class_map(config.init_classes, val.classes)
    )


def load(spec: Spec) -> tuple[Annotated, Annotated]:
    """The images to train on and those to evaluate on, (train, val), with the same classes; see docs/data.md.

    If the data has no part to validate on, `val_share` of the images is held out, with that share
    of the boxes of each class; `seed` and the image's path or row decide among equals. With
    `spec.is_eval_only`, both are the part to evaluate a trained model on, with the classes that are found
    there. Raises `Refused`.
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
    from common.detection.data.shard_objects import open_parts
    from common.shards import share_blocks

    parts = open_parts(spec)
    with data_spec.guard_reading(spec.data):
        sources = _sources(spec, parts)
    if spec.is_eval_only:  # images to evaluate are read one by one, in the order of their sizes
        return sources
    (images,) = share_blocks([sources[0].images], spec.shard_memory)
    return (replace(sources[0], images=images),) + sources[1:]


def _load_files(spec: Spec) -> tuple[Annotated, ...]:
    """The sources of files, of tables or of digits. Raises `Refused`."""
    if spec.data == "digits":
        spec.refuse_columns()
        train, val = scenes.load(spec.seed, spec.masks)
        return _sources(spec, LoadedSplits({"train": train, "val": val}))
    table = open_table(spec.data)
    if table:
        return _sources(spec, object_parts(table, spec))
    return _load_folder(spec)


def _sources(spec: Spec, parts: DataSplits[A]) -> tuple[A, ...]:
    """The parts that are used; one of them divided, if there is none to evaluate on."""
    subsets = spec.choose_subsets(parts.labels)
    undivided = data_spec.read_splits(parts, subsets)
    if spec.masks and not all(source.has_masks for source in undivided.values()):
        raise Refused(
            f"--data {spec.data}: its objects are boxes without outlines, and masks are learnt "
            "from digits or a folder in COCO's format with segmentations; give one, or choose a "
            "detector of boxes"
        )
    found = spec.divide(parts.labels, subsets, undivided)
    for subset, source in zip(subsets, found, strict=True):
        if subset.side != splits.WHOLE and not len(source.boxes):
            name = "evaluate on" if subset.side == splits.HELD_OUT else "train on"
            raise Refused(
                f"--val_share {spec.val_share}: none of the {len(source)} images to {name} has a "
                "box; choose another"
            )
    return found


def _load_folder(spec: Spec) -> tuple[AnnotatedImages, ...]:
    """The sources of a folder, from the annotation cache or read again."""
    path = Path(os.path.abspath(Path(spec.data).expanduser()))
    folder = _find(path, spec.masks)
    if not folder:
        table = open_table(spec.data, has_metadata=True)
        if table:
            return _sources(spec, object_parts(table, spec))
        raise Refused(
            f"--data {spec.data}: {describe_unread(path)}; expected digits, a folder with "
            "train.json (COCO), JPEGImages/ (Pascal VOC), or data.yaml or labels/ (YOLO), or a "
            f"Hugging Face data set with a column of objects{suggest_path(path)}"
        )
    spec.refuse_columns()
    subsets = spec.choose_subsets(folder.labels)
    held_out = (
        (spec.seed, spec.val_share, spec.group_column)
        if any(subset.side != splits.WHOLE for subset in subsets)
        else None
    )
    what = folder.what, spec.masks, subsets, held_out
    file = annotation_cache.file_of(what, folder.origins[subsets[0].name])
    if file and (cached := annotation_cache.load(file)):
        return cached
    parts = _sources(spec, DataSplits(folder.labels, folder.read))
    pa.default_memory_pool().release_unused()  # gigabytes, of COCO's annotations
    if file:
        annotation_cache.keep(file, parts, folder.stamps)
    return parts


def _find(path: Path, masks: bool) -> Folder | None:
    if path.suffix == ".json" and path.is_file():
        root = path.parent.parent if path.parent.name == "annotations" else path.parent
        return coco_folder(root, {"train": path}, masks)
    files = coco_files(path)
    kinds = [*map(get_split_kind, files)]
    if not any(kind.startswith("train") for kind in kinds):
        for find_folder in (voc_folder, yolo_folder, xml_folder):
            folder = find_folder(path)
            if folder:
                return folder
    if len(files) == 1 and not any(kinds):
        files = dict.fromkeys(["train"], *files.values())
    return coco_folder(path, files, masks) if any(map(get_split_kind, files)) else None
