"""Rendezvous `machines`: the launchers of a run find each other, start together, and handle lost
and leaving machines.

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
from common.launching.membership import LEFT, RUNNING, WAITING, Membership, Round

JOIN_S = 300  # how long a machine waits for the others
LAST_CALL_S = 5  # how much longer the first round waits for machines beyond `at_least`
BEAT_S = 5  # a machine renews its record so often
SILENCE_S = 60  # a machine counts as lost if it has not done so for this time
ELASTIC_SILENCE_S = 15  # the same if the others then continue without it
POLL_S = 0.1
ANSWER = timedelta(seconds=30)  # if the main machine does not answer for so long, it counts as gone
LATE_EXIT_S = 3.0  # after another launcher's end, for processes that end on purpose, too


def create(parameters: RendezvousParameters) -> "Machines":
    """Connect to the machine that the endpoint names, or be that machine. Ends the launcher with
    one line if it can't.
    """
    agent.silence_name_lookups()
    host, port = _endpoint(parameters.endpoint)
    if network.is_own_address(host):
        host = _own_address(host, parameters.max_nodes)
    store, hosting = _reach(host, port, float(parameters.get("join_timeout", JOIN_S)))
    return Machines(parameters, store, host, port, hosting)


class Machines(RendezvousHandler):
    """The rendezvous handler that torchrun's agent uses, one on each machine. `hosting`: this
    machine keeps the store.
    """

    def __init__(
        self, parameters: RendezvousParameters, store: TCPStore, host: str, port: int, hosting: bool
    ) -> None:
        self._host, self._port, self._hosting, self._run_id = host, port, hosting, parameters.run_id

        def given(name: str, default: int) -> int:
            return int(parameters.get(name, default))

        self._least, self._most = given("at_least", parameters.min_nodes), parameters.max_nodes
        size = f"{self._least}:{self._most}"
        if (others := store.compare_set("machines/size", "", size).decode()) != size:
            _give_up(
                f"launched for {size} machines (least:most), but {host}:{port} is asked for "
                f"{others}: give all the same"
            )
        self._patience, self._last_call = (
            given("join_timeout", JOIN_S),
            given("last_call_timeout", LAST_CALL_S),
        )
        interval = given("keep_alive_interval", BEAT_S)
        silence = SILENCE_S if self._least == self._most else ELASTIC_SILENCE_S
        silence = interval * given("keep_alive_max_attempt", silence // BEAT_S)
        self._store = PrefixStore(f"machines/{self._run_id}", store)
        self._team = Membership(
            self._store, socket.gethostname(), network.find_address_towards(host), interval, silence
        )
        self._round = Round()  # the last one that this machine took part in
        self._gone: set[int] = set()  # those that have announced that they leave
        self._asked, self._asked_since, self._leaving, self._joining = "", math.inf, False, False
        self._cut_off = False
        self._exits = Path(tempfile.mkdtemp(prefix="recipe_exits_"))
        atexit.register(shutil.rmtree, self._exits, ignore_errors=True)
        # The processes inherit these.
        os.environ |= {
            exit_codes.EXIT_FOLDER: str(self._exits),
            exit_codes.MIN_MACHINES: str(self._least),
        }
        agent.handle_signals(self._on_signal)
        agent.replace_log(self._report_failure)

    def get_backend(self) -> str:
        return "machines"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other machines, and agree with them on the order of machines."""
        with self._in_words():
            self._joining = True
            self._begin_round()
            self._team.become(WAITING, self._round)
            self._await_round()
            self._team.become(RUNNING, self._round)
            self._joining = False
            rank = self._round.machines.index(self._team.number)
            # A connection of its own: torch's agent may wait in it, and records must still be
            # renewed.
            store = PrefixStore(f"round {self._round.number}", self._store.clone())
            if not self._hosting:
                network.set_user_timeout(self._port, ANSWER)
            # The first machine, which keeps the store, tells the others where its processes listen.
            place = RendezvousStoreInfo.build(rank, store, network.find_address_towards(self._host))
            return RendezvousInfo(store, rank, len(self._round.machines), place)

    def _await_round(self) -> None:
        """Return when a round has begun that this machine takes part in. The main machine begins it."""
        began = arrived = time.monotonic()
        due, here = began + network.QUIET_S, set[int]()  # the machines that wait for the next round
        while True:
            present, now = self._team.present(), time.monotonic()
            if here != (
                waiting := {number for number, record in present.items() if record.state == WAITING}
            ):
                here, arrived = waiting, now
            if self._hosting and self._may_begin(here, present.keys() - here, now - arrived):
                machines = [self._team.number, *sorted(here - {self._team.number})][: self._most]
                self._team.begin(Round(self._round.number + 1, machines))
            last = self._team.round()
            if last.number != self._round.number and self._team.number in last.machines:
                self._round = last
                return
            if now - began > self._patience:
                lost = {*self._round.machines} - here
                _give_up(
                    f"{len(here)} of {self._least} machines came within {self._patience} s: "
                    f"{self._team.names(here)}"
                    + (f"; {self._team.names(lost)} did not come back" if lost else "")
                    + f". Start the command on the others, with the address {self._host}:{self._port}"
                )
            if now > due:
                others = {*last.machines} & present.keys() - here
                doing = (
                    "train without this one, which waits"
                    if others
                    else f"of {self._least} are here"
                )
                names = self._team.names(others or here)
                _say(f"{len(others or here)} machines {doing}, up to {self._patience} s: {names}")
                due = math.inf
            time.sleep(POLL_S)

    def _may_begin(self, here: set[int], others: set[int], unchanged_for: float) -> bool:
        """True if a round begins with the machines that are here, which have been the same for
        `unchanged_for` seconds.
        """
        if self._team.number not in here or len(here) < self._least:
            return False
        ending = {*self._round.machines} & others - self._gone  # their processes still run
        is_called = self._round.number > 0 or unchanged_for >= self._last_call
        return len(here) >= self._most or (not ending and is_called)

    def is_closed(self) -> bool:
        return self._team.is_closed()

    def set_closed(self) -> None:
        self._team.close()

    def num_nodes_waiting(self) -> int:
        """How many machines want to join; more than 0 restarts the processes. Called ten times a
        second while they run.
        """
        waiting, why = 0, END
        try:
            if self._leavers() is not None:
                waiting = 1
            else:
                self._forward_request()
                waiting = self._waiting()
            why = RESTART if waiting else ""
        finally:
            if why:  # torch then gives the processes 30 s to end
                exit_codes.notify(self._exits, why)
                if read_announced_exit(self._exits):
                    agent.await_processes()
        return waiting

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Close the rendezvous; the agent's last call. If processes have failed, ends without
        torch's traceback.
        """
        with suppress(DistError):  # the main machine may be gone by now
            self._team.end()
            if self._leaving and self._least < self._most:
                self._team.become(LEFT, self._round)
            # Otherwise the others are told, unless they learn it from their own processes.
            elif not self._cut_off and not (self._leaving and read_announced_exit(self._exits)):
                self._team.close()
        if isinstance(failed := sys.exception(), ChildFailedError):
            sys.exit(
                self._on_purpose(failure.exitcode for failure in failed.failures.values()) or 1
            )
        return True

    def _on_purpose(self, codes: Iterable[int]) -> int:
        """The launcher's exit code if processes that ended with `codes` did so on purpose; 0 if
        they did not.
        """
        if announced := read_announced_exit(self._exits):
            return announced[0]
        # Asked to stop before they had installed their signal handlers.
        return RESUMABLE if self._asked and {*codes} <= {-number for number in STOPPING} else 0

    def _report_failure(self, code: int, local_rank: int, process: int) -> None:
        if self._on_purpose([code]):
            return
        how = f"failed with exit code {code}, see what it said"
        if code < 0:
            by = ": by a person, or by the system for want of memory (`dmesg` tells)" * (
                code == -signal.SIGKILL
            )
            how = f"was killed by {signal.Signals(-code).name}{by}"
        _say(f"process {process} (local rank {local_rank}) {how}")

    def _on_signal(self, number: int, frame) -> None:
        """This machine is asked to leave. `_forward_request` tells its processes; if none run, it
        leaves at once.
        """
        self._asked = self._asked or exit_codes.get_signal_name(number)
        if self._joining and not self._leaving:
            self._leave("this machine leaves the run")

    def _forward_request(self) -> None:
        """Ask the processes to stop if this launcher was asked; kill them if they don't stop in time."""
        patience = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))  # as torch
        if self._asked and self._asked_since == math.inf:
            self._asked_since = time.monotonic()
            exit_codes.notify(self._exits, self._asked)
            agent.send_signal(signal.SIGTERM)
        elif time.monotonic() - self._asked_since > patience:
            agent.send_signal(signal.SIGKILL)
            self._leave(f"its processes did not within {patience:.0f} s, and were killed")

    def _leavers(self) -> list[int] | None:
        """The machines that leave, once the processes have agreed to stop, else None. Ends if this
        is one of them.
        """
        code, leavers = read_announced_exit(self._exits) or (0, [])
        if code != RESUMABLE:
            return None
        if self._round.machines.index(self._team.number) in leavers:
            if len(leavers) == len(self._round.machines):
                again = (
                    "the run stops; the same command on all machines resumes from the last "
                    "checkpoint"
                )
                # One machine's main process has printed it.
                self._leave(again if self._most > 1 else "")
            self._leave(
                "this machine leaves, the others continue; the same command lets it join again"
            )
        return leavers

    def _begin_round(self) -> None:
        """Prepare the next round after the last one's processes have ended, or end with their exit code."""
        if gone := {self._round.machines[number] for number in self._leavers() or ()}:
            self._gone |= gone
            _say(f"continuing without {self._team.names(gone)}: asked to stop")
        elif (announced := read_announced_exit(self._exits)) and announced[0] != RESUMABLE:
            sys.exit(announced[0])
        if self._asked:
            self._leave("this machine leaves the run")
        exit_codes.clear_messages(self._exits)

    def _leave(self, what: str) -> NoReturn:
        """End only this launcher: the run continues without it, or resumes by the same command."""
        self._leaving = True
        if what:
            _say(f"asked to stop{self._asked and ' by ' + self._asked}: {what}")
        sys.exit(RESUMABLE)

    def _waiting(self) -> int:
        with self._in_words():
            present, members = self._team.present(), {*self._round.machines}
            if self._team.round().number != self._round.number:
                return 1  # the others count this machine as lost
            if lost := members - present.keys():
                if self._least < self._most:
                    return 1  # restart: the processes would wait for the lost machine's
                _give_up(
                    f"nothing is heard of {self._team.names(lost)} any more: see to it, and start "
                    "the command on all again"
                )
            waiting = {number for number, record in present.items() if record.state == WAITING}
            again = {
                number
                for number in members & waiting
                if present[number].round == self._round.number
            }
            return len(again) or (len(members) < self._most and len(waiting - members))

    def _await_announcement(self) -> None:
        """End as the processes of this machine intend to, if they soon announce it: all processes
        may end on purpose.
        """
        until = time.monotonic() + LATE_EXIT_S
        while not self._joining and self._leavers() is None and time.monotonic() < until:
            if announced := read_announced_exit(self._exits):
                sys.exit(announced[0])
            time.sleep(0.1)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except RendezvousClosedError:
            self._await_announcement()
            _give_up(
                "the launcher of another machine has given up, see what it said: start the "
                "command on all of them again"
            )
        except RendezvousStateError:
            self._cut_off = True
            _give_up(
                f"what lies in the store at {self._host}:{self._port} is not from a launcher of "
                "this run: see who else reaches that port (SECURITY.md), and start the command "
                "on all machines again"
            )
        except DistError:
            self._cut_off = True
            self._await_announcement()
            _give_up(
                f"the main machine at {self._host}:{self._port} is gone, or has ended, see what "
                "it said: start the command on all machines again, and the run resumes from its "
                "last checkpoint"
            )


def _endpoint(text: str) -> tuple[str, int]:
    """Address and port of the first machine, from the flag, else from the environment, else of this
    machine alone.
    """
    try:
        return parse_rendezvous_endpoint(text or "localhost:0", 29500)  # 0: any free port
    except ValueError:
        # accelerate_configs/ has a sentence there, for a forgotten flag.
        sentence, _, port = text.rpartition(":")
        if host := os.environ.get("MASTER_ADDR"):
            return host, int(os.environ.get("MASTER_PORT", port))
        _give_up(sentence)


def _own_address(host: str, most: int) -> str:
    """The address by which the up to `most` machines of the run reach this machine, whose name or
    address is `host`.
    """
    if most == 1:
        return network.LOOPBACK
    if network.is_loopback(host) or not network.is_loopback(
        known_as := network.find_address_towards(host)
    ):
        return host
    # On Debian, a machine's own name resolves to 127.0.1.1, only on that machine.
    addresses = network.list_outward_addresses()
    if len(addresses) != 1:
        _give_up(
            f"this machine knows its own name {host} as {known_as}, where the others can't reach "
            "it: give its address as a number on all machines "
            f"({' or '.join(addresses) or 'it has none yet'})"
        )
    return addresses[0]


def _reach(host: str, port: int, patience: float) -> tuple[TCPStore, bool]:
    """The store at `host`:`port`, and whether this process keeps it."""
    if network.is_own_address(host):
        with suppress(OSError):  # another launcher on this machine was first
            return network.host_store(host, port, ANSWER), True
    try:
        network.await_listener(host, port, patience, _say)
    except Refused as refusal:
        _give_up(str(refusal))
    found: list[TCPStore] = []
    # In a thread: TCPStore waits for ever for another program that does not answer.
    joining = threading.Thread(
        target=lambda: found.append(TCPStore(host, port, timeout=ANSWER)), daemon=True
    )
    joining.start()
    joining.join(ANSWER.total_seconds())
    if not found:
        _give_up(
            f"what listens on {host}:{port} is no launcher of these recipes: choose another port "
            "on all machines"
        )
    network.set_user_timeout(port, ANSWER)
    return found[0], False


def _say(text: str) -> None:
    print(f"{socket.gethostname()}: {text}", file=sys.stderr, flush=True)


def _give_up(text: str) -> NoReturn:
    sys.exit(f"{socket.gethostname()}: {text}")
