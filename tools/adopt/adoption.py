"""Adoption: what becomes of every setting of a file, the table that says so, and the preset."""

import functools
import math
import re
import shlex
import tempfile
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from common.config import parse
from common.durable import replace_file
from common.errors import Refused, printable
from common.files import SMALL, read_yaml

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass
class Line:
    """What became of some settings: `kind` is carried, not carried, or no effect here."""

    kind: str
    keys: list[str]
    text: str
    shown: str  # the settings with their values


class Adoption:
    """Settings of another tool by dotted name, each of which is carried, named as not carried, or without effect here.

    Whatever a reader does not mention is reported as unknown, so that no setting is dropped silently. `names` are one or
    several settings or groups, in a list or with spaces between them: "model.neck" has model.neck.type.

    Args:
        tool: name of the other tool, for the table.
        recipe: which the preset is for.
        values: what the file says.
        defaults: the tool's own values of everything that the file does not say.
    """

    def __init__(
        self, tool: str, file: Path, recipe: ModuleType, values: dict[str, Any], defaults: dict[str, Any] | None = None
    ) -> None:
        self.tool, self.file, self.recipe, self.defaults = tool, file, recipe, defaults or {}
        self.values = self.defaults | values
        self.preset: dict[str, tuple[Any, str]] = {}  # flag -> value, comment
        self.lines: list[Line] = []
        self.mentioned: set[str] = set()
        self.precision, self.gpus = "", 0

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def under(self, names: str | Iterable[str]) -> list[str]:
        """The settings that are meant by `names`."""
        names = [*_listed(names)]
        inside = tuple(name + end for name in names for end in ".[")
        return [key for key in self.values if key in names or key.startswith(inside)]

    def at(self, place: str, words: str) -> list[Any]:
        """Values of the settings `words` at a place; None for those that are not there."""
        return [self[f"{place}.{word}"] for word in words.split()]

    def items(self, name: str) -> list[str]:
        """The places of a list's items: "hooks" -> hooks[0], hooks[1]; of a group alone its own."""
        return sorted({key.split("]")[0] + "]" if "[" in key else name for key in self.under(name) if key != name})

    def carry(self, names: str | Iterable[str], note: str = "", **flags: Any) -> None:
        """These settings become `flags`."""
        for place, (flag, value) in enumerate(flags.items()):
            self.preset[flag] = (value, "" if place else note)
        ours = ", ".join(f"{flag} = {_shown(value)}" for flag, value in flags.items())
        self._add("carried", names, f"-> {ours}" + (f" ({note})" if note else ""))

    def carry_each(self, words: str, only_if_set: bool = False) -> None:
        """Settings that are flags, as name or theirs:ours. `only_if_set`: unless off or at the default."""
        for word in words.split():
            name, _, flag = word.partition(":")
            if not only_if_set or (self[name] and self.changed(name)):
                self.carry(name, **{flag or name: self[name]})

    def launch(self, names: str | Iterable[str], precision: str) -> None:
        """These settings choose the file of accelerate_configs/ (`precision`: bf16, fp16 or "")."""
        self.precision = precision
        self._add("carried", names, f"-> the {precision or 'fp32'} file given to accelerate launch --config_file")

    def leave(self, names: str | Iterable[str], reason: str, always: bool = True) -> None:
        """These settings are not carried, for this reason. Not `always`: unless they are defaults."""
        keys = [key for key in self.under(names) if key not in self.mentioned]
        self._add("not carried" if always or any(map(self.changed, keys)) else "no effect here", names, reason)

    def skip(self, names: str | Iterable[str]) -> None:
        """These settings have no effect here."""
        self._add("no effect here", names, "")

    def changed(self, name: str) -> bool:
        """True if a setting, or one of a group, differs from the tool's default."""
        return any(
            key not in self.defaults or not equal(self.values[key], self.defaults[key]) for key in self.under([name])
        )

    def _add(self, kind: str, names: str | Iterable[str], text: str) -> None:
        """A line about these settings, unless an earlier line is. Many settings are named by their groups."""
        names = [*_listed(names)]
        keys = [key for key in self.under(names) if kind == "carried" or key not in self.mentioned]
        if not keys and kind != "carried":
            return
        self.mentioned |= {*keys}
        shown = [key if kind == "no effect here" else f"{key} = {_shown(self[key])}" for key in keys]
        if len(shown) > 6:
            shown = [f"{', '.join(name for name in names if self.under([name]))} ({len(keys)} settings)"]
        self.lines.append(Line(kind, keys, text, ", ".join(shown or names) or "(not in the file)"))

    def finish(self, tables: dict[str, Any] | None = None) -> None:
        """Name what the reader has not mentioned: by tables of reasons, as off, or as unknown."""
        for reason, names in (tables or {}).get("not carried", {}).items():
            for name in names:
                self.leave(name, reason, always=False)
        self.skip((tables or {}).get("no effect", ()))
        for key in self.values:
            if key in self.defaults and not self[key]:
                self.skip([key])
            self.leave([key], f"not known as a setting of {self.tool}", always=key not in self.defaults)

    def table(self) -> str:
        """A line per carried setting and per other one, and the names of those without effect."""
        text = [f"  {printable(f'{line.shown} {line.text}')}" for line in self.lines if line.kind == "carried"]
        text += [f"  {printable(line)}" for line in self._left(" -> not carried: ")]
        if rest := [line.shown for line in self.lines if line.kind == "no effect here"]:
            idle = f"no effect here, or at the defaults of {self.tool}: {printable(', '.join(rest))}"
            text += textwrap.wrap(idle, 100, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        return "\n".join(text)

    def _left(self, between: str) -> list[str]:
        return [f"{line.shown}{between}{line.text}" for line in self.lines if line.kind == "not carried"]

    def write(self, output: Path, overwrite: bool = False) -> str:
        """Write the preset, checked by the recipe's own parser. Returns the command that runs it."""
        if output.exists() and not overwrite:
            raise Refused(f"{output} exists: give another name with -o, or --overwrite")
        recipe = Path(str(self.recipe.__file__)).name
        config = "_".join(filter(None, ["single_gpu" if self.gpus == 1 else "multi_gpu", self.precision]))
        command = f"accelerate launch --config_file accelerate_configs/{config}.yaml recipes/{recipe}"
        command += f" --config {shlex.quote(str(output))}"
        if self.preset.setdefault("data", ("FOLDER", "give yours with --data"))[0] == "FOLDER":
            command += " --data FOLDER"
        text = self._text(command)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as draft:
            draft.write(text)
            draft.flush()
            try:
                parse(self.recipe.Config, ["--config", draft.name], program=recipe)
            except Refused as error:
                raise Refused(str(error).replace(f"--config {draft.name}", f"{self.file}, as a preset")) from None
        try:
            replace_file(output, text.encode())
        except OSError as error:
            raise Refused(f"{output}: can't be written: {error.strerror}") from None
        return command

    def _text(self, command: str) -> str:
        left = self._left(": ")
        opening = [f"Made from {self.file.name} of {self.tool} by tools/adopt. Nothing was measured with it.", ""]
        opening += [f"  {command}", "", "Not carried:" if left else "Everything was carried."]
        wrapped = [line for text in left for line in textwrap.wrap(f"- {text}", 126, subsequent_indent="  ")]
        text = [f"# {printable(line)}".rstrip() for line in opening + wrapped]
        for flag, (value, note) in self.preset.items():
            said = yaml.safe_dump({flag: value}, default_flow_style=False, allow_unicode=True, width=10**6).strip()
            text.append(said + (f"  # {printable(note)}" if note else ""))
        return "\n".join(text) + "\n"


@functools.cache
def facts(name: str) -> dict:
    """The facts about a tool: a file of facts/, with numbers as numbers."""
    return yaml.safe_load((Path(__file__).parent / "facts" / f"{name}.yaml").read_text())


def known(name: str) -> dict[str, Any]:
    """A tool's settings with their defaults."""
    tables = facts(name)
    groups = [tables["carried"], *tables["not carried"].values()]
    return {key: value for group in groups for key, value in group.items()}


def read_settings(file: Path) -> dict:
    """The YAML file of another tool, of which no tag is executed. Raises `Refused`."""
    try:
        content = read_yaml(file, SMALL)
    except OSError as error:
        raise Refused(f"{file}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"{file}: not readable as plain YAML: {error}") from None
    if not isinstance(content, dict):
        raise Refused(f"{file}: must hold `key: value` lines")
    return _numbers(content)


def _numbers(value: Any) -> Any:
    """Texts that are numbers, as numbers; also 3e-4, which YAML 1.1 calls a text."""
    if isinstance(value, dict):
        return {str(key): _numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return value
    return int(value) if value.lstrip("+-").isdigit() else float(value)


def rounded(number: float) -> float | int:
    """Six significant digits, as an int if it is one."""
    short = float(f"{number:.6g}")
    return int(short) if short == int(short) else short


def falls(epochs: Iterable[float], beyond: float = 10**6) -> str:
    """`--step_epochs` for these epochs. One number alone would mean a fall every so many."""
    text = [str(rounded(epoch)) for epoch in epochs]
    return ",".join(text if len(text) != 1 else [*text, str(rounded(beyond))])


def equal(one: Any, other: Any) -> bool:
    """True if two settings are the same: lists as tuples, numbers to nine digits, and the ways to say nothing."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other)
    return one == other or (one in (None, "", "None", "null") and other in (None, ""))


def _listed(names: str | Iterable[str]) -> Iterable[str]:
    return names.split() if isinstance(names, str) else names


def _shown(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if 0 < len(text) <= 80 else f"{text[:77]}..." if text else "''"
