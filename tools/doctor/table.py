"""Table: folds the findings of all ranks into rows, and shows them for a person or as JSON."""

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from tools.doctor.finding import Finding
from tools.doctor.world import NAMED, places

WIDTH = 100
HERE, ON_MACHINE = "this rank", "this machine"  # places that `fold` replaces by names
_COLOURS = {"ok": "32", "warning": "33", "failed": "31", "not run": "2"}


def fold(rows: Sequence[tuple[int, Finding]], hosts: Sequence[str], order: Sequence[str] = ()) -> list[Finding]:
    """The rows of all ranks as rows of the run: equal ones are one, with the ranks or hosts that they are from.

    A place "all" of rank 0 alone speaks for all; HERE and ON_MACHINE are about the rank or machine itself; any other place is
    a name that the check has given. `hosts` has the host of each rank.
    `order` has the first words of checks, in the order of their rows.

    Two ranks on a and b, both Finding("cores", "ok", "8", place=HERE) -> one row, place "all".
    Rank 0 on a Finding("cores", "ok", "8", place=HERE), rank 1 on b "4" -> rows "8" with place "a" and "4" with place "b".
    """
    of_check: dict[str, set[int]] = {}  # the ranks that have a row of a check
    speakers: dict[str, set[int]] = {HERE: set(), ON_MACHINE: set()}  # that could have a row
    same: dict[tuple[str, ...], list[tuple[int, Finding]]] = {}
    for rank, finding in rows:
        key = (finding.check, finding.status, finding.measured, finding.way_out, finding.place)
        same.setdefault(key, []).append((rank, finding))
        of_check.setdefault(finding.check, set()).add(rank)
        speakers[HERE].add(rank)
        speakers.setdefault(finding.place, set()).add(rank)
    folded = []
    for (check, *_, place), found in same.items():
        ranks = [rank for rank, _ in found]
        if place in (HERE, ON_MACHINE, "all"):
            among = of_check[check] if place == "all" else speakers[place]
            place = "all" if among == {*ranks} else places(ranks, among, hosts)
        figures = found[0][1].figures
        if len(found) > 1 and any(other.figures != figures for _, other in found):
            figures = {"ranks": {str(rank): other.figures for rank, other in found}}
        folded.append(replace(found[0][1], place=place, figures=figures))
    words = [*dict.fromkeys([*order, *(_word(finding) for _, finding in rows)])]
    checks = [*of_check]
    return sorted(folded, key=lambda finding: (words.index(_word(finding)), checks.index(finding.check)))


def _word(finding: Finding) -> str:
    return finding.check.partition(":")[0]


def show(findings: Sequence[Finding], coloured: bool, partly: bool = False) -> str:
    """The table: a line per finding, with the way out below it, and a last line that counts them.

    `partly`: only some checks were asked for.
    """
    findings = _shorten(findings)
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    first = max([len(finding.check) for finding in findings] + [5])
    lines = []
    for finding in findings:
        mark = f"{finding.status:<7}"
        if coloured:
            mark = f"\033[{_COLOURS[finding.status]}m{mark}\033[0m"
        place = "" if finding.place == "all" else f"{finding.place}: "
        room = max(30, width - first - 11)
        text = textwrap.wrap(place + finding.measured, room) or [""]
        text += textwrap.wrap(finding.way_out, room, initial_indent="-> ", subsequent_indent="   ")
        lines.append(f"{mark}  {finding.check:<{first}}  {text[0]}")
        lines += [f"{'':7}  {'':{first}}  {line}" for line in text[1:]]
    counts = {status: sum(finding.status == status for finding in findings) for status in _COLOURS}
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    verdict = "a run will work here"
    if counts["failed"]:
        verdict = "a run will fail here"
    elif counts["not run"]:
        verdict = "not everything was checked"
    elif partly:
        verdict = "what was checked is well" if not counts["warning"] else "what was checked will work"
    return "\n".join([*lines, "", f"{verdict}: {said}"])


def _shorten(findings: Sequence[Finding]) -> list[Finding]:
    """The rows to show: checks that did not run for one reason are one row, and of many places where all is well a few stay."""
    shown: list[Finding] = []
    left_out: list[Finding] = []
    for finding in findings:
        same = [each for each in findings if (each.status, each.measured) == (finding.status, finding.measured)]
        good = [each for each in findings if each.status == "ok" and each.check == finding.check]
        if finding.status == "not run" and len(same) > 1 and not finding.way_out:
            if finding is same[0]:
                names = ", ".join(dict.fromkeys(each.check for each in same))
                left_out.append(Finding("other checks", "not run", f"{finding.measured}: {names}"))
        elif finding not in good[NAMED:]:
            shown.append(finding)
        elif finding is good[NAMED]:
            rest = len(good) - NAMED
            shown.append(Finding(finding.check, "ok", f"and {rest} more like these, see --json"))
    return shown + left_out
