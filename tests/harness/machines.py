"""Several machines, as network namespaces of this one, joined by a bridge; they take root and iproute2."""

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.harness.interrupted import Watched as Watched
from tests.harness.launching import Launcher

_CAPTURED = {"check": True, "capture_output": True, "text": True}


class Node(Launcher):
    """A machine with a network, a name and a hosts file, and on the paths in `own_files` its own files.

    It shares all other files, the processes and the clock with this machine.
    """

    def __init__(
        self, space: str, number: int, home: Path, hosts: Path, own_files: Mapping[Path, Path]
    ) -> None:
        self.space = space
        self.name = f"node{number}"
        self.address = f"10.77.0.{number + 1}"
        mounts = {hosts: "/etc/hosts"} | {target: source for source, target in own_files.items()}
        steps = [f"hostname {self.name}"]
        for source, target in mounts.items():
            steps.append(shlex.join(["mount", "--bind", str(source), str(target)]))
        inside = [
            "unshare",
            "--mount",
            "--uts",
            "sh",
            "-c",
            " && ".join(steps + ['exec "$@"']),
            "sh",
        ]
        super().__init__(home, ["ip", "netns", "exec", space] + inside)

    def kill(self) -> None:
        """SIGKILL all that runs on it, at once: the machine is lost."""
        # One may start another in the meantime.
        while processes := _run_ip("netns", "pids", self.space).split():
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)

    def send_into_silence(self, address: str) -> None:
        """Let what this machine sends to `address` get no answer, not even that nobody is there: as
        behind a firewall.
        """
        _run_ip(
            "-n",
            self.space,
            "neighbour",
            "add",
            address,
            "lladdr",
            "02:00:00:00:00:01",
            "dev",
            "eth0",
        )

    def listeners(self) -> list[tuple[str, int, str]]:
        """What waits for others on it, by TCP or UDP: address, port and process."""
        table = subprocess.run(
            ["ip", "netns", "exec", self.space, "ss", "-Hltunp"], **_CAPTURED
        ).stdout
        rows = [line.split(maxsplit=6) for line in table.splitlines()]
        return [(row[4].rpartition(":")[0], int(row[4].rpartition(":")[2]), row[6]) for row in rows]

    def unplug(self) -> None:
        """Take its cable out: the others hear nothing more of it, not even an end."""
        _run_ip("-n", self.space, "link", "set", "eth0", "down")


@contextlib.contextmanager
def machines(
    count: int,
    home: Path,
    own_files: Mapping[int, Mapping[Path, Path]] | None = None,
    *,
    names_are_loopback: bool = True,
) -> Iterator[list[Node]]:
    """`count` machines that reach each other; as on Debian, each knows its own name as a loopback
    address, unless told not to.

    `own_files` gives machine number -> path -> what stands there on this machine alone. Afterwards all
    they ran is killed.
    """
    switch = f"recipes-{os.getpid()}"
    spaces = [f"{switch}-{number}" for number in range(count)]
    nodes = []
    try:
        for space in [switch] + spaces:
            _run_ip("netns", "add", space)
        _run_ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _run_ip("-n", switch, "link", "set", "bridge", "up")
        for number, space in enumerate(spaces):
            hosts = home / f"hosts{number}"
            addresses = {f"node{index}": f"10.77.0.{index + 1}" for index in range(count)}
            if names_are_loopback:
                addresses[f"node{number}"] = "127.0.1.1"
            addresses_by_name = {"localhost": "127.0.0.1"} | addresses
            hosts.write_text(
                "".join(f"{address} {name}\n" for name, address in addresses_by_name.items())
            )
            node = Node(space, number, home, hosts, (own_files or {}).get(number, {}))
            nodes.append(node)
            port = f"port{number}"
            _run_ip(
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space,
            )
            _run_ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _run_ip("-n", space, "address", "add", f"{node.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run_ip("-n", space, "link", "set", link, "up")
        yield nodes
    finally:
        for node in nodes:
            node.kill()
        existing = {line.split()[0] for line in _run_ip("netns", "list").splitlines()}
        for space in [switch] + spaces:
            if space in existing:
                _run_ip("netns", "delete", space)


def require_namespaces(home: Path) -> None:
    """Skip a test where network namespaces can't be made; in CI, where they must, fail it."""
    try:
        with machines(1, home) as nodes:
            subprocess.run(nodes[0].before + ["true"], **_CAPTURED)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip()
        reason = f"network namespaces can't be made here: {why}; they take root and iproute2"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def _run_ip(*args: str) -> str:
    return subprocess.run(["ip", *args], **_CAPTURED).stdout
