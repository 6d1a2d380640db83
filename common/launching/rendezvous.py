"""Rendezvous `machines`: the launchers of a run find each other, and start together.

They also handle lost and leaving machines.
`accelerate launch` and torchrun use it with `--rdzv_backend machines`, as in the files of
accelerate_configs/.

- The machine that has the given address is machine 0. So no machine needs a number.
- A run starts when all machines are there, whatever their clocks say.
- A wait is reported after ten seconds, with its cause, and ends after `join_timeout` seconds.
- It listens only at the given address, a single machine only on its loopback.
- With `at_least` and `--max_restarts`, machines may leave, after a checkpoint, and come back.
- Processes that refuse their command, or were asked to stop, are not restarted: the launcher ends
  with their exit code. After a crash it prints one line with the failed process, and no traceback.
- When the launcher of one machine gives up, the others give up too.
"""

import atexit
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
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from common.errors import Refused
from common.launching import agent, exit_codes, network
from common.launching.exit_codes import END, RESTART, RESUMABLE, STOPPING, read_announced_exit
from common.launching.membership import LEFT, RUNNING, WAITING, Membership, Record, Round

JOIN_S = 300  # how long a machine waits for the others
LAST_CALL_S = 5  # how much longer the first round waits for machines beyond `at_least`
BEAT_S = 5  # a machine renews its record so often
SILENCE_S = 60  # a machine counts as lost if it has not done so for this time
ELASTIC_SILENCE_S = 15  # the same if the others then continue without it
POLL_S = 0.1
ANSWER = timedelta(seconds=30)  # if the main machine does not answer for so long, it counts as gone
LATE_EXIT_S = 3.0  # after another launcher's end, for processes that end on purpose, too


def create(parameters: RendezvousParameters) -> "Machines":
    """Connect to the machine that the endpoint names, or be that machine.

    Ends the launcher with one line if it can't.
    """
    agent.silence_name_lookups()
    host, port = _parse_endpoint(parameters.endpoint)
    if network.is_own_address(host):
        host = _find_own_address(host, parameters.max_nodes)
    timeout = float(parameters.get("join_timeout", JOIN_S))
    store, is_host = _connect(host, port, timeout)
    return Machines(parameters, store, host, port, is_host)


class Machines(RendezvousHandler):
    """The rendezvous handler that torchrun's agent uses, one on each machine.

    `is_host`: this machine keeps the store.
    """

    def __init__(
        self,
        parameters: RendezvousParameters,
        store: TCPStore,
        host: str,
        port: int,
        is_host: bool,
    ) -> None:
        self._host = host
        self._port = port
        self._is_host = is_host
        self._run_id = parameters.run_id
        self._min_machines = int(parameters.get("at_least", parameters.min_nodes))
        self._max_machines = parameters.max_nodes
        self._join_timeout = int(parameters.get("join_timeout", JOIN_S))
        self._last_call = int(parameters.get("last_call_timeout", LAST_CALL_S))
        self._check_same_size(store)
        self._store = PrefixStore(f"machines/{self._run_id}", store)
        self._members = self._join_members(parameters)
        self._round = Round()  # the last one that this machine took part in
        self._left: set[int] = set()  # machines that have announced that they leave
        self._stop_reason = ""  # what asked this machine to leave, such as SIGTERM
        self._stop_time = math.inf  # when its processes were told so
        self._is_leaving = False
        self._is_joining = False
        self._is_cut_off = False
        self._exit_folder = Path(tempfile.mkdtemp(prefix="recipe_exits_"))
        atexit.register(shutil.rmtree, self._exit_folder, ignore_errors=True)
        # The processes inherit these.
        os.environ[exit_codes.EXIT_FOLDER] = str(self._exit_folder)
        os.environ[exit_codes.MIN_MACHINES] = str(self._min_machines)
        agent.handle_signals(self._on_signal)
        agent.replace_log(self._report_failure)

    def _check_same_size(self, store: TCPStore) -> None:
        size = f"{self._min_machines}:{self._max_machines}"
        first_size = store.compare_set("machines/size", "", size).decode()
        if first_size != size:
            _give_up(
                f"launched for {size} machines (least:most), but {self._host}:{self._port} is "
                f"asked for {first_size}: give all the same"
            )

    def _join_members(self, parameters: RendezvousParameters) -> Membership:
        interval = int(parameters.get("keep_alive_interval", BEAT_S))
        is_elastic = self._min_machines != self._max_machines
        silence = ELASTIC_SILENCE_S if is_elastic else SILENCE_S
        max_missed = int(parameters.get("keep_alive_max_attempt", silence // BEAT_S))
        return Membership(
            self._store,
            host=socket.gethostname(),
            address=network.find_address_towards(self._host),
            interval=interval,
            silence=interval * max_missed,
        )

    def get_backend(self) -> str:
        return "machines"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other machines, and agree with them on the order of machines."""
        with self._explain_errors():
            self._is_joining = True
            self._prepare_round()
            self._members.set_state(WAITING, self._round)
            self._await_round()
            self._members.set_state(RUNNING, self._round)
            self._is_joining = False
            rank = self._round.machines.index(self._members.machine_id)
            # A connection of its own: torch's agent may wait in it, and records must still be
            # renewed.
            store = PrefixStore(f"round {self._round.number}", self._store.clone())
            if not self._is_host:
                network.set_user_timeout(self._port, ANSWER)
            # The first machine, which keeps the store, tells the others where its processes listen.
            address = network.find_address_towards(self._host)
            store_info = RendezvousStoreInfo.build(rank, store, address)
            return RendezvousInfo(store, rank, len(self._round.machines), store_info)

    def _await_round(self) -> None:
        """Return when a round has started that this machine takes part in. The main machine starts it."""
        start = time.monotonic()
        last_change = start
        report_time = start + network.QUIET_S
        waiting: set[int] = set()  # the machines that wait for the next round
        while True:
            present = self._members.read_present()
            now = time.monotonic()
            previous = waiting
            waiting = _find_waiting(present)
            if waiting != previous:
                last_change = now
            busy = present.keys() - waiting
            if self._is_host and self._is_round_due(waiting, busy, now - last_change):
                self._start_round(waiting)
            current = self._members.read_round()
            if (
                current.number != self._round.number
                and self._members.machine_id in current.machines
            ):
                self._round = current
                return
            if now - start > self._join_timeout:
                self._give_up_waiting(waiting)
            if now > report_time:
                self._report_wait(waiting, set(current.machines) & busy)
                report_time = math.inf
            time.sleep(POLL_S)

    def _is_round_due(self, waiting: set[int], busy: set[int], unchanged_s: float) -> bool:
        """True if a round starts with the machines in `waiting`.

        They have been the same for `unchanged_s` seconds. `busy` are the other machines that are
        present.
        """
        if self._members.machine_id not in waiting or len(waiting) < self._min_machines:
            return False
        if len(waiting) >= self._max_machines:
            return True
        ending = set(self._round.machines) & busy - self._left  # their processes still run
        if ending:
            return False
        if self._round.number > 0:
            return True
        return unchanged_s >= self._last_call

    def _start_round(self, waiting: set[int]) -> None:
        main = self._members.machine_id
        machines = [main]
        machines.extend(sorted(waiting - {main}))
        round = Round(self._round.number + 1, machines[: self._max_machines])
        self._members.start_round(round)

    def _give_up_waiting(self, waiting: set[int]) -> NoReturn:
        lost = set(self._round.machines) - waiting
        lost_text = f"; {self._members.format_names(lost)} did not come back" if lost else ""
        _give_up(
            f"{len(waiting)} of {self._min_machines} machines came within {self._join_timeout} s: "
            f"{self._members.format_names(waiting)}{lost_text}. Start the command on the others, "
            f"with the address {self._host}:{self._port}"
        )

    def _report_wait(self, waiting: set[int], training: set[int]) -> None:
        machines = waiting
        state = f"of {self._min_machines} are here"
        if training:
            machines = training
            state = "train without this one, which waits"
        names = self._members.format_names(machines)
        _log(f"{len(machines)} machines {state}, up to {self._join_timeout} s: {names}")

    def is_closed(self) -> bool:
        return self._members.is_closed()

    def set_closed(self) -> None:
        self._members.close()

    def num_nodes_waiting(self) -> int:
        """How many machines want to join; more than 0 restarts the processes.

        Called ten times a second while they run.
        """
        num_waiting = 0
        reason = END
        try:
            if self._read_leavers() is not None:
                num_waiting = 1
            else:
                self._forward_request()
                num_waiting = self._count_waiting()
            reason = RESTART if num_waiting else ""
        finally:
            if reason:  # torch then gives the processes 30 s to end
                exit_codes.notify(self._exit_folder, reason)
                if read_announced_exit(self._exit_folder):
                    agent.await_processes()
        return num_waiting

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Close the rendezvous; the agent's last call.

        If processes have failed, the launcher ends without torch's traceback.
        """
        with suppress(DistError):  # the main machine may be gone by now
            self._members.stop()
            if self._is_leaving and self._min_machines < self._max_machines:
                self._members.set_state(LEFT, self._round)
            else:
                self._close_for_others()
        failure = sys.exception()
        if isinstance(failure, ChildFailedError):
            codes = [process.exitcode for process in failure.failures.values()]
            sys.exit(self._find_intended_code(codes) or 1)
        return True

    def _close_for_others(self) -> None:
        """Tell the other launchers that the run ends, unless their own processes tell them."""
        if self._is_cut_off or (self._is_leaving and read_announced_exit(self._exit_folder)):
            return
        self._members.close()

    def _find_intended_code(self, codes: Iterable[int]) -> int:
        """The launcher's exit code if processes that ended with `codes` did so on purpose; 0 if not."""
        announced = read_announced_exit(self._exit_folder)
        if announced:
            return announced.code
        # Asked to stop before they had installed their signal handlers.
        stopping_codes = {-number for number in STOPPING}
        if self._stop_reason and set(codes) <= stopping_codes:
            return RESUMABLE
        return 0

    def _report_failure(self, code: int, local_rank: int, process: int) -> None:
        if self._find_intended_code([code]):
            return
        if code < 0:
            end = f"was killed by {signal.Signals(-code).name}"
        else:
            end = f"failed with exit code {code}, see what it said"
        if code == -signal.SIGKILL:
            end += ": by a person, or by the system for want of memory (`dmesg` tells)"
        _log(f"process {process} (local rank {local_rank}) {end}")

    def _on_signal(self, number: int, frame) -> None:
        """Note that this machine is asked to leave.

        `_forward_request` tells its processes; if none run, it leaves at once.
        """
        if not self._stop_reason:
            self._stop_reason = exit_codes.get_signal_name(number)
        if self._is_joining and not self._is_leaving:
            self._leave("this machine leaves the run")

    def _forward_request(self) -> None:
        """Ask the processes to stop if this launcher was asked; kill them if they don't stop in time."""
        timeout = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))  # as torch
        if self._stop_reason and self._stop_time == math.inf:
            self._stop_time = time.monotonic()
            exit_codes.notify(self._exit_folder, self._stop_reason)
            agent.send_signal(signal.SIGTERM)
        elif time.monotonic() - self._stop_time > timeout:
            agent.send_signal(signal.SIGKILL)
            self._leave(f"its processes did not within {timeout:.0f} s, and were killed")

    def _read_leavers(self) -> list[int] | None:
        """The machines that leave, once the processes have agreed to stop, else None.

        They are indices into the machines of the round. Ends if this is one of them.
        """
        announced = read_announced_exit(self._exit_folder)
        if announced is None or announced.code != RESUMABLE:
            return None
        leavers = announced.leavers
        machines = self._round.machines
        if machines.index(self._members.machine_id) in leavers:
            if len(leavers) < len(machines):
                self._leave(
                    "this machine leaves, the others continue; the same command lets it join again"
                )
            if self._max_machines == 1:
                self._leave("")  # the machine's main process has printed it
            self._leave(
                "the run stops; the same command on all machines resumes from the last checkpoint"
            )
        return leavers

    def _prepare_round(self) -> None:
        """Prepare the next round after the last one's processes have ended, or end with their exit code."""
        leavers = self._read_leavers()
        announced = read_announced_exit(self._exit_folder)
        if leavers:
            left = {self._round.machines[index] for index in leavers}
            self._left |= left
            _log(f"continuing without {self._members.format_names(left)}: asked to stop")
        elif announced and announced.code != RESUMABLE:
            sys.exit(announced.code)
        if self._stop_reason:
            self._leave("this machine leaves the run")
        exit_codes.clear_messages(self._exit_folder)

    def _leave(self, message: str) -> NoReturn:
        """End only this launcher: the run continues without it, or resumes by the same command."""
        self._is_leaving = True
        if message:
            cause = f" by {self._stop_reason}" if self._stop_reason else ""
            _log(f"asked to stop{cause}: {message}")
        sys.exit(RESUMABLE)

    def _count_waiting(self) -> int:
        """How many machines a restart would let in; ends if a machine is lost that the run needs."""
        with self._explain_errors():
            present = self._members.read_present()
            members = set(self._round.machines)
            if self._members.read_round().number != self._round.number:
                return 1  # the others count this machine as lost
            lost = members - present.keys()
            if lost:
                if self._min_machines < self._max_machines:
                    return 1  # restart: the processes would wait for the lost machine's
                _give_up(
                    f"nothing is heard of {self._members.format_names(lost)} any more: see to it, "
                    "and start the command on all again"
                )
            waiting = _find_waiting(present)
            ready = [m for m in members & waiting if present[m].round == self._round.number]
            if ready:
                return len(ready)
            if len(members) < self._max_machines:
                return len(waiting - members)
            return 0

    def _await_announcement(self) -> None:
        """End as the processes of this machine intend to, if they soon announce it.

        All processes may end on purpose.
        """
        deadline = time.monotonic() + LATE_EXIT_S
        while not self._is_joining and self._read_leavers() is None and time.monotonic() < deadline:
            announced = read_announced_exit(self._exit_folder)
            if announced:
                sys.exit(announced.code)
            time.sleep(0.1)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """End the launcher with one line instead of an error of the rendezvous or its store."""
        try:
            yield
        except RendezvousClosedError:
            self._await_announcement()
            _give_up(
                "the launcher of another machine has given up, see what it said: start the "
                "command on all of them again"
            )
        except RendezvousStateError:
            self._is_cut_off = True
            _give_up(
                f"what lies in the store at {self._host}:{self._port} is not from a launcher of "
                "this run: see who else reaches that port (SECURITY.md), and start the command "
                "on all machines again"
            )
        except DistError:
            self._is_cut_off = True
            self._await_announcement()
            _give_up(
                f"the main machine at {self._host}:{self._port} is gone, or has ended, see what "
                "it said: start the command on all machines again, and the run resumes from its "
                "last checkpoint"
            )


def _find_waiting(present: dict[int, Record]) -> set[int]:
    """The machines that wait for the next round."""
    return {machine for machine, record in present.items() if record.state == WAITING}


def _parse_endpoint(text: str) -> tuple[str, int]:
    """Address and port of the first machine: from the flag, the environment, or of this machine alone."""
    try:
        return parse_rendezvous_endpoint(text or "localhost:0", 29500)  # 0: any free port
    except ValueError:
        # accelerate_configs/ has a sentence there, for a forgotten flag.
        sentence, _, port = text.rpartition(":")
        host = os.environ.get("MASTER_ADDR")
        if host:
            return host, int(os.environ.get("MASTER_PORT", port))
        _give_up(sentence)


def _find_own_address(host: str, max_machines: int) -> str:
    """The address by which the machines of the run reach this one, whose name or address is `host`."""
    if max_machines == 1:
        return network.LOOPBACK
    if network.is_loopback(host):
        return host
    local_address = network.find_address_towards(host)
    if not network.is_loopback(local_address):
        return host
    # On Debian, a machine's own name resolves to 127.0.1.1, only on that machine.
    addresses = network.list_outward_addresses()
    if len(addresses) != 1:
        choices = " or ".join(addresses) if addresses else "it has none yet"
        _give_up(
            f"this machine knows its own name {host} as {local_address}, where the others can't "
            f"reach it: give its address as a number on all machines ({choices})"
        )
    return addresses[0]


def _connect(host: str, port: int, timeout: float) -> tuple[TCPStore, bool]:
    """The store at `host`:`port`, and whether this process keeps it."""
    if network.is_own_address(host):
        with suppress(OSError):  # another launcher on this machine was first
            return network.host_store(host, port, ANSWER), True
    try:
        network.await_listener(host, port, timeout, _log)
    except Refused as refusal:
        _give_up(str(refusal))
    stores: list[TCPStore] = []
    # In a thread: TCPStore waits for ever for another program that does not answer.
    thread = threading.Thread(
        target=lambda: stores.append(TCPStore(host, port, timeout=ANSWER)), daemon=True
    )
    thread.start()
    thread.join(ANSWER.total_seconds())
    if not stores:
        _give_up(
            f"what listens on {host}:{port} is no launcher of these recipes: choose another port "
            "on all machines"
        )
    network.set_user_timeout(port, ANSWER)
    return stores[0], False


def _log(text: str) -> None:
    print(f"{socket.gethostname()}: {text}", file=sys.stderr, flush=True)


def _give_up(text: str) -> NoReturn:
    sys.exit(f"{socket.gethostname()}: {text}")
