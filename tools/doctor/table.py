"""Table: what the checks found, rows of all ranks folded into rows of the run, and shown for a person."""

import textwrap
from collections import Counter
from dataclasses import dataclass, field, replace
from operator import attrgetter

from common.distributed.collectives import join_first

WIDTH = 100
INDENT = " " * 32  # of the column of measured values
MAX_OK_ROWS = 4  # of one check


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    `check` is a name such as "network: ports", `status` is ok, warning, failed or not run.
    `measured` says the value with its unit. `way_out` is empty if all is well, else the cause and
    what to do, in one line. `place` is what the row is about: "all", "rank 3 (b)", a machine, or ""
    for the rank that says it. `figures` are the numbers behind it, for --json.
    """

    check: str
    status: str
    measured: str
    way_out: str = ""
    place: str = ""
    figures: dict = field(default_factory=dict, compare=False)


def judge(
    check: str, measured: str, is_trouble: bool, way_out: str, status: str = "warning", **fields
) -> Finding:
    """A row with this status and way out if there `is_trouble`, else ok.

    `fields` are the others of `Finding`.
    """
    if not is_trouble:
        return Finding(check, "ok", measured, **fields)
    return Finding(check, status, measured, way_out, **fields)


def fold(findings_by_rank: dict[int, list[Finding]], hosts: list[str]) -> list[Finding]:
    """Fold the rows of all ranks into rows of the run, sorted by check.

    Equal rows become one, with the ranks or machines that say it. `hosts` has the machine of each rank.

    Two ranks on a and b, both Finding("cores", "ok", "8") -> one row, place "all". Rank 0 on a
    Finding("cores", "ok", "8"), rank 1 on b "4" -> rows "8" with place "a" and "4" with place "b".
    """
    ranks_by_finding: dict[Finding, list[int]] = {}
    for rank, findings in findings_by_rank.items():
        for finding in findings:
            ranks_by_finding.setdefault(finding, []).append(rank)
    folded = []
    for finding, ranks in ranks_by_finding.items():
        place = "all" if len(ranks) == len(findings_by_rank) else name_ranks(ranks, hosts)
        folded.append(replace(finding, place=finding.place or place))
    return sorted(folded, key=attrgetter("check"))


def name_ranks(ranks: list[int], hosts: list[str]) -> str:
    """Names for `ranks`: their machines, if these have no other ranks; else rank by rank."""
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    if sum(host in names for host in hosts) > len(ranks):
        names = [f"rank {rank} ({hosts[rank]})" for rank in ranks]
    return join_first(names, ", ")


def show(findings: list[Finding]) -> str:
    """The table: a line per finding, with the way out below it, and a last line that counts them.

    Of a check that is well in many places only some are shown.
    """
    lines = []
    num_ok: Counter[str] = Counter()
    for finding in findings:
        num_ok[finding.check] += finding.status == "ok"
        if finding.status == "ok" and num_ok[finding.check] > MAX_OK_ROWS:
            continue
        text = (
            finding.measured if finding.place == "all" else f"{finding.place}: {finding.measured}"
        )
        row = f"{finding.status:<7}  {finding.check:<21}  {text}"
        lines += textwrap.wrap(row, WIDTH, subsequent_indent=INDENT)
        lines += textwrap.wrap(
            finding.way_out, WIDTH, initial_indent=f"{INDENT}-> ", subsequent_indent=f"{INDENT}   "
        )
    counts = Counter(finding.status for finding in findings)
    verdict = "what was checked will work"
    if counts["failed"]:
        verdict = "a run will fail here"
    elif counts["not run"]:
        verdict = "not everything was checked"
    summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return "\n".join([*lines, "", f"{verdict}: {summary}"])
