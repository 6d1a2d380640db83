"""Images and masks that `--data` names: reads them, and holds out a share for evaluation."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.config.origin import Origin
from common.config.parsing import suggest_path
from common.data import data_spec, tables
from common.data.data_spec import DataSpec, DataSplits
from common.data.decoding import Picture
from common.data.huggingface import open_table
from common.data.images import BrokenImage
from common.data.source import refuse_broken, sample_evenly
from common.detection.data import sources as detection_sources
from common.detection.data.coco_files import find_coco_files
from common.distributed.environment import count_cores
from common.errors import Refused
from common.segmentation.folders import find_folder, read_class_names, read_split
from common.segmentation.masks import IGNORED, count_pixels
from common.segmentation.source import Masked, MaskedImages, PaintedObjects, check_size

# JSON files that lie beside data without being COCO's.
_OTHER_JSON = {"classes", "id2label", "dataset_dict", "dataset_info", "dataset_infos", "state"}


@dataclass(frozen=True)
class Spec(DataSpec):
    """Which images with masks a run reads."""

    ignore_zero: bool = False
    mask_column: str = ""
    class_names: str = ""
    max_broken_share: float = 1.0

    table_fields = ("image_column", "mask_column", "class_names")


def load_data(config: Any, weights: Origin | None = None) -> tuple[Masked, Masked]:
    """The images to train on and to evaluate on, which the flags name; see `load`.

    With the `weights` of --eval_only, both are the images to evaluate them on: the first has the
    model's classes, the second the data's, matched by name.
    """
    train: Any
    val: Any
    spec = Spec.from_config(config, weights)
    if _has_outlines(config.data):
        spec.refuse_columns()
        if config.ignore_zero:
            raise Refused(
                "--ignore_zero: is for files of masks, where 0 can mean no label; the data have "
                "outlines of objects, leave it out"
            )
        objects = detection_sources.Spec.from_config(config, weights, masks=True)
        train, val = map(PaintedObjects.from_objects, detection_sources.load(objects))
    else:
        train, val = load(spec)
    if weights is None:
        return train, val
    return data_spec.match_classes(weights, config.data, val)


def _has_outlines(data: str) -> bool:
    """True if the data are COCO's, or scenes of digits."""
    if data == "digits":
        return True
    files = find_coco_files(Path(data).expanduser())
    return bool(files.keys() - _OTHER_JSON)


def load(spec: Spec) -> tuple[MaskedImages, MaskedImages]:
    """The images to train on and to evaluate on, with the same classes, of a folder that
    `find_folder` knows, or of a table with columns of images and masks, as `open_table` opens it.

    If the data have no split to evaluate on, `val_share` of the images is held out, chosen by
    `seed` and the image's path or row alone. Raises `Refused`, also for masks that do not fit their
    images.
    """
    with data_spec.guard_reading(spec.data):
        splits = _open(spec)
        pieces = spec.choose_subsets(splits.split_texts)
        undivided = data_spec.read_splits(splits, pieces)
        for source in undivided.values():
            refuse_broken(spec.data, source.images, spec.max_broken_share)
            _check_masks(spec.data, source)
        sources = spec.divide(splits.split_texts, pieces, undivided)
    return data_spec.check_train_and_val(sources)


def _open(spec: Spec) -> DataSplits[MaskedImages]:
    """The splits of the data, not read yet. Raises `Refused`."""
    root = Path(os.path.abspath(Path(spec.data).expanduser()))
    table = open_table(spec.data)
    if not table and root.is_dir():
        folder = find_folder(root)
        if folder is not None:
            spec.refuse_columns()
            split_texts = {}
            for name, split in folder.splits.items():
                split_texts[name] = os.path.relpath(split.list_file or split.images, root)
            return DataSplits(
                split_texts,
                lambda names: [read_split(folder, name, spec.ignore_zero) for name in names],
            )
        table = open_table(spec.data, has_metadata=True)
    if not table:
        reason = "data of another kind" if root.exists() else "nothing is there"
        raise Refused(
            f"--data {spec.data}: {reason}; expected digits, a folder with images/ and masks/ (or "
            "annotations/), JPEGImages/ and SegmentationClass/ (Pascal VOC), leftImg8bit/ and "
            "gtFine/ (Cityscapes), or train.json with outlines (COCO), or a Hugging Face data set, "
            f"Parquet or CSV with columns of images and masks{suggest_path(root)}"
        )
    return _open_table(spec, table)


def _open_table(spec: Spec, table: dict[str, tables.Split]) -> DataSplits[MaskedImages]:
    def read(names: Sequence[str]) -> list[MaskedImages]:
        splits = [table[name] for name in names]
        mask = tables.find_mask_column(splits[0], spec.mask_column)
        image = tables.find_image_column(splits[0], spec.image_column, mask)
        tables.require_columns(splits, image, mask)
        place = spec.class_names if spec.class_names else splits[0].folder
        classes = read_class_names(Path(place).expanduser())
        sources = []
        for split in splits:
            sources.append(
                MaskedImages(
                    images=tables.read_images(split, image, spec.group_column),
                    masks=tables.read_images(split, mask),
                    classes=classes,
                    notes=split.notes,
                    ignore_zero=spec.ignore_zero,
                )
            )
        return sources

    return DataSplits(tables.describe_splits(table), read)


def _check_masks(data: str, source: MaskedImages) -> None:
    """Raise `Refused` if an image has no mask, if one of a few masks can't be used, or if none of
    them has a label.
    """
    missing = np.flatnonzero(source.masks.list_files()[1] < 0)
    if len(missing):
        raise Refused(
            f"--data {data}: {len(missing):,} of {len(source):,} images have no mask, first "
            f"{source.masks.get_name(missing[0])}; add it, or take the image out"
        )
    indices = sample_evenly(len(source)).tolist()
    has_labels = False
    for index in indices:
        mask = load_checked_mask(source, index)
        has_labels |= bool((mask != IGNORED).any())
        with suppress(BrokenImage):  # counted when it is drawn, see --max_broken_share
            load_checked_picture(source, index, mask)
    if not has_labels:
        raise Refused(
            f"--data {data}: none of {len(indices)} masks has a pixel with a label, such as "
            f"{source.masks.get_name(indices[0])}; give masks with class ids"
        )


def load_checked_mask(source: Masked, index: int) -> np.ndarray:
    """int16[H, W] class ids. Raises `Refused` for a mask that can't be read: nothing can replace it."""
    try:
        return source.load_mask(index)
    except BrokenImage as error:
        raise Refused(
            f"{source.get_name(index)}: {error}; correct the mask, or take it out"
        ) from None


def load_checked_picture(source: Masked, index: int, mask: np.ndarray) -> Picture:
    """The image of a mask. Raises `BrokenImage` if it can't be read, and `Refused` for another size."""
    picture = source.load_picture(index)
    try:
        check_size(picture, mask)
    except BrokenImage as error:
        raise Refused(f"{source.get_name(index)}: {error}; make them equal") from None
    return picture


def count_class_pixels(source: Masked) -> np.ndarray:
    """int64[K]: how many pixels of each class all masks have. Reads all of them, in threads."""
    num_classes = len(source.classes)

    def count(indices: np.ndarray) -> np.ndarray:
        masks = (load_checked_mask(source, index) for index in indices.tolist())
        return count_pixels(masks, num_classes)

    chunks = np.array_split(np.arange(len(source)), 1 + len(source) // 64)
    with ThreadPoolExecutor(count_cores()) as pool:
        return np.sum(list(pool.map(count, chunks)), axis=0)
