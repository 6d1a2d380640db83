"""An ssh server on each machine of a test, with keys of its own that are thrown away, and the `ssh`
that finds them.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.harness.debian import require_package
from tests.harness.launching import Started
from tests.harness.machines import Node
from tests.harness.waiting import Limit

_SERVER = """
HostKey {home}/host_key
AuthorizedKeysFile {home}/user_key.pub
PidFile none
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
SetEnv HOME={home} OMP_NUM_THREADS=1 PYTHONFAULTHANDLER=1 PATH={path}
"""
_CLIENT = """
IdentityFile {home}/user_key
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


class Hosts:
    """Machines that run sshd. What `start` starts finds an `ssh` on its PATH that reaches them."""

    def __init__(self, nodes: Sequence[Node], home: Path) -> None:
        require_package("openssh-server")
        self.nodes = nodes
        self.home = home
        self._servers: dict[Node, subprocess.Popen] = {}
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd separates its privileges there
        self._path = os.pathsep.join(
            [str(home / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        )
        for name in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / name], check=True
            )
        (home / "sshd_config").write_text(_SERVER.format(home=home, path=self._path))
        (home / "ssh_config").write_text(_CLIENT.format(home=home))
        (home / "bin").mkdir()
        self.provide("ssh", f"/usr/bin/ssh -F {home}/ssh_config")
        for node in nodes:
            self.serve(node)

    def provide(self, name: str, command: str) -> None:
        """Let `name` be `command` for what is started on any of the machines."""
        program = self.home / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)

    def serve(self, node: Node) -> None:
        """Start sshd on a machine, and wait until it listens."""
        log = self.home / f"{node.name}.log"
        server = ["/usr/sbin/sshd", "-D", "-e", "-f", str(self.home / "sshd_config")]
        with log.open("w") as output:
            self._servers[node] = subprocess.Popen(
                node.before + server, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        for _ in Limit(30).turns(0.05):
            if "Server listening on 0.0.0.0" in log.read_text():
                return
        raise AssertionError(log.read_text())

    def start(self, node: Node, command: list, env: Mapping[str, str] | None = None) -> Started:
        """Start a command on a machine, from which `ssh` reaches the others, in a process group of
        its own.
        """
        # A shell lets what it starts in the background ignore it.
        argv = ["env", "--default-signal=INT"] + command
        return node.start_command(argv, env={"PATH": self._path} | (env or {}), process_group=0)

    def left_over(self) -> list[str]:
        """Command lines of what runs on the machines besides sshd."""
        command_lines = []
        for node, server in self._servers.items():
            command = ["ip", "netns", "pids", node.space]
            pids = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for pid in set(map(int, pids.split())) - {server.pid}:
                with contextlib.suppress(psutil.NoSuchProcess):
                    command_lines.append(f"{node.name}: {' '.join(psutil.Process(pid).cmdline())}")
        return command_lines

    def nothing_is_left(self) -> bool:
        """True if the machines soon run nothing but sshd."""
        return any(not self.left_over() for _ in Limit(30).turns(0.1))
