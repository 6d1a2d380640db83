"""The doctor finds what is wrong between machines and on one of them; each trouble is provoked on
network namespaces.

Why a meeting fails is said by `reach`: tests/launching/test_network.py.
"""

import json
import re
import subprocess
from collections.abc import Callable

from tests.harness.debian import require_package
from tests.harness.machines import Node
from tests.tools.test_doctor import build_environment, read_findings

PORT = 20500  # below those that the system chooses
# All but the rehearsal, which needs machines that are well.
ONLY = ["--only", "launch,network"]


def run(*argv: object) -> None:
    subprocess.run(list(map(str, argv)), check=True, capture_output=True, text=True)


def read_summary(rows: dict[tuple[str, str], dict], status: str) -> dict[str, str]:
    """Place and text of the rows of a status, by check."""
    return {
        check: f"{location}: {row['measured']}"
        for (check, location), row in rows.items()
        if row["status"] == status
    }


def test_a_slow_link_and_an_odd_mtu_are_named(nodes: Callable[..., list[Node]], tmp_path) -> None:
    well, sick = nodes(2)
    file = tmp_path / "found.json"
    run("ip", "-n", sick.space, "link", "set", "eth0", "mtu", 1400)
    slow = "root tbf rate 300mbit burst 256kb latency 50ms".split()
    run("tc", "-n", sick.space, "qdisc", "add", "dev", "eth0", *slow)
    argv = ["-m", "tools.doctor"] + ONLY + ["--json", file]
    started = [
        node.start_python(argv, env=build_environment(rank, 2, PORT, well.address))
        for rank, node in enumerate((well, sick))
    ]
    done = [each.finish() for each in started]
    assert [each.returncode for each in done] == [0, 0], (
        done[0].stdout + done[0].stderr + done[1].stderr
    )
    rows = read_findings(file)
    failed, warned, good = (read_summary(rows, status) for status in ("failed", "warning", "ok"))
    assert not failed and warned["network: MTU"] == "node1: MTU 1400 instead of 1500"
    links = [
        row
        for row in json.loads(file.read_text())["findings"]
        if row["check"] == "network: between"
    ]
    # A busy machine has another such row, on latency.
    (link,) = [row for row in links if row["way_out"].startswith("less than 2 Gbit/s")]
    assert link["status"] == "warning"
    assert 0.1 < link["figures"]["all-reduce"][-1]["gbit"] < 0.33  # of the link's 0.3
    # What is well is not blamed.
    assert (
        good["network: ports"] == "all: 4 system-chosen ports open between all machines, both ways"
    )
    assert (
        rows["network: interfaces", "node1"]["measured"] == "eth0 (10.77.0.2, 10 Gbit/s, MTU 1400)"
    )


def test_a_firewall_is_named_where_the_run_would_wait(
    nodes: Callable[..., list[Node]], tmp_path
) -> None:
    require_package("nftables")
    first, walled = nodes(2)
    rules = ["add table inet t", "add chain inet t in { type filter hook input priority 0; }"]
    rules.append("add rule inet t in tcp flags & (syn|ack) == syn tcp dport 30000-65535 drop")
    for rule in rules:
        run("ip", "netns", "exec", walled.space, "nft", rule)
    file = tmp_path / "found.json"
    argv = ["-m", "tools.doctor"] + ONLY + ["--json", file]
    started = [
        node.start_python(argv, env=build_environment(rank, 2, PORT, first.address))
        for rank, node in enumerate((first, walled))
    ]
    done = [each.finish() for each in started]
    assert [each.returncode for each in done] == [1, 1], done[0].stdout + done[0].stderr
    rows = read_findings(file)
    assert [key for key, row in rows.items() if row["status"] == "failed"] == [
        ("network: ports", "all")
    ]
    assert re.fullmatch(
        r"node0 -> node1: port \d+ of 10.77.0.2: timed out",
        rows["network: ports", "all"]["measured"],
    )
    assert rows["network: ports", "all"]["way_out"].startswith("firewall: ")
    assert rows["network: bandwidth", "all"]["status"] == "not run"
    assert done[0].stdout.count("-> firewall: ") == 1 and not done[1].stdout  # one table for both
