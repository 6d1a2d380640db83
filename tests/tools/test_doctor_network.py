"""The doctor finds what is wrong between machines and on one of them; each trouble is provoked on network namespaces.

Why a meeting fails is said by `reach`: tests/launching/test_network.py.
"""

import json
import subprocess
from collections.abc import Callable

from tests.harness.debian import require_package
from tests.harness.launching import ROOT, Launcher
from tests.harness.machines import Node
from tests.tools.test_doctor import exported, rows_of

PORT = 20500  # below those that the system chooses
# All but the rehearsal, which needs machines that are well.
ONLY = ["--only", "launch,limits,gpu,network,versions,data"]
# Another package.
SICK = f"""
import os, sys
sys.path[:0] = [os.path.join(os.path.dirname(__file__), "packages"), {str(ROOT)!r}]
from tools.doctor.__main__ import main
main()
"""


def run(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True, capture_output=True, text=True)


def summary(rows: dict[tuple[str, str], dict], status: str) -> dict[str, str]:
    """Place and text of the rows of a status, by check."""
    return {check: f"{place}: {row['measured']}" for (check, place), row in rows.items() if row["status"] == status}


def test_a_sick_machine_is_named_with_each_of_its_troubles(nodes: Callable[..., list[Node]], tmp_path) -> None:
    runs, theirs = tmp_path / "runs", tmp_path / "their_runs"
    for folder in (runs, theirs):
        (folder / "a").mkdir(parents=True)
    well, sick = nodes(2, own={1: {runs: theirs}})
    of_recipe = ["recipes/cls.py", "--output_dir", runs]
    record = tmp_path / "packages" / "timm-0.9.0.dist-info" / "METADATA"
    record.parent.mkdir(parents=True)
    record.write_text("Metadata-Version: 2.1\nName: timm\nVersion: 0.9.0\n")
    script, file = tmp_path / "sick.py", tmp_path / "found.json"
    script.write_text(SICK)
    run("ip", "-n", sick.space, "link", "set", "eth0", "mtu", 1400)
    slow = "root tbf rate 300mbit burst 256kb latency 50ms".split()
    run("tc", "-n", sick.space, "qdisc", "add", "dev", "eth0", *slow)
    inside = 'ulimit -n 200 && mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
    started = [
        well.start_python(
            *("-m", "tools.doctor", *ONLY, "--json", file, *of_recipe), env=exported(0, 2, PORT, well.address)
        ),
        Launcher(tmp_path, [*sick.before, "sh", "-c", inside, "sh"]).start_python(
            *(script, *ONLY, *of_recipe), env=exported(1, 2, PORT, well.address)
        ),
    ]
    done = [each.finish() for each in started]
    assert [each.returncode for each in done] == [1, 1], done[0].stdout + done[0].stderr + done[1].stderr
    rows = rows_of(file)
    failed, warned, good = (summary(rows, status) for status in ("failed", "warning", "ok"))
    assert failed == {
        "limits: /dev/shm": "node1: 1 of 1 MiB free",
        "versions: packages": failed["versions: packages"],
    }
    assert warned["data: run folder"].startswith("all: ") and "node1" in rows["data: run folder", "all"]["way_out"]
    assert [*runs.iterdir()] == [runs / "a"] and [*theirs.iterdir()] == [theirs / "a"], "left as they were"
    assert failed["versions: packages"].startswith("node1: timm 0.9.0 instead of ")
    assert warned["network: MTU"] == "node1: MTU 1400 instead of 1500"
    assert warned["limits: open files"].startswith("node1: 200 ")
    links = [row for row in json.loads(file.read_text())["findings"] if row["check"] == "network: between"]
    # A busy machine has another such row, on latency.
    (link,) = [row for row in links if row["way_out"].startswith("less than 2 Gbit/s")]
    assert link["status"] == "warning"
    assert 0.1 < link["figures"]["all-reduce"][-1]["gbit"] < 0.33  # of the link's 0.3
    # What is well is not blamed.
    assert good["network: ports"] == "all: 4 system-chosen ports open between all machines, both ways"
    assert rows["network: interfaces", "node1"]["measured"] == "eth0 (10.77.0.2, 10 Gbit/s, MTU 1400)"
    assert rows["limits: /dev/shm", "node0"]["status"] == "ok" and "limits: cores" not in failed | warned


def test_a_firewall_is_named_where_the_run_would_wait(nodes: Callable[..., list[Node]], tmp_path) -> None:
    require_package("nftables")
    first, walled = nodes(2)
    rules = ["add table inet t", "add chain inet t in { type filter hook input priority 0; }"]
    rules.append("add rule inet t in tcp flags & (syn|ack) == syn tcp dport 30000-65535 drop")
    for rule in rules:
        run("ip", "netns", "exec", walled.space, "nft", rule)
    file = tmp_path / "found.json"
    words = ["-m", "tools.doctor", *ONLY, "--json", file]
    started = [
        node.start_python(*words, env=exported(rank, 2, PORT, first.address))
        for rank, node in enumerate((first, walled))
    ]
    done = [each.finish() for each in started]
    assert [each.returncode for each in done] == [1, 1], done[0].stdout + done[0].stderr
    rows = rows_of(file)
    assert [key for key, row in rows.items() if row["status"] == "failed"] == [("network: ports", "all")]
    assert rows["network: ports", "all"]["measured"].startswith(
        "node0 -> node1 (10.77.0.2): 4 of 4 ports filtered (no answer), such as "
    )
    assert rows["network: ports", "all"]["way_out"].startswith("firewall: ")
    assert rows["network: bandwidth", "all"]["status"] == "not run"
    assert done[0].stdout.count("-> firewall: ") == 1 and not done[1].stdout  # one table for both
