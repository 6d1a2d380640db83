"""Data specification: which data a run reads and which parts of them, and the steps of reading that all formats share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from common.config.origin import Origin
from common.data import splits
from common.data.huggingface import table_opener
from common.errors import Refused
from common.randomness import key_of

S = TypeVar("S")  # a source: images with labels, or with boxes
Labels = Mapping[str, str]  # name of each part of the data -> how messages call it
Read = Callable[
    [str, S | None], S
]  # read(name, first) reads a part, with the classes of the first part if there is one


@dataclass(frozen=True)
class DataSpec:
    """Which data a run reads, and which parts of them. Each task adds the fields that its formats need."""

    data: str
    seed: int
    val_share: float
    split: str = ""
    image_column: str = ""
    alone: bool = False  # only the part to evaluate a trained model on, as `splits.choose_part` finds it
    held_out: bool = False  # with `alone`: the model was trained on these data, except for the held-out share

    table_fields: ClassVar[tuple[str, ...]] = ("image_column",)  # those that only tables have a use for

    @classmethod
    def of(cls, config: Any, weights: Origin | None = None, **options: Any) -> Self:
        """The fields above as `config` has them, unless they are among `options`; with `weights`, to evaluate these."""
        given = {field.name: getattr(config, field.name) for field in fields(cls) if hasattr(config, field.name)}
        if weights:
            given |= {"alone": True, "held_out": weights.trained_on(config.data) and not weights.config.get("split")}
        return cls(**(given | options))

    def check(self, source: Any) -> None:
        """Raises `Refused` for a part that can't be used."""
        raise NotImplementedError

    def strata(self, source: Any) -> np.ndarray | None:
        """int64[N], the stratum of each image: the same share of each is held out. None if there is but one."""
        return None

    def hold_out(self, source: S) -> tuple[S, S]:
        """The images to train on and those held out, chosen by `seed` and each image's path or row alone."""
        draws = source.draws(key_of(self.seed, "held out"))
        train, val = splits.held_out(draws, self.strata(source), self.val_share)
        return source.part(train), source.part(val)

    def pieces(self, labels: Labels) -> tuple[splits.Piece, ...]:
        if self.alone:
            return splits.choose_part(self.data, labels, self.split, self.held_out)
        return splits.choose(self.data, labels, self.split)

    def read(self, labels: Labels, read: Read) -> tuple[S, ...]:
        """The sources to train and to evaluate on; with `alone`, one source."""

        def checked(name: str, first: S | None) -> S:
            source = read(name, first)
            self.check(source)
            return source

        return splits.read_pieces(self.pieces(labels), checked, self.hold_out, labels, self.val_share)


def load(
    spec: DataSpec,
    table: Callable[[Callable[[], dict[str, Any]]], tuple[Labels, Read]],
    digits: Callable[[], tuple[S, S]],
    folder: Callable[[Path], tuple[S, ...]],
    custom: Callable[[], tuple[S, ...]] | None = None,
) -> tuple[S, S]:
    """(train, val): the sources to train and to evaluate on; with `spec.alone`, both are the one to evaluate on.

    The arguments are how a task reads each format: `table(opener)` a Hugging Face data set or CSV files, `digits()` the two
    parts of the built-in digits, `custom()` a data set of the user's own, `folder(path)` anything else. A collective: the first
    process of each machine reads first, since reading may download and convert, and all ranks must find the same data. Raises
    `Refused`.
    """
    # Imported late: the separate process that reads large annotations does without torch.
    from common.distributed.collectives import main_process_first, same_on_all_ranks

    with main_process_first("reading the data", local=True):
        train, val = _load(spec, table, digits, folder, custom)
    same_on_all_ranks("data", fingerprint(train, val))
    return train, val


def fingerprint(train: Any, val: Any) -> str:
    """Names the data of a run: both sources, in 25 characters."""
    return f"{train.fingerprint[:12]}-{val.fingerprint[:12]}"


def _load(spec: DataSpec, table: Callable, digits: Callable, folder: Callable, custom: Callable | None) -> tuple[S, S]:
    path = Path(spec.data).expanduser()
    opener = None if custom or spec.data == "digits" else table_opener(spec.data)
    try:
        if opener:
            sources = spec.read(*table(opener))
        elif any(getattr(spec, name) for name in spec.table_fields):
            *flags, last = (f"--{name}" for name in spec.table_fields)
            raise Refused(f"--data {spec.data}: is no table, so leave out {', '.join(flags)} and {last}")
        elif custom:
            sources = custom()
        elif spec.data == "digits":
            parts = dict(zip(("train", "val"), digits(), strict=True))
            sources = spec.read({name: part.origin for name, part in parts.items()}, lambda name, _: parts[name])
        else:
            sources = folder(path)
    except PermissionError as error:
        raise Refused(
            f"--data {spec.data}: no permission to read {error.filename}; allow it, or copy the data"
        ) from error
    except OSError as error:
        reason = error.strerror or error
        raise Refused(f"--data {spec.data}: {error.filename or path} can't be read: {reason}") from error
    return sources[0], sources[-1]
