"""Images and masks that `--data` names: reads them, and holds out a share for evaluation."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.config.origin import Origin
from common.config.parsing import suggest_path
from common.data import data_spec
from common.data.data_spec import DataSpec, DataSplits
from common.data.decoding import Picture
from common.data.images import BrokenImage
from common.data.source import refuse_broken, sample_evenly
from common.detection.data import sources as detection_sources
from common.detection.data.coco_files import find_coco_files
from common.distributed.environment import count_cores
from common.errors import Refused
from common.segmentation.folders import find_folder, read_split
from common.segmentation.masks import IGNORED, count_pixels
from common.segmentation.source import Masked, MaskFiles, PaintedObjects


@dataclass(frozen=True)
class Spec(DataSpec):
    """Which images with masks a run reads."""

    ignore_zero: bool = False
    max_broken_share: float = 1.0


def load_data(config: Any, weights: Origin | None = None) -> tuple[Masked, Masked]:
    """The images to train on and to evaluate on, which the flags name; see `load`.

    With the `weights` of --eval_only, both are the images to evaluate them on: the first has the
    model's classes, the second the data's, matched by name.
    """
    train: Any
    val: Any
    root = Path(os.path.abspath(Path(config.data).expanduser()))
    if config.data == "digits" or find_coco_files(root):
        if config.ignore_zero:
            raise Refused(
                "--ignore_zero: is for files of masks, where 0 can mean no label; the data have "
                "outlines of objects, leave it out"
            )
        spec = detection_sources.Spec.from_config(config, weights, masks=True)
        train, val = map(PaintedObjects.from_objects, detection_sources.load(spec))
    else:
        train, val = load(Spec.from_config(config, weights))
    if weights is None:
        return train, val
    return data_spec.match_classes(weights, config.data, val)


def load(spec: Spec) -> tuple[MaskFiles, MaskFiles]:
    """The images to train on and to evaluate on, with the same classes, of a folder that
    `find_folder` knows.

    If the data have no split to evaluate on, `val_share` of the images is held out, chosen by
    `seed` and the image's path alone. Raises `Refused`, also for masks that do not fit their images.
    """
    with data_spec.guard_reading(spec.data):
        spec.refuse_columns()
        root = Path(os.path.abspath(Path(spec.data).expanduser()))
        folder = find_folder(root) if root.is_dir() else None
        if folder is None:
            reason = "a folder of another kind" if root.is_dir() else "nothing is there"
            raise Refused(
                f"--data {spec.data}: {reason}; expected digits, a folder with images/ and masks/ "
                "(or annotations/), JPEGImages/ and SegmentationClass/ (Pascal VOC), leftImg8bit/ "
                "and gtFine/ (Cityscapes), or train.json with outlines (COCO)"
                f"{suggest_path(root)}"
            )

        def read_splits(names: Sequence[str]) -> list[MaskFiles]:
            return [read_split(folder, name, spec.ignore_zero) for name in names]

        splits: DataSplits[MaskFiles] = DataSplits(folder.split_texts, read_splits)
        pieces = spec.choose_subsets(splits.split_texts)
        undivided = data_spec.read_splits(splits, pieces)
        for source in undivided.values():
            refuse_broken(spec.data, source, spec.max_broken_share)
            _check_masks(source)
        sources = spec.divide(splits.split_texts, pieces, undivided)
    return data_spec.check_train_and_val(sources)


def _check_masks(source: MaskFiles) -> None:
    """Raise `Refused` if one of a few masks can't be used, or if none of them has a label."""
    has_labels = False
    indices = sample_evenly(len(source)).tolist()
    for index in indices:
        mask = load_checked_mask(source, index)
        has_labels |= bool((mask != IGNORED).any())
        try:
            picture = Picture(source.get_content(index))
        except BrokenImage:
            continue  # counted when it is drawn, see --max_broken_share
        if (picture.height, picture.width) != mask.shape:
            raise Refused(
                f"{source.get_name(index)}: is {picture.width} x {picture.height} pixels large (after its "
                f"EXIF rotation), its mask {source.mask_name(index)} is {mask.shape[1]} x "
                f"{mask.shape[0]}; make them equal"
            )
    if not has_labels:
        raise Refused(
            f"{source.mask_root}: none of {len(indices)} masks has a pixel with a label (all are "
            f"{IGNORED}{' or 0' if source.ignore_zero else ''}); give masks with class ids"
        )


def load_checked_mask(source: Masked, index: int) -> np.ndarray:
    """int16[H, W] class ids. Raises `Refused` for a mask that can't be read: nothing can replace it."""
    try:
        return source.load_mask(index)
    except BrokenImage as error:
        raise Refused(
            f"{source.get_name(index)}: {error}; correct the mask, or take it out"
        ) from None


def count_class_pixels(source: Masked) -> np.ndarray:
    """int64[K]: how many pixels of each class all masks have. Reads all of them, in threads."""
    num_classes = len(source.classes)

    def count(indices: np.ndarray) -> np.ndarray:
        masks = (load_checked_mask(source, index) for index in indices.tolist())
        return count_pixels(masks, num_classes)

    chunks = np.array_split(np.arange(len(source)), 1 + len(source) // 64)
    with ThreadPoolExecutor(count_cores()) as pool:
        return np.sum(list(pool.map(count, chunks)), axis=0)
