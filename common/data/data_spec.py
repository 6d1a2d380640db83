"""Opening of data: a format gives named splits, and a `DataSpec` says which are read.

A split to train on may be divided: a share of it is held out.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np

from common.config.origin import Origin
from common.data import splits
from common.data.duplicates import find_copies
from common.data.images import BrokenImage, has_image_suffix, open_image
from common.data.notes import Notes
from common.data.source import (
    Files,
    ModelClasses,
    compute_legacy_fingerprint,
    group_by_folder,
    sample_evenly,
)
from common.data.splits import Subset, get_split_kind
from common.errors import Refused, get_os_reason
from common.files import walk
from common.randomness import key_of

_MAX_NAMES = 5  # of classes, in a row of the start table
_SHARDS = re.compile(r"\.tar($|[,?])|^\w+://")

S = TypeVar("S")  # a source: images with labels, or with boxes


@dataclass
class DataSplits(Generic[S]):
    """Data in one of the formats: splits that are named, and not read yet."""

    split_texts: Mapping[str, str]  # name of each split -> how messages call it
    # Names -> sources, all with the classes of the first. Raises `Refused`
    read: Callable[[Sequence[str]], list[S]]


class LoadedSplits(DataSplits[S]):
    """Splits that are sources already."""

    def __init__(self, sources: Mapping[str, Any]):
        split_texts = {name: source.split_text for name, source in sources.items()}
        super().__init__(split_texts, lambda names: [sources[name] for name in names])


@dataclass(frozen=True)
class DataSpec:
    """Which data a run reads, and which splits of them. Each task adds fields of its formats."""

    data: str
    seed: int
    val_share: float
    split: str = ""
    group_column: str = ""  # a reader of data with such a column sets the `groups` of its sources
    image_column: str = ""
    streaming: bool = False
    shard_memory: int = 1024  # MiB
    is_eval_only: bool = False  # True for only the split to evaluate a trained model on
    is_training_data: bool = False  # True if that model was trained on these data without --split

    table_fields: ClassVar[tuple[str, ...]] = ("image_column",)  # that only tables use

    @classmethod
    def from_config(cls, config: Any, weights: Origin | None = None, **options: Any) -> Self:
        """The fields above from `options`, or else from `config`; with `weights`, to evaluate these."""
        values = {}
        for field in fields(cls):
            if hasattr(config, field.name):
                values[field.name] = getattr(config, field.name)
        if weights:
            values["is_eval_only"] = True
            if not weights.config.get("split"):
                values["is_training_data"] = weights.trained_on(config.data)
        return cls(**(values | options))

    def is_sharded(self) -> bool:
        """True if the data are shards, which `common.shards` opens. A collective. Raises `Refused`.

        The text of `data` decides, and the files of a folder: see `names_shards` and `list_tars`.
        """
        # Imported late, since it imports torch.
        from common.distributed.collectives import all_or_none

        with all_or_none("looking for shards"):
            if self.streaming:
                return True
            folder = Path(self.data).expanduser().absolute()
            if folder.is_dir():
                return bool(list_tars(folder))
            return names_shards(self.data)

    def refuse_columns(self) -> None:
        """Raises `Refused` if columns are named, for data that are no table."""
        if any(getattr(self, name) for name in self.table_fields):
            flags = [f"--{name}" for name in self.table_fields]
            raise Refused(
                f"--data {self.data}: is no table, so leave out {', '.join(flags[:-1])} and "
                f"{flags[-1]}"
            )

    def choose_subsets(self, split_texts: Mapping[str, str]) -> tuple[Subset, ...]:
        """The subsets to train on and to evaluate on; with `is_eval_only`, only the latter."""
        if self.is_eval_only:
            return splits.choose_eval_subset(
                self.data, split_texts, self.split, self.is_training_data
            )
        return splits.choose_subsets(self.data, split_texts, self.split)

    def divide(
        self, split_texts: Mapping[str, str], subsets: Sequence[Subset], sources: Mapping[str, S]
    ) -> tuple[S, ...]:
        """The source of each subset, whose sides are chosen if a split is divided. Raises `Refused`.

        `seed`, each image's path or row, and the classes of boxes decide on the sides. A source's
        `split_text` becomes `val/` or `20 % held out of train/`; that of the second one also names other
        splits to evaluate on.
        """
        is_divided = any(subset.side != splits.WHOLE for subset in subsets)
        if self.group_column and not self.is_eval_only and not is_divided:
            problem = f"nothing is held out, since {split_texts[subsets[-1].name]} is evaluated"
            raise Refused(f"--group_column {self.group_column}: {problem}; leave it out")
        result: list[Any] = []
        division: _Division | None = None
        for subset in subsets:
            source: Any = sources[subset.name]
            split_text = split_texts[subset.name]
            if subset.side != splits.WHOLE:
                if division is None:
                    division = self._hold_out(source, split_text)
                source = replace(source, notes=source.notes + division.notes)
                source = source.select(division.indices[subset.side])
                split_text = self._describe_side(split_text, subset.side)
            elif result and subsets[0].name != subset.name:
                notes = _find_shared_images(self.data, split_text, result[0], source)
                source = replace(source, notes=source.notes + notes)
            if result:
                split_text += _describe_unused(split_texts, subsets)
            result.append(replace(source, split_text=split_text))
        return tuple(result)

    def _hold_out(self, source: Any, split_text: str) -> "_Division":
        """The two sides of `source`, which messages call `split_text`. Raises `Refused`."""
        groups, is_copy = self._find_groups(source, split_text)
        hashes = source.hash_images(key_of(self.seed, "held out"))
        side = "the same side"
        try:
            train, val = splits.hold_out(hashes, source.strata, self.val_share, groups)
        except Refused:
            if not is_copy.any():
                raise
            train, val = splits.hold_out(hashes, source.strata, self.val_share)
            side = "any side, since few images are different"
        change = f"are copies, by path or bytes, of others on {side}"
        notes = _note_images(split_text, is_copy, source, change)
        return _Division({splits.TRAIN_SIDE: train, splits.HELD_OUT: val}, notes)

    def _describe_side(self, split_text: str, side: str) -> str:
        """How messages call one side of `split_text`: `80 % of train/` or `20 % held out of train/`."""
        if side == splits.TRAIN_SIDE:
            text = f"{100 * (1 - self.val_share):.3g} % of {split_text}"
        else:
            text = f"{100 * self.val_share:.3g} % held out of {split_text}"
        if self.group_column:
            text += f" by {self.group_column}"
        return text

    def _find_groups(self, source: Any, split_text: str) -> tuple[np.ndarray | None, np.ndarray]:
        """Groups int64[N] of images to hold out together, and bool[N], True for a copy of another image.

        They are groups of `group_column`, or of copies. Raises `Refused`.
        """
        is_copy = np.zeros(len(source), bool)
        if self.group_column:
            images = getattr(source, "images", source)
            if self.group_column == "folder" and isinstance(images, Files):
                return group_by_folder(images), is_copy
            if images.groups is None:
                advice = "take folder for files in folders, or data with such a column"
                raise Refused(
                    f"--group_column {self.group_column}: {split_text} has no such column; {advice}"
                )
            return images.groups, is_copy
        first_copies = find_copies(source)
        is_copy = first_copies != np.arange(len(source))
        return (first_copies if is_copy.any() else None), is_copy


class _Division(NamedTuple):
    """How a source is divided: int64 indices of each side, and notes about it."""

    indices: Mapping[str, np.ndarray]
    notes: tuple[str, ...]


def _describe_unused(split_texts: Mapping[str, str], subsets: Sequence[Subset]) -> str:
    """Which splits to evaluate on are in no subset, as the end of a text."""
    used = get_split_names(subsets)
    text = ""
    for name, label in split_texts.items():
        kind = get_split_kind(name)
        if kind in ("val", "test") and name not in used:
            text += f"; {label}: for --split {kind}"
    return text


def _find_shared_images(data: str, split_text: str, train: Any, val: Any) -> tuple[str, ...]:
    """A note if images of `val`, which messages call `split_text`, are in `train`, too.

    Raises `Refused` if most of them are.
    """
    first_copies = find_copies(train, val)
    is_shared = np.isin(first_copies[len(train) :], first_copies[: len(train)])
    if not is_shared.any():
        return ()
    notes = _note_images(
        split_text, is_shared, val, f"are in {train.split_text}, too, by path or bytes"
    )
    if is_shared.mean() > 0.5:
        raise Refused(
            f"--data {data}: {split_text}: {notes[0]}; evaluate others, or leave it out to hold out a "
            "share"
        )
    return notes


def _note_images(
    split_text: str, is_counted: np.ndarray, source: Any, change: str
) -> tuple[str, ...]:
    """A note about the images that `is_counted`, bool[N], says; `change` is what happens to them."""
    notes = Notes(split_text, "images")
    notes.change(change, source.get_name(int(is_counted.argmax())), is_counted.sum())
    return notes.format_lines(len(source))


def names_shards(data: str) -> bool:
    """True if `data`, which is no folder, names shards: tars, or anything at a URL."""
    return bool(_SHARDS.search(data))


def list_tars(folder: Path) -> list[str]:
    """The tars of a folder of shards, sorted; none if it is another folder, or none at all.

    A set of shards may have a picture beside it. A folder with more images than tars is an image
    folder, and its tars are archives that somebody left there.
    """
    if not folder.is_dir():
        return []
    files = itertools.chain(folder.glob("[!.]*.tar"), folder.glob("[!.]*/[!.]*.tar"))
    tars = sorted(str(file) for file in files)
    if not tars:
        return []
    num_images = 0
    for _, entries in walk(folder):
        num_images += sum(has_image_suffix(entry.name) for entry in entries)
        if num_images > len(tars):
            return []
    return tars


def get_split_names(subsets: Sequence[Subset]) -> list[str]:
    """The names of all splits that subsets are of."""
    return list(dict.fromkeys(subset.name for subset in subsets))


def read_splits(data_splits: DataSplits[S], subsets: Sequence[Subset]) -> dict[str, S]:
    """The sources of all splits that subsets are of, undivided, by name. Raises `Refused`."""
    names = get_split_names(subsets)
    return dict(zip(names, data_splits.read(names), strict=True))


@contextmanager
def guard_reading(data: str) -> Iterator[None]:
    """A block that may download data: one process of each machine goes first. A collective.

    Raises `Refused` for a file that can't be read.
    """
    # Imported late, since it imports torch.
    from common.distributed.collectives import main_process_first

    with main_process_first("reading the data"):
        try:
            yield
        except PermissionError as error:
            problem = f"no permission to read {error.filename}"
            raise Refused(f"--data {data}: {problem}; allow it, or copy the data") from error
        except OSError as error:
            reason = get_os_reason(error)
            raise Refused(
                f"--data {data}: {error.filename or data} can't be read: {reason}"
            ) from error


def check_train_and_val(sources: Sequence[S]) -> tuple[S, S]:
    """(train, val), or the only source twice, the same on all ranks. A collective. Raises `Refused`."""
    from common.distributed.collectives import check_same_on_all_ranks

    train = sources[0]
    val = sources[-1]
    check_same_on_all_ranks("data", join_fingerprints(train, val))
    return train, val


def join_fingerprints(train: Any, val: Any) -> str:
    """Names the data of a run: both sources, in 25 characters."""
    return f"{train.fingerprint[:12]}-{val.fingerprint[:12]}"


def is_fingerprint(recorded: str, train: Any, val: Any) -> bool:
    """True if a run of this version, or of an earlier one, has `recorded` these data, "" without a run."""
    if not recorded:
        return False
    if recorded == join_fingerprints(train, val):
        return True
    legacy_train = compute_legacy_fingerprint(train)
    legacy_val = compute_legacy_fingerprint(val)
    return recorded == f"{legacy_train[:12]}-{legacy_val[:12]}"


def match_classes(
    weights: Origin, data: str, val: S, aliases: Mapping[str, str] | None = None
) -> tuple[S, S]:
    """`val` with the model's classes, and with `model_classes`: what `--eval_only` evaluates `weights` on.

    The first stands for the training data where a model is built. `aliases` has the model's names
    of classes that the data call otherwise. Raises `Refused` for classes that the model does not
    know.
    """
    source: Any = val
    ids = weights.get_class_ids(source.classes, data, aliases or {})
    names = tuple(weights.classes or source.classes)
    model_classes = ModelClasses(names, tuple(ids))
    return replace(source, classes=names), replace(source, model_classes=model_classes)


def describe_data(data: str, train, val) -> dict[str, str]:
    """Rows of the start table about two sources."""
    rows = {
        "data": f"{data}: {len(train):,} + {len(val):,} images of {len(train.classes):,} classes",
        "classes": _format_names(train.classes),
        "trained on": train.split_text,
        "evaluated": val.split_text,
        "fingerprint": (
            f"{join_fingerprints(train, val)}, names, sizes and labels are the same on all ranks; "
            "pixels are not compared"
        ),
    }
    if train.class_counts is not None:
        rows[f"{train.counted_items} per class"] = _describe_counts(train)
    empty_classes = np.flatnonzero(val.class_counts == 0)
    if len(empty_classes):
        names = _format_names([train.classes[class_id] for class_id in empty_classes])
        rows["not evaluated"] = f"{names}: no {val.counted_items} to evaluate"
    transparent = _find_transparent(train)
    if transparent:
        rows["transparency"] = f"becomes white, as in {transparent}; a fourth band: docs/data.md"
    if train.notes:
        rows["train notes"] = "; ".join(train.notes)
    val_notes = [note for note in val.notes if note not in train.notes]
    if val_notes:
        rows["val notes"] = "; ".join(val_notes)
    return rows


def _describe_counts(source) -> str:
    """The rarest and the most frequent class: `3 (cat) to 1,200 (dog)`."""
    counts = source.class_counts
    rarest = int(counts.argmin())
    commonest = int(counts.argmax())
    return (
        f"{counts[rarest]:,} ({source.classes[rarest]}) to "
        f"{counts[commonest]:,} ({source.classes[commonest]})"
    )


def _find_transparent(source) -> str:
    """The name of an image with transparent pixels, of a few that are opened; "" if none has any."""
    for index in sample_evenly(len(source)):
        with suppress(BrokenImage), open_image(source.get_content(index)) as image:
            # A header tells most images without transparency; the pixels of the others are decoded.
            if not image.has_transparency_data:
                continue
            alpha_extrema = image.convert("RGBA").getextrema()[3]  # type: ignore[misc]
            if alpha_extrema != (255, 255):
                return source.get_name(index)
    return ""


def _format_names(names: Sequence[str]) -> str:
    text = ", ".join(names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
        text += f" and {len(names) - _MAX_NAMES:,} more"
    return text
