"""Parts of a data set: the ones to train on and to evaluate, and a share that is held out."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from common.errors import Refused
from common.randomness import key_of, mix

# Also in French, German, Italian, Portuguese and Spanish; "." is a letter with or without an
# accent.
_SPELLINGS = {
    "train": r"train(ing)?|trein(o|amento)|entrenamiento|entra.{1,2}nement|apprentissage|addestramento",
    "trainval": r"train(ing)?[ _-]*(and[ _-]*)?val(id|idation)?",
    "val": (
        r"val|valid|validate|validation|dev|eval|evaluation"
        r"|validaci.{1,2}n|valida.{2,4}o|validazione|validierung"
    ),
    "test": r"test(s|ing|e|es)?|pruebas?",
}
_BEFORE = r"((images?|imgs?|data|dataset|seg)[ _-]+)?"
_BEHIND = r"([ _-]*(set|split|part|data|images?|imgs?|samples))?[ _-]*[0-9]*"
_KINDS = {
    kind: re.compile(f"{_BEFORE}({words}){_BEHIND}", re.IGNORECASE)
    for kind, words in _SPELLINGS.items()
}

WHOLE, KEPT, HELD_OUT = "whole", "kept", "held out"


class Piece(NamedTuple):
    """A whole part of the data, or one side of a part that is divided by holding out a share."""

    name: str
    side: str = WHOLE


def kind_of(name: str) -> str:
    """train, trainval, val or test, in any usual spelling ("Training_Set", "test2017"); else ""."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name)), "")


def by_part(names: Sequence[str]) -> dict[str, list[str]]:
    """Absolute paths or URLs of files, by the kind of the part that they belong to.

    The first word for one in a file's name decides, or in the folders that not all files are in,
    the innermost first: `val-0000.tar`, `test/a/0000.tar`. Files without such a word are train, and
    so are all if they are of one kind.
    """
    groups: dict[str, list[str]] = {}
    paths = [(name.partition("?")[0] if "://" in name else name).split("/") for name in names]
    shared = next(
        (depth for depth, places in enumerate(zip(*paths, strict=False)) if len({*places}) > 1), 0
    )
    for name, path in zip(names, paths, strict=True):
        words = [word for place in path[shared:][::-1] for word in re.split("[^a-zA-Z]+", place)]
        groups.setdefault(next(filter(None, map(kind_of, words)), "train"), []).append(name)
    return groups if len(groups) != 1 else {"train": [*names]}


def choose(data: str, labels: Mapping[str, str], split: str) -> tuple[Piece, Piece]:
    """The pieces to train on and to evaluate: the part `split`, by default the validation part.

    `labels` maps the name of each part to how messages call it. If there is no validation part, a
    share of the training part is held out. A test part is evaluated only if `split` says so:
    results on data that chose the model would be too good. If a test part is evaluated, a part
    called trainval is trained on, if there is one. Raises `Refused`.
    """
    evaluated = _find(data, labels, split)
    kinds = (
        ("train", "trainval")
        if not evaluated or kind_of(evaluated) == "val"
        else ("trainval", "train")
    )
    trained = _only(data, labels, kinds[0]) or _only(data, labels, kinds[1])
    if trained is None:
        advice = "rename one to train, or give a folder or file alone"
        raise Refused(f"--data {data}: no part to train on, only {', '.join(labels)}; {advice}")
    if evaluated and (kind_of(trained), kind_of(evaluated)) != ("trainval", "val"):
        return Piece(trained), Piece(evaluated)
    return Piece(trained, KEPT), Piece(trained, HELD_OUT)


def choose_part(data: str, labels: Mapping[str, str], split: str, held_out: bool) -> tuple[Piece]:
    """The piece to evaluate a trained model on: `split`, by default val, else test, else the only part.

    `held_out` says that the model was trained on these data without a held-out share: then only
    that share is evaluated. Raises `Refused`.
    """
    if len(labels) == 1 and split in ("", "all") and (split or not held_out):
        return (Piece(*labels),)
    found = _find(data, labels, split)
    trained = _only(data, labels, "train") or _only(data, labels, "trainval")
    if found is None and (split or held_out) and trained:
        return (Piece(trained, HELD_OUT),)
    found = found or _only(data, labels, "test")
    if found is None:
        raise Refused(
            f"--data {data}: no part to validate on; name one by --split: {', '.join(labels)}"
        )
    has_val = any(kind_of(name) == "val" for name in labels)
    return (Piece(found, KEPT if held_out and found == trained and not has_val else WHOLE),)


def random_numbers_of(paths: pa.LargeBinaryArray, key: int) -> np.ndarray:
    """uint64[N] random numbers, each a function of its path and `key` alone."""
    hashes = (hashlib.blake2b(path.as_py(), digest_size=8).digest() for path in paths)
    return mix(np.frombuffer(b"".join(hashes), "<u8"), key)


def held_out(
    numbers: np.ndarray, strata: np.ndarray, share: float, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows held out: the `share` of every stratum with the smallest numbers.

    `numbers` uint64[N]; `strata` int64[N] of each row, which keep at least one row to train on; or
    int64[M, 2], row and class of each of M objects, of which each class has about its share. Rows
    with equal `groups` int64[N] are on the same side, and strata then have about their share.
    """
    if not 0 < share < 1:
        raise Refused(
            f"--val_share {share}: must lie between 0 and 1, since the data has no part to "
            "evaluate on"
        )
    in_groups = ""
    if groups is not None:
        _, groups, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        smallest = np.full(len(sizes), np.iinfo(np.uint64).max)
        np.minimum.at(smallest, groups, numbers)
        # The smallest of several numbers is small: mixed again it is as random as the number of a
        # single row.
        numbers = np.where(sizes > 1, mix(smallest, key_of("groups")), smallest)[groups]
        in_groups = f" in {len(sizes):,} groups"
    if strata.ndim == 2:
        out = _stratify(numbers, strata, share)
        num_images = f"{len(out)} images"
    else:
        counts = np.bincount(strata)
        num_images = f"at most {counts.max()} images per class"
        if groups is None:
            by_stratum = np.lexsort((numbers, strata))
            place = np.empty(len(numbers), np.int64)  # of each row within its stratum
            place[by_stratum] = np.arange(len(numbers)) - np.repeat(
                np.cumsum(counts) - counts, counts
            )
            out = place < np.minimum((share * counts + 0.5).astype(np.int64), counts - 1)[strata]
        else:
            out = _hold_out_groups(numbers, strata, share * counts, counts - 1)
    if not out.any():
        raise Refused(f"--val_share {share} of {num_images}{in_groups} holds out none; raise it")
    return np.flatnonzero(~out), np.flatnonzero(out)


def _stratify(numbers: np.ndarray, objects: np.ndarray, share: float) -> np.ndarray:
    """bool[N] rows to hold out, so that each class has its share of `objects`, int64[M, 2] row and class.

    Rows with equal `numbers` uint64[N] are on the same side. This is iterative stratification
    (Sechidis, Tsoumakas & Vlahavas, "On the Stratification of Multi-Label Data", 2011): the class
    with the fewest objects left goes first, and divides its rows; rows are one more class, which
    goes last. In the paper each row joins the side that lacks most objects. Here it is held out as
    long as objects and rows are lacking there, so that the smallest numbers are, and a new row
    moves hardly any other.
    """
    _, groups = np.unique(numbers, return_inverse=True)  # in random order
    row_class = 1 + objects[:, 1].max(initial=-1)
    group_ids = np.append(groups[objects[:, 0]], groups)
    class_ids = np.append(objects[:, 1], np.full(len(groups), row_class))
    objects_by_group = np.split(class_ids[np.argsort(group_ids)], np.cumsum(np.bincount(group_ids)))
    remaining = np.bincount(class_ids)
    missing = np.minimum(share * remaining, remaining - 1)  # objects to hold out
    remaining[-1] += len(objects)  # so that rows go last
    rows_left = len(groups)
    is_open = np.ones(rows_left, bool)
    is_out = ~is_open
    while rows_left:
        class_id = np.where(remaining, remaining, np.inf).argmin()
        for group in np.unique(group_ids[class_ids == class_id]):
            if is_open[group]:
                is_open[group] = False
                counts = np.bincount(objects_by_group[group], minlength=len(remaining))
                remaining -= counts
                rows_left -= counts[-1]
                fits = 2 * missing >= counts
                is_needed = 2 * (missing[-1] - rows_left) >= counts[-1]
                if is_needed or (fits[class_id] and fits[-1]):
                    is_out[group] = True
                    missing -= counts
    return is_out[groups]


def _hold_out_groups(
    numbers: np.ndarray, strata: np.ndarray, shares: np.ndarray, limits: np.ndarray
) -> np.ndarray:
    """bool[N] rows to hold out: in random order the groups that fit, then those that bring strata
    closer to their `shares`.

    Rows of a group have equal `numbers`. `shares` float[K] and `limits` int[K] are the wanted and
    the largest numbers of rows of each stratum.
    """
    rows = np.argsort(numbers, kind="stable")
    members_by_group = np.split(rows, np.flatnonzero(np.diff(numbers[rows])) + 1)
    missing = shares.tolist()
    room = limits.tolist()
    out = np.zeros(len(numbers), bool)
    for must_fit in (True, False):
        for members in members_by_group:
            counts = Counter(strata[members].tolist()).items()
            if must_fit:
                is_better = all(count <= missing[k] for k, count in counts)
            else:
                is_better = (
                    sum(abs(missing[k]) - abs(missing[k] - count) for k, count in counts) >= 0
                )
            if is_better and not out[members[0]] and all(count <= room[k] for k, count in counts):
                out[members] = True
                for k, count in counts:
                    missing[k] -= count
                    room[k] -= count
    return out


def describe(data: str, source) -> str:
    """One line about the evaluated images: `flowers: test/, 72 images of 5 classes`."""
    return f"{data}: {source.part}, {len(source):,} images of {len(source.classes)} classes"


def _find(data: str, labels: Mapping[str, str], split: str) -> str | None:
    """The part that `split` names or is a kind of. Only without `split`, or for val, it may be None."""
    alike = [name for name in labels if name.casefold() == split.casefold()]
    if split in labels or len(alike) == 1:
        return split if split in labels else alike[0]
    kind = kind_of(split or "val")
    found = kind and _only(data, labels, kind)
    if not found and kind != "val":
        raise Refused(
            f"--split {split}: --data {data} has no such part; there is {', '.join(labels)}"
        )
    return found


def _only(data: str, labels: Mapping[str, str], kind: str) -> str | None:
    names = [name for name in labels if kind_of(name) == kind]
    if len(names) > 1:
        several = " and ".join(labels[name] for name in names)
        advice = (
            "keep one, or name it by --split"
            if kind in ("val", "test")
            else "keep one of them there"
        )
        raise Refused(f"--data {data}: {several} could each be the part {kind}; {advice}")
    return names[0] if names else None
