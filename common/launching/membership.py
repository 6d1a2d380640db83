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
from typing import Any, NamedTuple

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousStateError

# A machine waits for the next round, takes part in one, or has left the run.
WAITING = "waiting"
RUNNING = "running"
LEFT = "left"


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


class _Heard(NamedTuple):
    """The beats of a machine's record, and when these were read first."""

    beats: int
    time: float


class Membership:
    """The records of all machines as one of them sees them.

    `machine_id` is this machine's, and is never given to another one.
    """

    def __init__(
        self, store: Store, host: str, address: str, interval: float, silence: float
    ) -> None:
        """Write a record, and renew it every `interval` seconds.

        After `silence` seconds without that, a machine is lost.
        """
        self._store = store
        self._silence = silence
        self._interval = interval
        self._lock = threading.Lock()
        self._record = Record(host, address)
        self.machine_id = self._take_machine_id()
        self._heard: dict[int, _Heard] = {}
        self._records: dict[int, Record] = {}  # of all machines that ever came, as last read
        self._stopped = False
        threading.Thread(target=self._run_heartbeat, daemon=True).start()

    def _take_machine_id(self) -> int:
        text = _to_json(self._record)
        machine_id = 0
        while self._store.compare_set(_key(machine_id), "", text).decode() != text:
            machine_id += 1
        return machine_id

    def read_present(self) -> dict[int, Record]:
        """The records of the machines that take part or want to, by machine id.

        Lost machines and those that have left are not in it. Raises RendezvousClosedError if a
        machine has closed the run, RendezvousStateError for a stranger's text.
        """
        if self.is_closed():
            raise RendezvousClosedError
        while self._store.check([_key(len(self._heard))]):
            self._heard[len(self._heard)] = _Heard(beats=-1, time=0.0)
        texts = self._store.multi_get([_key(machine) for machine in self._heard])
        now = time.monotonic()
        self._records = {}
        for machine, text in zip(self._heard, texts, strict=True):
            self._records[machine] = _parse(Record, text)
        present = {}
        for machine, record in self._records.items():
            if record.beats != self._heard[machine].beats:
                self._heard[machine] = _Heard(record.beats, now)
            is_heard = now - self._heard[machine].time < self._silence
            if is_heard and record.state != LEFT:
                present[machine] = record
        return present

    def format_names(self, machines: Iterable[int]) -> str:
        """How messages name these machines."""
        return ", ".join(sorted(self._records[machine].name for machine in machines))

    def read_round(self) -> Round:
        """The last round that has begun."""
        if not self._store.check(["round"]):
            return Round()
        return _parse(Round, self._store.get("round"))

    def start_round(self, round: Round) -> None:
        """Start a round; done by the main machine only."""
        self._store.set("round", _to_json(round))

    def set_state(self, state: str, round: Round) -> None:
        """Tell the others that this machine is WAITING, RUNNING or has LEFT; `round` was its last."""
        with self._lock:
            self._record = replace(self._record, state=state, round=round.number)
            self._renew()

    def close(self) -> None:
        """End the run for all machines."""
        self._store.set("closed", "")

    def is_closed(self) -> bool:
        return self._store.check(["closed"])

    def stop(self) -> None:
        """Stop renewing the record: a thread inside torch would abort a process that ends."""
        with self._lock:
            self._stopped = True

    def _run_heartbeat(self) -> None:
        with suppress(RuntimeError):  # the main machine is gone; whoever reads next will say so
            while True:
                time.sleep(self._interval)
                with self._lock:
                    if self._stopped:
                        return
                    self._renew()

    def _renew(self) -> None:
        self._record = replace(self._record, beats=self._record.beats + 1)
        self._store.set(_key(self.machine_id), _to_json(self._record))


def _key(machine: int) -> str:
    return f"machine/{machine}"


def _to_json(item: Record | Round) -> str:
    return json.dumps(asdict(item))


def _parse(kind: type, text: bytes) -> Any:
    """A Record or Round. Raises RendezvousStateError if `text` is none."""
    try:
        item = kind(**json.loads(text))
        _check_fields(item)
    except (ValueError, TypeError, RecursionError) as error:
        raise RendezvousStateError(
            f"no {kind.__name__}: {type(error).__name__}: {error}"
        ) from error
    return item


def _check_fields(item: Record | Round) -> None:
    """Raise ValueError if a field has another type, or a text that a terminal can't show."""
    expected = Record("", "") if isinstance(item, Record) else Round()
    for name, value in vars(item).items():
        if type(value) is not type(getattr(expected, name)):
            raise ValueError(f"{name} is of another type")
    if isinstance(item, Record) and not item.name.isprintable():
        raise ValueError("the name can't be printed")
    if isinstance(item, Round) and any(type(machine) is not int for machine in item.machines):
        raise ValueError("machines are of another type")
