"""Splits of a data set: the ones to train on and to evaluate on, and a share that is held out."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from common.errors import Refused
from common.randomness import key_of, mix

# Also in French, German, Italian, Portuguese and Spanish. "." is a letter with or without an accent.
_SPELLINGS = {
    "train": r"train(ing)?|trein(o|amento)|entrenamiento|entra.{1,2}nement|apprentissage|addestramento",
    "trainval": r"train(ing)?[ _-]*(and[ _-]*)?val(id|idation)?",
    "val": (
        r"val|valid|validate|validation|dev|eval|evaluation"
        r"|validaci.{1,2}n|valida.{2,4}o|validazione|validierung"
    ),
    "test": r"test(s|ing|e|es)?|pruebas?",
}
_PREFIX = r"((images?|imgs?|data|dataset|seg)[ _-]+)?"
_SUFFIX = r"([ _-]*(set|split|part|data|images?|imgs?|samples))?[ _-]*[0-9]*"
_KIND_PATTERNS = {}
for _kind, _spelling in _SPELLINGS.items():
    _pattern = f"{_PREFIX}({_spelling}){_SUFFIX}"
    _KIND_PATTERNS[_kind] = re.compile(_pattern, re.IGNORECASE)

# Sides of a subset.
WHOLE = "whole"
TRAIN_SIDE = "kept"
HELD_OUT = "held out"


class Subset(NamedTuple):
    """A whole split of the data, or one side of a split of which a share is held out."""

    name: str  # of the split
    side: str = WHOLE


def get_split_kind(name: str) -> str:
    """train, trainval, val or test, in any usual spelling ("Training_Set", "test2017"); else ""."""
    for kind, pattern in _KIND_PATTERNS.items():
        if pattern.fullmatch(name):
            return kind
    return ""


def group_by_split(names: Sequence[str]) -> dict[str, list[str]]:
    """Absolute paths or URLs of files, by the kind of the split that they belong to.

    The first word for one in a file's name decides, or in the folders that not all files are in,
    the innermost first: `val-0000.tar`, `test/a/0000.tar`. Files without such a word are train, and
    so are all if they are of one kind.
    """
    paths = [_split_path(name) for name in names]
    depth = _count_common_folders(paths)
    names_by_kind: dict[str, list[str]] = {}
    for name, path in zip(names, paths, strict=True):
        kind = _find_kind_in_path(path[depth:])
        names_by_kind.setdefault(kind, []).append(name)
    if len(names_by_kind) == 1:
        return {"train": list(names)}
    return names_by_kind


def _split_path(name: str) -> list[str]:
    """The folders and the file name of a path or URL."""
    if "://" in name:
        name = name.partition("?")[0]
    return name.split("/")


def _count_common_folders(paths: Sequence[Sequence[str]]) -> int:
    """How many folders all `paths` begin with; 0 if one path continues another, or all are equal."""
    for depth, names in enumerate(zip(*paths, strict=False)):
        if len(set(names)) > 1:
            return depth
    return 0


def _find_kind_in_path(path: Sequence[str]) -> str:
    """The kind of split that a word of `path` names, its file name first; train if there is none."""
    for name in reversed(path):
        for word in re.split("[^a-zA-Z]+", name):
            kind = get_split_kind(word)
            if kind:
                return kind
    return "train"


def choose_subsets(data: str, split_texts: Mapping[str, str], split: str) -> tuple[Subset, Subset]:
    """The subsets to train on and to evaluate on: the split `split`, by default the validation split.

    `split_texts` maps the name of each split to how messages call it. If there is no validation split, a
    share of the training split is held out. A test split is evaluated only if `split` says so:
    results on data that chose the model would be too good. If a test split is evaluated, a split
    called trainval is trained on, if there is one. Raises `Refused`.
    """
    eval_name = _find_split(data, split_texts, split)
    train_kinds = ["train", "trainval"]
    if eval_name and get_split_kind(eval_name) != "val":
        train_kinds.reverse()
    train_name = _find_only_split(data, split_texts, train_kinds)
    if train_name is None:
        advice = "rename one to train, or give a folder or file alone"
        raise Refused(
            f"--data {data}: no split to train on, only {', '.join(split_texts)}; {advice}"
        )
    if eval_name:
        kinds = (get_split_kind(train_name), get_split_kind(eval_name))
        if kinds != ("trainval", "val"):
            return Subset(train_name), Subset(eval_name)
    return Subset(train_name, TRAIN_SIDE), Subset(train_name, HELD_OUT)


def choose_eval_subset(
    data: str, split_texts: Mapping[str, str], split: str, is_training_data: bool
) -> tuple[Subset]:
    """The subset to evaluate a trained model on: `split`, by default val, else test, else the only split.

    With `is_training_data` the model was trained on these data, of which a share was held out: then
    only that share is evaluated. Raises `Refused`.
    """
    if len(split_texts) == 1 and (split == "all" or (split == "" and not is_training_data)):
        return (Subset(next(iter(split_texts))),)
    name = _find_split(data, split_texts, split)
    train_name = _find_only_split(data, split_texts, ["train", "trainval"])
    if name is None and (split or is_training_data) and train_name:
        return (Subset(train_name, HELD_OUT),)
    if name is None:
        name = _find_only_split(data, split_texts, ["test"])
    if name is None:
        raise Refused(
            f"--data {data}: no split to validate on; name one by --split: {', '.join(split_texts)}"
        )
    has_val = any(get_split_kind(label) == "val" for label in split_texts)
    if is_training_data and name == train_name and not has_val:
        return (Subset(name, TRAIN_SIDE),)
    return (Subset(name),)


def hash_paths(paths: pa.LargeBinaryArray, key: int) -> np.ndarray:
    """uint64[N] random numbers, each a function of its path and `key` alone."""
    digests = [hashlib.blake2b(path.as_py(), digest_size=8).digest() for path in paths]
    return mix(np.frombuffer(b"".join(digests), "<u8"), key)


def hold_out(
    hashes: np.ndarray, strata: np.ndarray, share: float, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Indices to train on and indices held out: the `share` of every stratum with the smallest hashes.

    `hashes` uint64[N]; `strata` int64[N] of each image, which keep at least one image to train on;
    or int64[M, 2], image and class of each of M objects, of which each class has about its share.
    Images with equal `groups` int64[N] are on the same side, and strata then have about their share.
    """
    if not 0 < share < 1:
        raise Refused(
            f"--val_share {share}: must lie between 0 and 1, since the data has no split to "
            "evaluate on"
        )
    in_groups = ""
    if groups is not None:
        _, groups, group_sizes = np.unique(groups, return_inverse=True, return_counts=True)
        hashes = _hash_groups(hashes, groups, group_sizes)
        in_groups = f" in {len(group_sizes):,} groups"
    if strata.ndim == 2:
        is_held_out = _hold_out_objects(hashes, strata, share)
        num_images = f"{len(hashes)} images"
    else:
        counts = np.bincount(strata)
        num_images = f"at most {counts.max()} images per class"
        if groups is None:
            limits = np.minimum((share * counts + 0.5).astype(np.int64), counts - 1)
            is_held_out = _rank_in_strata(hashes, strata, counts) < limits[strata]
        else:
            is_held_out = _hold_out_groups(hashes, strata, share * counts, counts - 1)
    if not is_held_out.any():
        raise Refused(f"--val_share {share} of {num_images}{in_groups} holds out none; raise it")
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def _hash_groups(hashes: np.ndarray, groups: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """uint64[N] hashes of the group of each image, from `hashes` of images; `sizes` are those of groups."""
    smallest = np.full(len(sizes), np.iinfo(np.uint64).max)
    np.minimum.at(smallest, groups, hashes)
    # The smallest of several hashes is small: mixed again it is as random as that of a single image.
    group_hashes = np.where(sizes > 1, mix(smallest, key_of("groups")), smallest)
    return group_hashes[groups]


def _rank_in_strata(hashes: np.ndarray, strata: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64[N]: how many images of the same stratum have smaller hashes; `counts` are those of strata."""
    order = np.lexsort((hashes, strata))
    stratum_starts = np.repeat(np.cumsum(counts) - counts, counts)
    ranks = np.empty(len(hashes), np.int64)
    ranks[order] = np.arange(len(hashes)) - stratum_starts
    return ranks


def _hold_out_objects(hashes: np.ndarray, objects: np.ndarray, share: float) -> np.ndarray:
    """bool[N] images to hold out, so that each class has its share of `objects`, int64[M, 2] image and class.

    Images with equal `hashes` uint64[N] are on the same side. This is iterative stratification
    (Sechidis, Tsoumakas & Vlahavas, "On the Stratification of Multi-Label Data", 2011): the class
    with the fewest objects left goes first, and divides its images; images are one more class,
    which goes last. In the paper each image joins the side that lacks most objects. Here it is held
    out as long as objects and images are lacking there, so that the smallest hashes are, and a new
    image moves hardly any other.
    """
    _, groups = np.unique(hashes, return_inverse=True)  # in random order
    image_class = 1 + objects[:, 1].max(initial=-1)
    group_ids = np.append(groups[objects[:, 0]], groups)
    class_ids = np.append(objects[:, 1], np.full(len(groups), image_class))
    objects_by_group = np.split(class_ids[np.argsort(group_ids)], np.cumsum(np.bincount(group_ids)))
    remaining = np.bincount(class_ids)
    missing = np.minimum(share * remaining, remaining - 1)  # objects to hold out
    remaining[-1] += len(objects)  # so that images go last
    num_remaining_images = len(groups)
    is_open = np.ones(num_remaining_images, bool)
    is_held_out = ~is_open
    while num_remaining_images:
        class_id = np.where(remaining, remaining, np.inf).argmin()
        for group in np.unique(group_ids[class_ids == class_id]):
            if is_open[group]:
                is_open[group] = False
                counts = np.bincount(objects_by_group[group], minlength=len(remaining))
                remaining -= counts
                num_remaining_images -= counts[-1]
                fits = 2 * missing >= counts
                is_needed = 2 * (missing[-1] - num_remaining_images) >= counts[-1]
                if is_needed or (fits[class_id] and fits[-1]):
                    is_held_out[group] = True
                    missing -= counts
    return is_held_out[groups]


def _hold_out_groups(
    hashes: np.ndarray, strata: np.ndarray, shares: np.ndarray, limits: np.ndarray
) -> np.ndarray:
    """bool[N] images to hold out: first the groups that fit, then those that bring strata closer to `shares`.

    Groups come in random order; images of a group have equal `hashes`. `shares` float[K] and
    `limits` int[K] are the expected and the largest numbers of images of each stratum.
    """
    order = np.argsort(hashes, kind="stable")
    members_by_group = np.split(order, np.flatnonzero(np.diff(hashes[order])) + 1)
    missing = shares.tolist()
    room = limits.tolist()
    is_held_out = np.zeros(len(hashes), bool)
    for must_fit in (True, False):
        for members in members_by_group:
            if is_held_out[members[0]]:
                continue
            counts = Counter(strata[members].tolist()).items()
            if must_fit:
                is_better = all(count <= missing[k] for k, count in counts)
            else:
                gain = sum(abs(missing[k]) - abs(missing[k] - count) for k, count in counts)
                is_better = gain >= 0
            if is_better and all(count <= room[k] for k, count in counts):
                is_held_out[members] = True
                for k, count in counts:
                    missing[k] -= count
                    room[k] -= count
    return is_held_out


def describe_eval_data(data: str, source) -> str:
    """One line about the evaluated images: `flowers: test/, 72 images of 5 classes`."""
    return f"{data}: {source.split_text}, {len(source):,} images of {len(source.classes)} classes"


def _find_split(data: str, split_texts: Mapping[str, str], split: str) -> str | None:
    """The split that `split` names or is a kind of. Only without `split`, or for val, it may be None."""
    if split in split_texts:
        return split
    same_names = [name for name in split_texts if name.casefold() == split.casefold()]
    if len(same_names) == 1:
        return same_names[0]
    kind = get_split_kind(split) if split else "val"
    name = _find_only_split(data, split_texts, [kind]) if kind else None
    if name is None and kind != "val":
        raise Refused(
            f"--split {split}: --data {data} has no such split; there is {', '.join(split_texts)}"
        )
    return name


def _find_only_split(data: str, split_texts: Mapping[str, str], kinds: Sequence[str]) -> str | None:
    """The split of the first of `kinds` that there is; None without one. Raises `Refused` for several."""
    for kind in kinds:
        names = [name for name in split_texts if get_split_kind(name) == kind]
        if len(names) > 1:
            candidates = " and ".join(split_texts[name] for name in names)
            advice = "keep one of them there"
            if kind in ("val", "test"):
                advice = "keep one, or name it by --split"
            raise Refused(f"--data {data}: {candidates} could each be the split {kind}; {advice}")
        if names:
            return names[0]
    return None
