"""Table: folds the findings of all ranks into rows, and shows them for a person."""

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from tools.doctor.finding import Finding
from tools.doctor.world import NAMED, places

WIDTH = 100
HERE, ON_MACHINE = "this rank", "this machine"  # places that `fold` replaces by names
_STATUS = ("ok", "warning", "failed", "not run")


def fold(rows: Sequence[tuple[int, Finding]], hosts: Sequence[str], order: Sequence[str] = ()) -> list[Finding]:
    """The rows of all ranks as rows of the run: equal ones are one, with the ranks or hosts that they are from.

    A place "all" is about the run; HERE and ON_MACHINE are about the rank or machine itself; any other place is a name that
    the check has given. `hosts` has the host of each rank.
    `order` has the first words of checks, in the order of their rows.

    Two ranks on a and b, both Finding("cores", "ok", "8", place=HERE) -> one row, place "all".
    Rank 0 on a Finding("cores", "ok", "8", place=HERE), rank 1 on b "4" -> rows "8" with place "a" and "4" with place "b".
    """
    speakers: dict[str, set[int]] = {HERE: {rank for rank, _ in rows}, ON_MACHINE: set()}  # that could have a row
    same: dict[tuple[str, ...], list[tuple[int, Finding]]] = {}
    for rank, finding in rows:
        key = (finding.check, finding.status, finding.measured, finding.way_out, finding.place)
        same.setdefault(key, []).append((rank, finding))
        speakers.setdefault(finding.place, set()).add(rank)
    folded = []
    for found in same.values():
        ranks, finding = [rank for rank, _ in found], found[0][1]
        if finding.place in (HERE, ON_MACHINE):
            among = speakers[finding.place]
            finding = replace(finding, place="all" if among == {*ranks} else places(ranks, among, hosts))
        folded.append(finding)
    checks = [*dict.fromkeys(finding.check for _, finding in rows)]
    words = [*dict.fromkeys([*order, *map(_word, checks)])]
    return sorted(folded, key=lambda finding: (words.index(_word(finding.check)), checks.index(finding.check)))


def _word(check: str) -> str:
    return check.partition(":")[0]


def show(findings: Sequence[Finding], partly: bool = False) -> str:
    """The table: a line per finding, with the way out below it, and a last line that counts them.

    Of a check that is well in many places only some are shown. `partly`: only some checks were asked for.
    """
    shown: list[Finding] = []
    for finding in findings:
        if finding.status != "ok" or sum(one.check == finding.check for one in shown) < NAMED:
            shown.append(finding)
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    first = max([len(finding.check) for finding in shown] + [5])
    lines = []
    for finding in shown:
        place = "" if finding.place == "all" else f"{finding.place}: "
        room = max(30, width - first - 11)
        text = textwrap.wrap(place + finding.measured, room) or [""]
        text += textwrap.wrap(finding.way_out, room, initial_indent="-> ", subsequent_indent="   ")
        lines.append(f"{finding.status:<7}  {finding.check:<{first}}  {text[0]}")
        lines += [f"{'':{first + 11}}{line}" for line in text[1:]]
    counts = {status: sum(finding.status == status for finding in findings) for status in _STATUS}
    verdict = "what was checked will work" if partly else "a run will work here"
    if counts["failed"]:
        verdict = "a run will fail here"
    elif counts["not run"]:
        verdict = "not everything was checked"
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return "\n".join([*lines, "", f"{verdict}: {said}"])
