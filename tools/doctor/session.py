"""Session: one call of the doctor, from the launcher's variables to the table and the exit code."""

import argparse
import json
import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import NoReturn

from common.distributed.exit_codes import announce_exit
from common.durable import replace_file
from common.errors import Refused
from tools.doctor import meeting
from tools.doctor.checks import CHECKS, PLAN
from tools.doctor.examination import PRINTED_S, Examination
from tools.doctor.finding import Finding
from tools.doctor.table import as_json, fold, show
from tools.doctor.world import World, this_process


def examine(options: argparse.Namespace, environ: MutableMapping[str, str]) -> int:
    """Run the checks that `options` asks for; returns the exit code. Raises `Refused` for options that can't be met."""
    began = time.monotonic()
    only = {word.strip() for word in (options.only or "").split(",")} - {""}
    if unknown := only - {check.name for check in CHECKS} - {"network"}:
        raise Refused(f"--only {', '.join(sorted(unknown))}: take {', '.join(check.name for check in CHECKS)}")
    if options.recipe and not options.recipe.is_file():
        raise Refused(f"{options.recipe} is not there: give a recipe such as recipes/cls.py, then its flags")
    checks = PLAN if options.plan else [check for check in CHECKS if not only or check.name in only]
    world = this_process(environ, options.recipe, options.flags)
    session = Session(world, options, began)
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
        session.form_group()
    for check in group_checks:
        session.examination.run(check)
    return session.end()


class Session:
    """What ends in one table, whether all checks have run or one is stuck."""

    def __init__(self, world: World, options: argparse.Namespace, began: float) -> None:
        self.world, self.options, self.began = world, options, began
        self.examination = Examination(world, self._give_up)

    def form_group(self) -> None:
        """Form the process group; a row if that fails."""
        self.world.enter("network: process group")
        try:
            self.world.form_group()
        except Exception as error:
            self.examination.add(
                [Finding("network: process group", "failed", "not formed", " ".join(str(error).split()))]
            )

    def end(self) -> int:
        """Print the table, and return the exit code."""
        rows = self.examination.finish()
        store, code = self.world.store, 0
        # A process that has not met the others speaks for its machine.
        alone = store is None and self.world.world_size > 1
        if self.world.is_main or (alone and self.world.is_local_main):
            code = self._print(rows)
        if store is not None:
            if self.world.is_main:
                store.set("printed", str(code))
                _await_readers(self.world)
            else:
                code = _printed(self.world)
        elif alone:
            code = 1
        if code:
            announce_exit(code)
        return code

    def _print(self, rows: list[tuple[int, Finding]]) -> int:
        world, options = self.world, self.options
        hosts = world.hosts or [world.host] * world.world_size
        findings = fold(rows, hosts, [check.name for check in CHECKS])
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

    def _give_up(self) -> NoReturn:
        """End the process from another thread than the one that is stuck."""
        try:
            code = self.end()
        finally:
            sys.stdout.flush()
            os._exit(code or 1)


def _printed(world: World) -> int:
    """The exit code of rank 0, once it has printed."""
    until = time.monotonic() + PRINTED_S
    code = 1
    while time.monotonic() < until:
        try:
            if world.store.check(["printed"]):
                code = int(world.store.get("printed"))
                world.store.add("read", 1)
                break
        except RuntimeError:  # rank 0 has ended, and its store
            break
        time.sleep(0.05)
    return code


def _await_readers(world: World) -> None:
    """Keep the store open until the others have read the exit code."""
    others = sum(1 for host in world.hosts[1:] if host)
    until = time.monotonic() + PRINTED_S
    while world.store.add("read", 0) < others and time.monotonic() < until:
        time.sleep(0.02)
