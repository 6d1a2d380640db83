"""Membership: the records of a run's machines in the store of the main machine.

The launcher of each machine renews its record every few seconds. A machine counts as lost when its
record has not changed for some time by the reader's monotonic clock, so clocks need not agree.

Records are JSON, and checked: anybody who reaches the port can write to the store.
"""

import json
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousStateError

# For the next round; in a round; the run without this machine.
WAITING, RUNNING, LEFT = "waiting", "running", "left"


@dataclass
class Record:
    """A machine's message to the others about itself."""

    host: str
    address: str
    state: str = WAITING
    round: int = 0  # the last one that it took part in
    beats: int = 0  # how often it was written

    @property
    def name(self) -> str:
        return f"{self.host} ({self.address})"


@dataclass
class Round:
    """The machines that run processes together, main machine first."""

    number: int = 0  # 0, without machines, before the first
    machines: list[int] = field(default_factory=list)


class Membership:
    """The records of all machines as one of them sees them. `number` is this machine's, never used
    again by another.
    """

    def __init__(
        self, store: Store, host: str, address: str, interval: float, silence: float
    ) -> None:
        """Write a record, and renew it every `interval` seconds. After `silence` seconds without
        that, a machine is lost.
        """
        self._store, self._silence, self._interval, self._lock = (
            store,
            silence,
            interval,
            threading.Lock(),
        )
        self._mine, self.number = Record(host, address), 0
        while (mine := _json(self._mine)) != store.compare_set(
            _key(self.number), "", mine
        ).decode():
            self.number += 1
        # Of each machine: beats, and when these were seen first.
        self._seen: dict[int, tuple[int, float]] = {}
        self._records: dict[int, Record] = {}  # of all machines that ever came, as last read
        self._ended = False
        threading.Thread(target=self._beat, daemon=True).start()

    def present(self) -> dict[int, Record]:
        """The records of the machines that take part or want to, by number; neither lost ones nor
        those that have left.

        Raises RendezvousClosedError if a machine has closed the run, RendezvousStateError for a
        stranger's text.
        """
        if self.is_closed():
            raise RendezvousClosedError
        while self._store.check([_key(len(self._seen))]):
            self._seen[len(self._seen)] = (-1, 0.0)
        texts, now = (
            self._store.multi_get([_key(number) for number in self._seen]),
            time.monotonic(),
        )
        self._records = {
            number: _read(Record, text) for number, text in zip(self._seen, texts, strict=True)
        }
        for number, record in self._records.items():
            if record.beats != self._seen[number][0]:
                self._seen[number] = (record.beats, now)
        return {
            number: record
            for number, record in self._records.items()
            if record.state != LEFT and now - self._seen[number][1] < self._silence
        }

    def names(self, machines: Iterable[int]) -> str:
        """How messages name these machines."""
        return ", ".join(sorted(self._records[number].name for number in machines))

    def round(self) -> Round:
        """The last round that has begun."""
        return _read(Round, self._store.get("round")) if self._store.check(["round"]) else Round()

    def begin(self, round: Round) -> None:
        """Begin a round; done by the main machine only."""
        self._store.set("round", _json(round))

    def become(self, state: str, round: Round) -> None:
        """Tell the others that this machine is WAITING, RUNNING or has LEFT, and that `round` was
        its last.
        """
        with self._lock:
            self._mine = replace(self._mine, state=state, round=round.number)
            self._renew()

    def close(self) -> None:
        """End the run for all machines."""
        self._store.set("closed", "")

    def is_closed(self) -> bool:
        return self._store.check(["closed"])

    def end(self) -> None:
        """Stop renewing the record: a thread inside torch would abort a process that ends."""
        with self._lock:
            self._ended = True

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the main machine is gone; whoever reads next will say so
            while True:
                time.sleep(self._interval)
                with self._lock:
                    if self._ended:
                        return
                    self._renew()

    def _renew(self) -> None:
        self._mine = replace(self._mine, beats=self._mine.beats + 1)
        self._store.set(_key(self.number), _json(self._mine))


def _key(number: int) -> str:
    return f"machine/{number}"


def _json(item: Record | Round) -> str:
    return json.dumps(asdict(item))


def _read(kind: type, text: bytes) -> Any:
    """A Record or Round. Raises RendezvousStateError if `text` is none."""
    try:
        item, model = kind(**json.loads(text)), Record("", "") if kind is Record else Round()
        fits = all(type(value) is type(getattr(model, name)) for name, value in vars(item).items())
        fits = fits and all(type(number) is int for number in getattr(item, "machines", ()))
        if not fits or not getattr(item, "name", "").isprintable():  # it is shown in a terminal
            raise ValueError("fields of another kind")
    except (ValueError, TypeError, RecursionError) as error:
        raise RendezvousStateError(
            f"no {kind.__name__}: {type(error).__name__}: {error}"
        ) from error
    return item
