"""Rendezvous `machines`: how the launchers of a run find each other, start together, and handle lost and leaving machines.

`accelerate launch` and torchrun wait for the other machines before they start a recipe. With `--rdzv_backend machines`, as in
the files of accelerate_configs/, this module does the waiting; pyproject.toml registers it as a plug-in of torchrun. It
extends torch's c10d rendezvous:

- The machine that has the given address is machine 0. So no machine needs a number, and the main process stays there.
- A wait is reported after ten seconds, with its cause, and ends after `join_timeout` seconds (`--rdzv_conf join_timeout=60`).
- It listens only at the given address, a single machine only on its loopback. Its state is JSON, not pickle.
- With `--rdzv_conf at_least=1` and `--max_restarts`, machines may leave and come back. A machine that is asked to leave does
  so after a checkpoint, and the others continue at once.
- Processes that refuse their command, or stop because they were asked to, are not restarted. The launcher then ends with
  their exit code and no message. After a crash it prints one line with the failed process, and no traceback of its own.
- When the launcher of one machine gives up, the others give up too.
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

from common.distributed.exit_codes import AT_LEAST, END, EXIT_FOLDER, RESTART, RESUMABLE, announced_exit, clear, notify
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

JOIN_S = 300  # how long a machine waits for the others; torch's default: 600
LAST_CALL_S = 5  # how much longer it waits for machines beyond `at_least`; torch's default: 30
SILENCE_S = 60  # without a heartbeat for so long, a machine counts as lost; torch's default: 15
ELASTIC_SILENCE_S = 15  # the same if the others then continue without it
REMINDER_S = 60.0
ANSWER = timedelta(seconds=30)  # if the main machine does not answer for so long, it counts as gone
LATE_EXIT_S = 3.0  # how long after the main machine's end the processes of this one may announce that they leave too
ENDING_S = 10.0  # how long processes that are ending may take
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")  # sent to a launcher, they ask its machine to leave


def create(parameters: RendezvousParameters) -> "Machines":
    """Connect to the machine that the endpoint names, or be that machine. Ends the launcher with one line if it can't."""
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
    parameters.local_addr = f"{socket.gethostname()} ({address_towards(host)})"  # how messages name this machine
    inner = create_handler(store, JsonBackend(store, parameters.run_id), parameters)
    return Machines(inner, host, port, hosting, patience)


class Machines(RendezvousHandler):
    """The rendezvous handler that torchrun's agent uses, one on each machine."""

    def __init__(self, inner: DynamicRendezvousHandler, host: str, port: int, hosting: bool, patience: int) -> None:
        self._inner, self._host, self._port, self._hosting, self._patience = inner, host, port, hosting, patience
        self._least, self._most = inner.settings.min_nodes, inner.settings.max_nodes
        self._members: set = set()  # of the last round
        self._here: set = set()  # that have joined the next round so far
        self._lost_since, self._cut_off = math.inf, False
        self._number, self._order = 0, {}  # of the last round: this machine's number; the machines by number
        self._expected: set = set()  # machines that will join the next round, which starts as soon as they have
        self._asked, self._asked_since, self._leaving, self._joining = "", math.inf, False, False
        self._exits = Path(tempfile.mkdtemp(prefix="recipe_exits_"))
        atexit.register(shutil.rmtree, self._exits, ignore_errors=True)
        # The processes inherit these.
        os.environ |= {EXIT_FOLDER: str(self._exits), AT_LEAST: str(self._least)}
        self._complete_promptly()
        # Otherwise torch, which reads this list at each start of processes, would end them at once, with a traceback.
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
        """Wait for the other machines, and agree with them on the order of machines."""
        with self._in_words(), self._reminding():
            self._joining = True
            self._begin_round()
            found = self._inner.next_rendezvous()
            self._joining = False
            store = PrefixStore("machines", found.store)  # of this round only
            self._members = self._joined()
            ranks = {rank: machine for machine, rank in self._inner._state_holder.state.participants.items()}
            store.set(str(found.rank), json.dumps([not self._hosting, address_towards(self._host)]))
            try:
                machines = [json.loads(store.get(str(rank))) for rank in range(found.world_size)]
                # First the machine that keeps the store, then the others in torch's order.
                order = sorted(range(found.world_size), key=lambda rank: machines[rank][0])
                if is_loopback(address := machines[order[0]][1]) and found.world_size > 1:
                    # The main machine knows its own name as 127.0.1.1; take its address on the route to another machine.
                    address = address_towards(machines[order[1]][1])
                self._number = rank = order.index(found.rank)
                # None for a machine that has already left again.
                self._order = {number: ranks.get(place) for number, place in enumerate(order)}
                place = RendezvousStoreInfo.build(rank, store, local_addr=address)
            except (ValueError, TypeError, LookupError) as error:
                raise RendezvousStateError("not written by a launcher") from error
            return RendezvousInfo(found.store, rank, found.world_size, place)

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """How many machines want to join; more than 0 restarts the processes. Called ten times a second while they run."""
        why = END
        try:
            if self._leavers() is not None:
                waiting = 1
            else:
                self._forward_request()
                waiting = self._waiting()
            why = RESTART if waiting else ""
        finally:
            if why:  # torch then gives the processes 30 s to end
                notify(self._exits, why)
                _kill_stopped()
                if announced_exit(self._exits):
                    _await_end()
        return waiting

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Close the rendezvous; the agent's last call. If processes have failed, ends without torch's traceback."""
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
        if self._leaving and announced_exit(self._exits):
            return True  # the other launchers learn it from their own processes
        return not self._cut_off and self._inner.shutdown()  # shutdown would tell the others

    def _on_purpose(self, codes: Iterable[int]) -> int:
        """The launcher's exit code if processes that ended with `codes` did so on purpose; 0 if they did not."""
        if announced := announced_exit(self._exits):
            return announced[0]
        # Asked to stop before they had installed their signal handlers.
        return RESUMABLE if self._asked and {*codes} <= {-signal.SIGTERM, -signal.SIGINT} else 0

    def _logs(self, record: logging.LogRecord) -> bool:
        """Filter of torch's log: drops the lines about ending processes, and replaces those about a failed process."""
        if not str(record.msg).startswith("failed (exitcode") or len(record.args) != 4:
            return not str(record.msg).startswith("Sending process")
        code, local_rank, process, _ = record.args
        if not self._on_purpose([code]):
            _say(f"process {process} (local rank {local_rank}) {_how_it_ended(code)}")
        return False

    def _on_signal(self, number: int, frame) -> None:
        """This machine is asked to leave. `_forward_request` tells its processes; if none run, it leaves at once."""
        self._asked = self._asked or signal.Signals(number).name
        if self._joining and not self._leaving:
            self._leave("this machine leaves the run")

    def _forward_request(self) -> None:
        """Ask the processes to stop if this launcher was asked; kill them if they don't stop in time."""
        patience = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))  # torch's variable and default
        if self._asked and self._asked_since == math.inf:
            self._asked_since = time.monotonic()
            _send(signal.SIGTERM)
        elif time.monotonic() - self._asked_since > patience:
            _send(signal.SIGKILL)
            self._leave(f"its processes did not within {patience:.0f} s, and were killed")

    def _leavers(self) -> list[int] | None:
        """The machines that leave, once the processes have agreed to stop, else None. Ends if this is one of them."""
        code, leavers = announced_exit(self._exits) or (0, [])
        if code != RESUMABLE:
            return None
        if self._number in leavers:
            if len(leavers) == len(self._order):
                again = "the run stops; the same command on all machines resumes from the last checkpoint"
                self._leave(again if self._most > 1 else "")  # on one machine the main process has already printed it
            self._leave("this machine leaves, the others continue; the same command lets it join again")
        return leavers

    def _begin_round(self) -> None:
        """Prepare the next round after the last one's processes have ended, or end with their exit code."""
        self._expected = set()
        if (leavers := self._leavers()) is not None:
            gone = {self._order[number] for number in leavers} - {None}
            self._expected = {*self._order.values()} - gone | self._inner._state_holder.state.wait_list
            if gone:
                self._strike(gone)
                _say(f"continuing without {_names(gone)}: asked to stop")
        elif announced := announced_exit(self._exits):
            sys.exit(announced[0])
        if self._asked:
            self._leave("this machine leaves the run")
        clear(self._exits)

    def _leave(self, what: str) -> NoReturn:
        """End only this launcher: the run continues without it, or resumes by the same command."""
        self._leaving = True
        if what:
            _say(f"asked to stop{self._asked and ' by ' + self._asked}: {what}")
        sys.exit(RESUMABLE)

    def _strike(self, machines: set) -> None:
        """Remove `machines` from the rendezvous at once, instead of after a long silence."""
        holder = self._inner._state_holder
        with self._inner._heartbeat_lock:
            holder.sync()
            while present := machines & holder.state.last_heartbeats.keys():
                holder.state.last_heartbeats |= dict.fromkeys(present, datetime.fromtimestamp(0, UTC))
                holder.mark_dirty()
                holder.sync()  # drops machines without recent heartbeats

    def _complete_promptly(self) -> None:
        """Start a round as soon as all expected machines have joined; torch would wait `last_call_timeout` for others."""
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
                return max(waiting, 1)  # the others count this machine as lost
            lost = self._members - joined
            if not lost:
                self._lost_since = math.inf
                return waiting
            if waiting or self._least < self._most:
                return max(waiting, 1)  # restart: the processes would wait for those of the lost machine
            # A machine that restarts its processes is missing for a moment.
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
            until = time.monotonic() + LATE_EXIT_S
            while not self._joining and self._leavers() is None and time.monotonic() < until:
                time.sleep(0.1)
            _give_up(
                f"the main machine at {self._host}:{self._port} is gone, or has ended, see what it said: start the command on "
                "all machines again, and the run resumes from its last checkpoint"
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
        """The machines that have joined this round, without those that count as lost."""
        return set(self._inner._state_holder.state.participants)  # torch has no public way to ask


def _silence_name_lookups() -> None:
    """Silence torch's C++ warnings about addresses without names, here and in the processes; errors are still shown."""
    if os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR") == "ERROR":
        name = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
        with suppress(OSError, ValueError):  # torch has already read the variable; ValueError: no such symbol
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = 2


def _send(number: int) -> None:
    """Send a signal to the processes of this launcher."""
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            process.send_signal(number)


def _kill_stopped() -> None:
    """Kill the processes of this launcher that are stopped (SIGSTOP), since they can't handle other signals."""
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()


def _await_end() -> None:
    """Wait for the processes of this launcher, which are ending. If torch ended them, it would print messages."""
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
    """Address and port of the first machine, from the flag, else from the environment, else of this machine alone."""
    try:
        return parse_rendezvous_endpoint(text or "localhost:0", 29500)  # 0: any free port
    except ValueError:
        sentence, _, port = text.rpartition(":")  # accelerate_configs/ has a sentence there, for a forgotten flag
        if host := os.environ.get("MASTER_ADDR"):
            return host, int(os.environ.get("MASTER_PORT", port))
        _give_up(sentence)


def _own_address(host: str, most: int) -> str:
    """The address by which the up to `most` machines of the run reach this machine, whose name or address is `host`."""
    if most == 1:
        return LOOPBACK
    if is_loopback(host) or not is_loopback(known_as := address_towards(host)):
        return host
    # On Debian, a machine's own name resolves to 127.0.1.1, only on that machine.
    addresses = outward_addresses()
    if len(addresses) != 1:
        _give_up(
            f"this machine knows its own name {host} as {known_as}, where the others can't reach it: give its address as a "
            f"number on all machines ({' or '.join(addresses) or 'it has none yet'})"
        )
    return addresses[0]


def _reach(host: str, port: int, patience: float) -> tuple[TCPStore, bool]:
    """The store at `host`:`port`, and whether this process keeps it."""
    if is_own(host):
        with suppress(OSError):  # another launcher on this machine was first
            return keep_store(host, port, ANSWER), True
    try:
        await_listener(host, port, patience, _say)
    except Refused as refusal:
        _give_up(str(refusal))
    found: list[TCPStore] = []
    # In a thread, since TCPStore waits for ever if another program listens there and does not answer.
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
