"""Data specification: which data a run reads and which parts of them, and the steps of reading that all formats share."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np

from common.config.origin import Origin
from common.data import splits
from common.errors import Refused
from common.randomness import key_of

S = TypeVar("S")  # a source: images with labels, or with boxes
Labels = Mapping[str, str]  # name of each part of the data -> how messages call it


class Parts(Protocol[S]):
    """Data in one of the formats, opened: named parts, each of which can be read."""

    labels: Labels

    def read(self, name: str, first: S | None) -> S:
        """The source of a part, with the classes of `first` if another part was read before. Raises `Refused`."""
        ...


@dataclass
class Given:
    """Parts that are sources already."""

    sources: Mapping[str, Any]

    @property
    def labels(self) -> Labels:
        return {name: source.origin for name, source in self.sources.items()}

    def read(self, name: str, first: Any) -> Any:
        return self.sources[name]


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

    def refuse_columns(self) -> None:
        """Raises `Refused` if columns are named, for data that are no table."""
        if any(getattr(self, name) for name in self.table_fields):
            *flags, last = (f"--{name}" for name in self.table_fields)
            raise Refused(f"--data {self.data}: is no table, so leave out {', '.join(flags)} and {last}")

    def read(self, parts: Parts[S]) -> tuple[S, ...]:
        """The sources to train and to evaluate on; with `alone`, one source. The second has the classes of the first.

        The `origin` of a source says what it is: `val/`, or `20 % held out of train/`. That of the second also names other
        parts that could be evaluated.
        """
        pieces, labels = self.pieces(parts.labels), parts.labels
        named = {piece.name for piece in pieces}
        others = [name for name in labels if splits.kind_of(name) in ("val", "test") and name not in named]
        sources: list[S] = []
        sides: tuple[S, ...] = ()
        for piece in pieces:
            origin = labels[piece.name]
            if piece.side == splits.WHOLE:
                source = parts.read(piece.name, sources[0] if sources else None)
                self.check(source)
            else:
                if not sides:
                    whole = parts.read(piece.name, None)
                    self.check(whole)
                    sides = self.hold_out(whole)
                source = sides[piece.side == splits.HELD_OUT]
                share, side = (
                    (self.val_share, " held out") if piece.side == splits.HELD_OUT else (1 - self.val_share, "")
                )
                origin = f"{100 * share:.3g} %{side} of {origin}"
            if sources and others:
                origin += "".join(f"; {labels[name]}: for --split {splits.kind_of(name)}" for name in others)
            sources.append(replace(source, origin=origin))
        return tuple(sources)


@contextmanager
def reading(data: str) -> Iterator[None]:
    """A block that reads data. The first process of each machine is first, since reading may download and convert.

    A collective. What can't be read is `Refused`.
    """
    # Imported late: the separate process that reads large annotations does without torch.
    from common.distributed.collectives import main_process_first

    with main_process_first("reading the data", local=True):
        try:
            yield
        except PermissionError as error:
            raise Refused(
                f"--data {data}: no permission to read {error.filename}; allow it, or copy the data"
            ) from error
        except OSError as error:
            reason = error.strerror or error
            raise Refused(f"--data {data}: {error.filename or data} can't be read: {reason}") from error


def same_everywhere(sources: tuple[S, ...]) -> tuple[S, S]:
    """(train, val), or the only source twice, once all ranks have found the same data. A collective. Raises `Refused`."""
    from common.distributed.collectives import same_on_all_ranks

    train, val = sources[0], sources[-1]
    same_on_all_ranks("data", fingerprint(train, val))
    return train, val


def fingerprint(train: Any, val: Any) -> str:
    """Names the data of a run: both sources, in 25 characters."""
    return f"{train.fingerprint[:12]}-{val.fingerprint[:12]}"
