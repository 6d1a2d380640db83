"""Session: one call of the doctor, from the launcher's variables to the table and the exit code."""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import NoReturn

from torch.distributed import Store

from common.distributed.exit_codes import announce_exit
from common.distributed.launch import share_cores
from common.distributed.launchers import meeting_file
from common.distributed.meeting import choose_interface
from common.durable import replace_file
from common.errors import Refused
from tools.doctor import meeting
from tools.doctor.checks import CHECKS, PLAN
from tools.doctor.examination import PRINTED_S, Check, Examination
from tools.doctor.finding import Finding
from tools.doctor.table import as_json, fold, show
from tools.doctor.world import World, this_process

WORDS = [*dict.fromkeys(check.word for check in CHECKS)]


def examine(options: argparse.Namespace, environ: MutableMapping[str, str]) -> int:
    """Run the checks that `options` asks for; returns the exit code. Raises `Refused` for options that can't be met."""
    began = time.monotonic()
    only = {word.strip() for word in (options.only or "").split(",")} - {""}
    if unknown := only - {*WORDS}:
        raise Refused(f"--only {', '.join(sorted(unknown))}: take {', '.join(WORDS)}")
    if options.recipe and not options.recipe.is_file():
        raise Refused(f"{options.recipe} is not there: give a recipe such as recipes/cls.py, then its flags")
    checks = PLAN if options.plan else [check for check in CHECKS if not only or check.word in only]
    world = this_process(environ, options.recipe, options.flags)
    session = Session(world, options, began)
    if world.device.type == "cpu":
        share_cores(environ, world.launch)  # as the recipes do
    if world.world_size > 1 and not meeting_file(environ):
        with contextlib.suppress(Refused):  # `meet` reports it
            choose_interface(environ)
    for check in checks:
        if check.needs == "machine":
            session.examination.run(check)
    world.enter("network: meeting")
    session.examination.add(meeting.meet(world, environ, options.wait))
    for check in checks:
        if check.needs == "store":
            session.examination.run(check)
    group_checks = [check for check in checks if check.needs == "group"]
    if group_checks and world.is_met:
        session.examination.run(Check("network: process group", form_group, "store", limit=20.0))
    for check in group_checks:
        session.examination.run(check)
    return session.end()


def form_group(world: World) -> list[Finding]:
    """Form torch's process group; no row if that works."""
    world.form_group()
    return []


class Session:
    """What ends in one table, whether all checks have run or one is stuck."""

    def __init__(self, world: World, options: argparse.Namespace, began: float) -> None:
        self.world, self.options, self.began = world, options, began
        self.examination = Examination(world, self._give_up)
        self._ending = threading.Lock()
        threading.Thread(target=self._await_end, args=(_signalled(),), daemon=True).start()

    def end(self) -> int:
        """Print the table, and return the exit code. Whoever calls it second waits for ever: the process ends."""
        self._ending.acquire()
        rows = self.examination.finish()
        store, code = self.world.store, 0
        # A process that has not met the others speaks for its machine.
        alone = store is None and self.world.world_size > 1
        if self.world.is_main or (alone and self.world.is_local_main):
            code = self._print(rows)
        if store is not None:
            if self.world.is_main:
                store.set("printed", str(code))
                _await_readers(store, len(self.examination.answered - {0}))
            else:
                code = _printed(store)
        elif alone:
            code = 1
        if code:
            announce_exit(code)
        return code

    def _print(self, rows: list[tuple[int, Finding]]) -> int:
        world, options = self.world, self.options
        hosts = world.hosts or [world.host] * world.world_size
        findings = fold(rows, hosts, WORDS)
        seconds = round(time.monotonic() - self.began, 1)
        if options.json:
            about = {"processes": world.world_size, "hosts": hosts, "seconds": seconds}
            about["seconds_of_checks"] = self.examination.seconds
            text = json.dumps(as_json(findings, about), indent=2)
            if options.json == "-":
                print(text, flush=True)
            else:
                replace_file(Path(options.json), f"{text}\n".encode())
        if options.json != "-":
            print(show(findings, sys.stdout.isatty()), f"({seconds:.0f} s)", flush=True)
            for command in [finding.figures["command"] for finding in findings if "command" in finding.figures]:
                print(f"\n{command}", flush=True)
        return int(any(finding.status == "failed" for finding in findings))

    def _await_end(self, pipe: int) -> None:
        """The launcher ends the processes (SIGTERM) when one has died: show what was found so far."""
        while os.read(pipe, 1) != bytes([signal.SIGTERM]):
            pass
        self._give_up()

    def _give_up(self) -> NoReturn:
        """End the process from another thread than the one that is stuck."""
        code = 1
        try:
            code = self.end()
        finally:
            sys.stdout.flush()
            os._exit(code or 1)


def _signalled() -> int:
    """A pipe from which each signal can be read as a byte, also while the main thread waits in a collective."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writing)
    return reading


def _printed(store: Store) -> int:
    """The exit code of rank 0, once it has printed."""
    until = time.monotonic() + PRINTED_S
    code = 1
    while time.monotonic() < until:
        try:
            if store.check(["printed"]):
                code = int(store.get("printed"))
                store.add("read", 1)
                break
        except RuntimeError:  # rank 0 has ended, and its store
            break
        time.sleep(0.05)
    return code


def _await_readers(store: Store, others: int) -> None:
    """Keep the store open until the others have read the exit code."""
    until = time.monotonic() + PRINTED_S
    while store.add("read", 0) < others and time.monotonic() < until:
        time.sleep(0.02)
