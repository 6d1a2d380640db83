"""Opening of data: a format gives named parts, a `DataSpec` says which are read, and one to train
on may be divided.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from common.config.origin import Origin
from common.data import splits
from common.data.duplicates import find_copies
from common.data.images import BrokenImage, has_image_suffix, opened
from common.data.notes import Notes
from common.data.source import Files, ModelClasses, earlier_fingerprint, group_by_folder, spread
from common.data.splits import Piece, kind_of
from common.errors import Refused
from common.files import walk
from common.randomness import key_of

_SHOWN = 5  # class names in a row of the start table
_SHARDS = re.compile(r"\.tar($|[,?])|^\w+://")

S = TypeVar("S")  # a source: images with labels, or with boxes


@dataclass
class Parts(Generic[S]):
    """Data in one of the formats: parts that are named, and not read yet."""

    labels: Mapping[str, str]  # name of each part -> how messages call it
    # Names -> sources, all with the classes of the first. Raises `Refused`
    read: Callable[[Sequence[str]], list[S]]


class Given(Parts[S]):
    """Parts that are sources already."""

    def __init__(self, sources: Mapping[str, Any]):
        labels = {name: source.part for name, source in sources.items()}
        super().__init__(labels, lambda names: [sources[name] for name in names])


@dataclass(frozen=True)
class DataSpec:
    """Which data a run reads, and which parts of them. Each task adds fields of its formats."""

    data: str
    seed: int
    val_share: float
    split: str = ""
    group_column: str = ""  # a reader of data with such a column sets the `groups` of its sources
    image_column: str = ""
    streaming: bool = False
    shard_memory: int = 1024  # MiB
    alone: bool = False  # True for only the part to evaluate a trained model on
    held_out: bool = False  # True if that model was trained on these data without a held-out share

    table_fields: ClassVar[tuple[str, ...]] = ("image_column",)  # that only tables use

    @classmethod
    def of(cls, config: Any, weights: Origin | None = None, **options: Any) -> Self:
        """The fields above from `options`, or else from `config`; with `weights`, to evaluate these."""
        given = {
            field.name: getattr(config, field.name)
            for field in fields(cls)
            if hasattr(config, field.name)
        }
        if weights:
            given |= {
                "alone": True,
                "held_out": weights.trained_on(config.data) and not weights.config.get("split"),
            }
        return cls(**(given | options))

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
            *flags, last = (f"--{name}" for name in self.table_fields)
            raise Refused(
                f"--data {self.data}: is no table, so leave out {', '.join(flags)} and {last}"
            )

    def pieces(self, labels: Mapping[str, str]) -> tuple[Piece, ...]:
        """The pieces to train on and to evaluate on; with `alone`, only the latter."""
        if self.alone:
            return splits.choose_part(self.data, labels, self.split, self.held_out)
        return splits.choose(self.data, labels, self.split)

    def divide(
        self, labels: Mapping[str, str], pieces: Sequence[Piece], sources: Mapping[str, S]
    ) -> tuple[S, ...]:
        """The source of each piece. Sides are chosen by `seed`, each image's path or row, and the
        classes of boxes.

        Its `part` becomes `val/` or `20 % held out of train/`; the second one's also names other
        parts to evaluate.
        """
        if (
            self.group_column
            and not self.alone
            and all(piece.side == splits.WHOLE for piece in pieces)
        ):
            problem = f"nothing is held out, since {labels[pieces[-1].name]} is evaluated"
            raise Refused(f"--group_column {self.group_column}: {problem}; leave it out")
        used = {piece.name for piece in pieces}
        others = "".join(
            f"; {label}: for --split {kind_of(name)}"
            for name, label in labels.items()
            if kind_of(name) in ("val", "test") and name not in used
        )
        found: list[Any] = []
        rows: dict[str, Any] = {}
        for piece in pieces:
            source: Any = sources[piece.name]
            part = labels[piece.name]
            if piece.side != splits.WHOLE:
                if not rows:
                    groups, is_copy = self._find_groups(source, part)
                    numbers = source.random_numbers(key_of(self.seed, "held out"))
                    side = "the same side"
                    try:
                        kept, held_out = splits.held_out(
                            numbers, source.strata, self.val_share, groups
                        )
                    except Refused:
                        if not is_copy.any():
                            raise
                        kept, held_out = splits.held_out(numbers, source.strata, self.val_share)
                        side = "any side, since few images are different"
                    notes = _note_images(
                        part, is_copy, source, f"are copies, by path or bytes, of others on {side}"
                    )
                    rows = {splits.KEPT: kept, splits.HELD_OUT: held_out}
                source = replace(source, notes=source.notes + notes).select(rows[piece.side])
                is_kept = piece.side == splits.KEPT
                share = 100 * (1 - self.val_share if is_kept else self.val_share)
                part = f"{share:.3g} % {'' if is_kept else 'held out '}of {part}"
                if self.group_column:
                    part += f" by {self.group_column}"
            elif found and pieces[0].name != piece.name:
                source = replace(
                    source, notes=source.notes + _find_shared(self.data, part, found[0], source)
                )
            found.append(replace(source, part=part + others * bool(found)))
        return tuple(found)

    def _find_groups(self, source: Any, part: str) -> tuple[np.ndarray | None, np.ndarray]:
        """Groups int64[N] of images to hold out together, of `group_column` or of copies, and
        bool[N], True for a copy.

        Raises `Refused`.
        """
        is_copy = np.zeros(len(source), bool)
        if self.group_column:
            images = getattr(source, "images", source)
            if self.group_column == "folder" and isinstance(images, Files):
                return group_by_folder(images), is_copy
            if images.groups is None:
                advice = "take folder for files in folders, or data with such a column"
                raise Refused(
                    f"--group_column {self.group_column}: {part} has no such column; {advice}"
                )
            return images.groups, is_copy
        first_of = find_copies(source)
        is_copy = first_of != np.arange(len(source))
        return (first_of if is_copy.any() else None), is_copy


def _find_shared(data: str, part: str, train: Any, val: Any) -> tuple[str, ...]:
    """A note if images of `val`, the part of that name, are in `train`, too. Raises `Refused` if
    most of them are.
    """
    first_of = find_copies(train, val)
    is_shared = np.isin(first_of[len(train) :], first_of[: len(train)])
    if not is_shared.any():
        return ()
    notes = _note_images(part, is_shared, val, f"are in {train.part}, too, by path or bytes")
    if is_shared.mean() > 0.5:
        raise Refused(
            f"--data {data}: {part}: {notes[0]}; evaluate others, or leave it out to hold out a "
            "share"
        )
    return notes


def _note_images(part: str, is_counted: np.ndarray, source: Any, change: str) -> tuple[str, ...]:
    notes = Notes(part, "images")
    notes.change(change, source.name(int(is_counted.argmax())), is_counted.sum())
    return notes.texts(len(source))


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
    tars = sorted(map(str, files))
    if not tars:
        return []
    num_images = 0
    for _, entries in walk(folder):
        num_images += sum(has_image_suffix(entry.name) for entry in entries)
        if num_images > len(tars):
            return []
    return tars


def names_of(pieces: Sequence[Piece]) -> list[str]:
    """The names of all parts that pieces are of."""
    return [*dict.fromkeys(piece.name for piece in pieces)]


def read(parts: Parts[S], pieces: Sequence[Piece]) -> dict[str, S]:
    """The sources of all parts that pieces are of, undivided, by name. Raises `Refused`."""
    names = names_of(pieces)
    return dict(zip(names, parts.read(names), strict=True))


@contextmanager
def reading(data: str) -> Iterator[None]:
    """A block that may download data: one process of each machine goes first. A collective. Raises
    `Refused`.
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
            reason = error.strerror or error
            raise Refused(
                f"--data {data}: {error.filename or data} can't be read: {reason}"
            ) from error


def same_everywhere(sources: Sequence[S]) -> tuple[S, S]:
    """(train, val), or the only source twice, the same on all ranks. A collective. Raises `Refused`."""
    from common.distributed.collectives import same_on_all_ranks

    train, val = sources[0], sources[-1]
    same_on_all_ranks("data", fingerprint(train, val))
    return train, val


def fingerprint(train: Any, val: Any) -> str:
    """Names the data of a run: both sources, in 25 characters."""
    return f"{train.fingerprint[:12]}-{val.fingerprint[:12]}"


def is_fingerprint(recorded: str, train: Any, val: Any) -> bool:
    """True if a run of this version, or of an earlier one, has `recorded` these data; "" if there
    is no such run.
    """
    if not recorded or recorded == fingerprint(train, val):
        return bool(recorded)
    return recorded == f"{earlier_fingerprint(train)[:12]}-{earlier_fingerprint(val)[:12]}"


def match_classes(
    weights: Origin, data: str, val: S, aliases: Mapping[str, str] | None = None
) -> tuple[S, S]:
    """What `--eval_only` evaluates `weights` on: (source with the model's classes, `val` with its
    `model_classes`).

    The first stands for the training data where a model is built. `aliases` has the model's names
    of classes that the data call otherwise. Raises `Refused` for classes that the model does not
    know.
    """
    source: Any = val
    ids = weights.places(source.classes, data, aliases or {})
    names = tuple(weights.classes or source.classes)
    model_classes = ModelClasses(names, tuple(ids))
    return replace(source, classes=names), replace(source, model_classes=model_classes)


def data_rows(data: str, train, val) -> dict[str, str]:
    """Rows of the start table about two sources."""
    classes, counts = train.classes, train.class_counts
    rows = {
        "data": f"{data}: {len(train):,} + {len(val):,} images of {len(classes):,} classes",
        "classes": _names(classes),
        "trained on": train.part,
        "evaluated": val.part,
        "fingerprint": (
            f"{fingerprint(train, val)}, names, sizes and labels are the same on all ranks; "
            "pixels are not compared"
        ),
    }
    if counts is not None:
        few, many = int(counts.argmin()), int(counts.argmax())
        rows[f"{train.counted_items} per class"] = (
            f"{counts[few]:,} ({classes[few]}) to {counts[many]:,} ({classes[many]})"
        )
    if len(never := np.flatnonzero(val.class_counts == 0)):
        rows["not evaluated"] = (
            f"{_names([classes[place] for place in never])}: no {val.counted_items} to evaluate"
        )
    for index in spread(len(train)):
        with suppress(BrokenImage), opened(train.content(index)) as image:
            # A header tells most images without transparency; the pixels of the others are decoded.
            if image.has_transparency_data and image.convert("RGBA").getextrema()[3] != (255, 255):  # type: ignore[misc]
                rows["transparency"] = (
                    f"becomes white, as in {train.name(index)}; a fourth band: docs/data.md"
                )
                break
    others = [note for note in val.notes if note not in train.notes]
    return rows | {
        name: "; ".join(notes)
        for name, notes in (("train notes", train.notes), ("val notes", others))
        if notes
    }


def _names(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
