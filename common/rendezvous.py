"""How do the machines of a run find each other, and what does a person hear about one that is missing?

`accelerate launch` and torchrun wait for the other machines before a recipe's first line. They do it here when they are told
`--rdzv_backend machines` (the files of several machines in accelerate_configs/ say it): pyproject.toml makes the name known
to torchrun. It is torch's c10d rendezvous, and differs from it in this:

- the machine that has the address comes first, so that no machine needs a number and the main process stays where it is;
- a wait is said after ten seconds, with its cause, and ends after `join_timeout` seconds (`--rdzv_conf join_timeout=60`);
- it listens at the address that was given and at no other, one machine alone on its loopback; its state is JSON, no pickle;
- with `--rdzv_conf at_least=1` and `--max_restarts` machines may go and come back;
- processes that refuse what they were asked, or stop because they were asked to, are not restarted;
- when the launcher of one machine gives up, so do the others.
"""

import atexit
import json
import math
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from common.errors import Refused
from common.last_word import LAST_WORD
from common.network import (
    LOOPBACK,
    QUIET_S,
    address_towards,
    await_listener,
    bound_silence,
    is_loopback,
    is_own,
    keep_store,
    outward_addresses,
)
from common.rendezvous_state import JsonBackend

JOIN_S = 300  # how long a machine waits for the others; torch: 600
LAST_CALL_S = 5  # how much longer for those beyond `at_least`; torch: 30
SILENCE_S = 60  # after which a machine counts as lost; torch: 15
ELASTIC_SILENCE_S = 15  # where the others then go on without it
REMINDER_S = 60.0
ANSWER = timedelta(seconds=30)  # how long the main machine may take for one, before it counts as gone


def create(parameters: RendezvousParameters) -> "Machines":
    """Reach the machine that the endpoint names, or be it. Ends the launcher with one line where that can't be done."""
    host, port = _endpoint(parameters.endpoint)
    parameters.min_nodes = parameters.get_as_int("at_least", parameters.min_nodes)
    patience = parameters.get_as_int("join_timeout", JOIN_S)
    silence = SILENCE_S if parameters.min_nodes == parameters.max_nodes else ELASTIC_SILENCE_S
    parameters.config = {
        "join_timeout": patience,
        "last_call_timeout": LAST_CALL_S,
        "keep_alive_max_attempt": silence // 5,  # one heartbeat in 5 seconds
        **parameters.config,
    }
    if is_own(host):
        host = _own_address(host, parameters.max_nodes)
    store, hosting = _reach(host, port, patience)
    size = f"{parameters.min_nodes}:{parameters.max_nodes}"
    others = store.compare_set("machines/size", "", size).decode()
    if others != size:
        _give_up(
            f"launched for {size} machines (least:most), but {host}:{port} is asked for {others}: give all the same"
        )
    parameters.local_addr = f"{socket.gethostname()} ({address_towards(host)})"  # how the others name this machine
    inner = create_handler(store, JsonBackend(store, parameters.run_id), parameters)
    return Machines(inner, host, port, hosting, patience)


class Machines(RendezvousHandler):
    """What torchrun's agent talks to, one on each machine."""

    def __init__(self, inner: DynamicRendezvousHandler, host: str, port: int, hosting: bool, patience: int) -> None:
        self._inner, self._host, self._port, self._hosting, self._patience = inner, host, port, hosting, patience
        self._least, self._most = inner.settings.min_nodes, inner.settings.max_nodes
        self._members: set = set()  # of the last round
        self._here: set = set()  # of the round that is being waited for
        self._lost_since, self._cut_off = math.inf, False
        self._word = Path(tempfile.mkstemp(prefix="last_word_")[1])
        os.environ[LAST_WORD] = str(self._word)  # the processes inherit it
        atexit.register(self._word.unlink, missing_ok=True)

    def get_backend(self) -> str:
        return "machines"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other machines, and agree with them on who is which."""
        with self._in_words(), self._reminding():
            # Processes that a launcher stops to let another machine in say the same as those that were asked to stop.
            if (code := self._word.read_text()) and not self._inner.num_nodes_waiting():
                sys.exit(int(code))
            self._word.write_text("")
            found = self._inner.next_rendezvous()
            store = PrefixStore("machines", found.store)  # of this round alone
            self._members = self._joined()
            store.set(str(found.rank), json.dumps([not self._hosting, address_towards(self._host)]))
            try:
                machines = [json.loads(store.get(str(rank))) for rank in range(found.world_size)]
                # The one that keeps the store, then the others as torch has sorted them.
                order = sorted(range(found.world_size), key=lambda rank: machines[rank][0])
                rank = order.index(found.rank)
                place = RendezvousStoreInfo.build(rank, store, local_addr=machines[order[0]][1])
            except (ValueError, TypeError, LookupError) as error:
                raise RendezvousStateError("no launcher wrote this") from error
            return RendezvousInfo(found.store, rank, found.world_size, place)

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """How many machines want to join, asked ten times a second while the processes run; more than 0 starts them anew."""
        waiting = 1
        try:
            waiting = self._waiting()
        finally:
            if waiting:  # or at an end, where torch gives the processes half a minute as well
                _kill_stopped()
        return waiting

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return not self._cut_off and self._inner.shutdown()  # which would tell the others

    def _waiting(self) -> int:
        with self._in_words():
            if self._inner.is_closed():
                raise RendezvousClosedError
            waiting, joined = self._inner.num_nodes_waiting(), self._joined()
            if self._inner._this_node not in joined:
                return max(waiting, 1)  # the others have not heard of this one for long, and do without it
            lost = self._members - joined
            if not lost:
                self._lost_since = math.inf
                return waiting
            if waiting or self._least < self._most:
                return max(waiting, 1)  # without new processes the old ones would wait for those of that machine
            # One that starts its processes anew is missing for a moment.
            self._lost_since = min(self._lost_since, time.monotonic())
            if time.monotonic() - self._lost_since > QUIET_S:
                _give_up(f"nothing is heard of {_names(lost)} any more: see to it, and start the command on all again")
            return 0

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except RendezvousTimeoutError:
            lost = self._members - self._here
            _give_up(
                f"{len(self._here)} of {self._least} machines came within {self._patience} s: {_names(self._here)}"
                + (f"; {_names(lost)} did not come back" if lost else "")
                + f". Start the command on the others, with the address {self._host}:{self._port}"
            )
        except RendezvousClosedError:
            _give_up(
                "the launcher of another machine has given up, see what it said: start the command on all of them again"
            )
        except RendezvousStateError:
            self._cut_off = True
            _give_up(
                f"what lies in the store at {self._host}:{self._port} is not from a launcher of this run: see who else reaches "
                "that port (docs/security.md), and start the command on all machines again"
            )
        except (RendezvousConnectionError, DistError):
            self._cut_off = True
            _give_up(
                f"the main machine at {self._host}:{self._port} is gone, or has ended, see what it said: start the command on "
                "all machines again, and the run goes on from its last checkpoint"
            )

    @contextmanager
    def _reminding(self) -> Iterator[None]:
        done = threading.Event()

        def remind() -> None:
            due = time.monotonic() + QUIET_S
            while not done.wait(1):
                self._here = self._joined() or self._here
                if time.monotonic() > due:
                    ready = self._inner._state_holder.state.complete
                    enough = "train without this one, which waits" if ready else f"of {self._least} are here"
                    _say(f"{len(self._here)} machines {enough}, up to {self._patience} s: {_names(self._here)}")
                    due += REMINDER_S

        threading.Thread(target=remind, daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _joined(self) -> set:
        """The machines of this round as far as they have come, but those that have not been heard of for long."""
        return set(self._inner._state_holder.state.participants)  # which torch tells nobody


def _kill_stopped() -> None:
    """End the processes of this launcher that can't hear that they are to end."""
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()


def _names(machines: set) -> str:
    return ", ".join(sorted(machine.addr for machine in machines))


def _endpoint(text: str) -> tuple[str, int]:
    """Address and port of the first machine, by flag or else from the environment; of this machine alone where neither says."""
    try:
        return parse_rendezvous_endpoint(text or "localhost:0", 29500)  # 0: any free port
    except ValueError:
        sentence, _, port = text.rpartition(":")  # of accelerate_configs/, for a forgotten flag
        if host := os.environ.get("MASTER_ADDR"):
            return host, int(os.environ.get("MASTER_PORT", port))
        _give_up(sentence)


def _own_address(host: str, most: int) -> str:
    """The address of this machine, which is `host`, at which the up to `most` machines of the run reach it."""
    if most == 1:
        return LOOPBACK
    if is_loopback(host) or not is_loopback(known_as := address_towards(host)):
        return host
    # Debian knows a machine's own name as 127.0.1.1, on that machine alone.
    addresses = outward_addresses()
    if len(addresses) != 1:
        _give_up(
            f"this machine knows its own name {host} as {known_as}, where the others can't reach it: give its address as a "
            f"number on all machines ({' or '.join(addresses) or 'it has none yet'})"
        )
    return addresses[0]


def _reach(host: str, port: int, patience: float) -> tuple[TCPStore, bool]:
    """The store at `host`:`port`, and whether this process is the one that keeps it."""
    if is_own(host):
        with suppress(OSError):  # another launcher on this machine was first
            return keep_store(host, port, ANSWER), True
    try:
        await_listener(host, port, patience, _say)
    except Refused as refusal:
        _give_up(str(refusal))
    found: list[TCPStore] = []
    # In a thread, since it waits for ever where what listens there does not answer.
    joining = threading.Thread(target=lambda: found.append(TCPStore(host, port, timeout=ANSWER)), daemon=True)
    joining.start()
    joining.join(ANSWER.total_seconds())
    if not found:
        _give_up(f"what listens on {host}:{port} is no launcher of these recipes: choose another port on all machines")
    bound_silence(port, ANSWER)
    return found[0], False


def _say(text: str) -> None:
    print(f"{socket.gethostname()}: {text}", file=sys.stderr, flush=True)


def _give_up(text: str) -> NoReturn:
    sys.exit(f"{socket.gethostname()}: {text}")
