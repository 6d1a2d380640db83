"""How do the machines of a run find each other, and what does a person hear about one that is missing?

`accelerate launch` and torchrun wait for the other machines before a recipe's first line. They do it here when they are told
`--rdzv_backend machines` (the files of several machines in accelerate_configs/ say it): pyproject.toml makes the name known
to torchrun. It is torch's c10d rendezvous, and differs from it in this:

- the machine that has the address comes first, so that no machine needs a number and the main process stays where it is;
- a wait is said after ten seconds, with its cause, and ends after `join_timeout` seconds (`--rdzv_conf join_timeout=60`);
- it listens at the address that was given and at no other, one machine alone on its loopback; its state is JSON, no pickle;
- with `--rdzv_conf at_least=1` and `--max_restarts` machines may go and come back: one that is asked to go leaves with a
  checkpoint, and the others go on at once;
- processes that refuse what they were asked, or stop because they were asked to, are not restarted, and the launcher ends
  with their exit code and without a word; of a crash it says in one line which process it was, and no traceback of its own;
- when the launcher of one machine gives up, so do the others.
"""

import atexit
import ctypes
import json
import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import torch
from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
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
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _Action,
    _RendezvousJoinOp,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from common.distributed.exit_codes import AT_LEAST, END, LAST_WORD, RESTART, RESUMABLE, forget, notify, read_word
from common.distributed.network import (
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
from common.distributed.rendezvous_state import JsonBackend
from common.errors import Refused

JOIN_S = 300  # how long a machine waits for the others; torch: 600
LAST_CALL_S = 5  # how much longer for those beyond `at_least`; torch: 30
SILENCE_S = 60  # after which a machine counts as lost; torch: 15
ELASTIC_SILENCE_S = 15  # where the others then go on without it
REMINDER_S = 60.0
ANSWER = timedelta(seconds=30)  # how long the main machine may take for one, before it counts as gone
AFTERWORD_S = 3.0  # how much later than the main machine's end the processes of this one may say that they leave, too
ENDING_S = 10.0  # what processes that have nothing more to do may take to end
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")  # that ask this machine to go, sent to its launcher


def create(parameters: RendezvousParameters) -> "Machines":
    """Reach the machine that the endpoint names, or be it. Ends the launcher with one line where that can't be done."""
    _silence_name_lookups()
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
        self._number, self._order = 0, {}  # this machine's in the last round; all machines of it by their numbers
        self._expected: set = set()  # which a round need not wait for longer than until they are there
        self._asked, self._asked_since, self._leaving, self._joining = "", math.inf, False, False
        self._words = Path(tempfile.mkdtemp(prefix="last_word_"))
        atexit.register(shutil.rmtree, self._words, ignore_errors=True)
        # The processes inherit these.
        os.environ |= {LAST_WORD: str(self._words), AT_LEAST: str(self._least)}
        self._complete_promptly()
        # Torch, which reads that list for every start of processes, would end them at once, and with a traceback.
        handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(",")
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join({*handled} - {*SIGNALS}) or "SIGHUP"
        for name in SIGNALS:
            signal.signal(signal.Signals[name], self._on_signal)
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(self._logs)

    def get_backend(self) -> str:
        return "machines"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other machines, and agree with them on who is which."""
        with self._in_words(), self._reminding():
            self._joining = True
            self._go_on()
            found = self._inner.next_rendezvous()
            self._joining = False
            store = PrefixStore("machines", found.store)  # of this round alone
            self._members = self._joined()
            ranks = {rank: machine for machine, rank in self._inner._state_holder.state.participants.items()}
            store.set(str(found.rank), json.dumps([not self._hosting, address_towards(self._host)]))
            try:
                machines = [json.loads(store.get(str(rank))) for rank in range(found.world_size)]
                # The one that keeps the store, then the others as torch has sorted them.
                order = sorted(range(found.world_size), key=lambda rank: machines[rank][0])
                if is_loopback(address := machines[order[0]][1]) and found.world_size > 1:
                    # The host knows its own name as 127.0.1.1; where it is reached is known from the way to another machine.
                    address = address_towards(machines[order[1]][1])
                self._number = rank = order.index(found.rank)
                # None for a machine that has gone again already.
                self._order = {number: ranks.get(place) for number, place in enumerate(order)}
                place = RendezvousStoreInfo.build(rank, store, local_addr=address)
            except (ValueError, TypeError, LookupError) as error:
                raise RendezvousStateError("no launcher wrote this") from error
            return RendezvousInfo(found.store, rank, found.world_size, place)

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """How many machines want to join, asked ten times a second while the processes run; more than 0 starts them anew."""
        why = END
        try:
            if self._heard() is not None:
                waiting = 1
            else:
                self._pass_on()
                waiting = self._waiting()
            why = RESTART if waiting else ""
        finally:
            if why:  # torch then gives the processes half a minute
                notify(self._words, why)
                _kill_stopped()
                if read_word(self._words):
                    _await_end()
        return waiting

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Close the rendezvous, last of all; a failure of processes that is on its way up ends here, without its traceback."""
        closed = self._close()
        if isinstance(failed := sys.exception(), ChildFailedError):
            sys.exit(self._on_purpose(failure.exitcode for failure in failed.failures.values()) or 1)
        return closed

    def _close(self) -> bool:
        if self._leaving and self._least < self._most:
            with suppress(RendezvousConnectionError, DistError):  # the main machine may be gone by now
                self._inner._stop_heartbeats()
                self._strike({self._inner._this_node})
            return True
        if self._leaving and read_word(self._words):
            return True  # the others hear it from their own processes
        return not self._cut_off and self._inner.shutdown()  # which would tell the others

    def _on_purpose(self, codes: Iterable[int]) -> int:
        """The code to end with where processes that ended with `codes` did so on purpose, 0 if they didn't."""
        if word := read_word(self._words):
            return word[0]
        # Asked to stop before they could hear it.
        return RESUMABLE if self._asked and {*codes} <= {-signal.SIGTERM, -signal.SIGINT} else 0

    def _logs(self, record: logging.LogRecord) -> bool:
        """Whether torch may log `record`: not that it ends processes. That a process failed is logged here, in our words."""
        if not str(record.msg).startswith("failed (exitcode") or len(record.args) != 4:
            return not str(record.msg).startswith("Sending process")
        code, local_rank, process, _ = record.args
        if not self._on_purpose([code]):
            _say(f"process {process} (local rank {local_rank}) {_how_it_ended(code)}")
        return False

    def _on_signal(self, number: int, frame) -> None:
        """This machine is asked to go: its processes are told so by `_pass_on`, and where none run it leaves at once."""
        self._asked = self._asked or signal.Signals(number).name
        if self._joining and not self._leaving:
            self._leave("this machine leaves the run")

    def _pass_on(self) -> None:
        """Ask the processes to stop if this launcher was; end them where they don't."""
        patience = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))  # as torch has it
        if self._asked and self._asked_since == math.inf:
            self._asked_since = time.monotonic()
            _send(signal.SIGTERM)
        elif time.monotonic() - self._asked_since > patience:
            _send(signal.SIGKILL)
            self._leave(f"its processes did not within {patience:.0f} s, and were killed")

    def _heard(self) -> list[int] | None:
        """The machines that leave, once the processes have agreed to stop; ends where this is one of them."""
        code, leavers = read_word(self._words) or (0, [])
        if code != RESUMABLE:
            return None
        if self._number in leavers:
            if len(leavers) == len(self._order):
                again = "the run stops; the same command on all machines goes on from the last checkpoint"
                self._leave(again if self._most > 1 else "")  # of one machine the main process has said it
            self._leave("this machine leaves, the others go on; the same command takes it back")
        return leavers

    def _go_on(self) -> None:
        """Begin a new round as the processes of the last one have left it, or end as they did."""
        self._expected = set()
        if (leavers := self._heard()) is not None:
            gone = {self._order[number] for number in leavers} - {None}
            self._expected = {*self._order.values()} - gone | self._inner._state_holder.state.wait_list
            if gone:
                self._strike(gone)
                _say(f"going on without {_names(gone)}: asked to stop")
        elif word := read_word(self._words):
            sys.exit(word[0])
        if self._asked:
            self._leave("this machine leaves the run")
        forget(self._words)

    def _leave(self, what: str) -> NoReturn:
        """End this launcher alone: the run goes on without it, or by the same command."""
        self._leaving = True
        if what:
            _say(f"asked to stop{self._asked and ' by ' + self._asked}: {what}")
        sys.exit(RESUMABLE)

    def _strike(self, machines: set) -> None:
        """Have the rendezvous forget `machines` at once, rather than when they have been silent for long."""
        holder = self._inner._state_holder
        with self._inner._heartbeat_lock:
            holder.sync()
            while present := machines & holder.state.last_heartbeats.keys():
                holder.state.last_heartbeats |= dict.fromkeys(present, datetime.fromtimestamp(0, UTC))
                holder.mark_dirty()
                holder.sync()  # which drops those that were silent for so long

    def _complete_promptly(self) -> None:
        """Let a round begin when those that are known to come are there; torch waits for others for `last_call_timeout`."""
        run = self._inner._op_executor.run

        def run_promptly(operation, *rest) -> None:
            def step(context, deadline):
                state = context.state
                here = self._expected and self._expected <= state.participants.keys()
                if here and isinstance(operation, _RendezvousJoinOp) and not (state.complete or state.closed):
                    return _Action.MARK_RENDEZVOUS_COMPLETE
                return operation(context, deadline)

            run(step, *rest)

        self._inner._op_executor.run = run_promptly

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
            until = time.monotonic() + AFTERWORD_S
            while not self._joining and self._heard() is None and time.monotonic() < until:
                time.sleep(0.1)
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


def _silence_name_lookups() -> None:
    """Keep torch's C++ from warning of each address that has no name, here and in the processes; its errors are still shown."""
    if os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR") == "ERROR":
        name = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
        with suppress(OSError, ValueError):  # torch has read the variable already; ValueError: no such symbol
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = 2


def _send(number: int) -> None:
    """Send a signal to the processes of this launcher."""
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            process.send_signal(number)


def _kill_stopped() -> None:
    """End the processes of this launcher that can't hear that they are to end."""
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()


def _await_end() -> None:
    """Wait a moment for the processes of this launcher, which are ending: torch is not quiet where it ends them."""
    until = time.monotonic() + ENDING_S
    for process in psutil.Process().children() if hasattr(os, "waitid") else ():  # macOS has it from Python 3.13 on
        with suppress(ChildProcessError):
            while (
                not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) and time.monotonic() < until
            ):
                time.sleep(0.02)


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL: by a person, or by the system for want of memory (`dmesg` tells)"
    return (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}, see what it said"
    )


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
