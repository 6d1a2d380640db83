"""Adoption: what becomes of every setting of a file, the table that says so, and the preset."""

import dataclasses
import functools
import re
import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from common.config.fields import field_names
from common.config.parsing import parse
from common.durable import replace_file
from common.errors import Refused, printable
from common.files import SMALL, read_yaml

FACTS = Path(__file__).parent / "facts"
IMAGES = {  # training images of data sets by the names that detectron2 and MMDetection have for them
    "coco_2017_train": 118_287,
    "coco_2014_train": 82_783,
    "instances_train2017": 118_287,
    "instances_train2014": 82_783,
    "lvis_v0.5_train": 57_623,
    "lvis_v1_train": 100_170,
    "voc_2007_trainval": 5_011,
    "voc_2012_trainval": 11_540,
    "voc_2007_train": 2_501,
    "voc_2012_train": 5_717,
}


@dataclass
class Line:
    """What became of some settings: `kind` is carried, not carried, no effect here, or default."""

    kind: str
    keys: list[str]
    text: str
    shown: str  # the settings with their values


class Adoption:
    """Settings of another tool by dotted name, each of which is carried, named as not carried, or without effect here.

    Whatever a reader does not mention is reported as unknown, so that no setting is dropped silently.

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

    def under(self, *names: str) -> list[str]:
        """Settings with one of these names, or inside one of these groups: under("model.neck") has model.neck.type."""
        inside = tuple(name + end for name in names for end in ".[")
        return [key for key in self.values if key in names or key.startswith(inside)]

    def carry(self, names: str | Iterable[str], note: str = "", **flags: Any) -> None:
        """These settings become `flags`."""
        notes = [note] + [""] * len(flags)  # beside the first
        self.preset |= {flag: (value, said) for (flag, value), said in zip(flags.items(), notes, strict=False)}
        ours = ", ".join(f"{flag} = {_shown(value)}" for flag, value in flags.items())
        self._add("carried", names, f"-> {ours}" + (f" ({note})" if note else ""))

    def carry_each(self, flag_of: dict[str, str], only_if_set: bool = False) -> None:
        """Settings that are flags of another name: setting -> flag. `only_if_set`: not those that are off or at the default."""
        for name, flag in flag_of.items():
            if not only_if_set or (self[name] and self.changed(name)):
                self.carry(name, **{flag: self[name]})

    def launch(self, names: str | Iterable[str], precision: str) -> None:
        """These settings choose the file of accelerate_configs/ (`precision`: bf16, fp16 or "")."""
        self.precision = precision
        self._add("carried", names, f"-> the {precision or 'fp32'} file given to accelerate launch --config_file")

    def leave(self, names: str | Iterable[str], reason: str, always: bool = True) -> None:
        """These settings are not carried, for this reason; say what to do instead. Not `always`: unless they are defaults."""
        self._add("not carried" if always else "not carried if changed", names, reason)

    def skip(self, names: str | Iterable[str], reason: str) -> None:
        """These settings have no effect here."""
        self._add("no effect here if changed", names, reason)

    def family(self, detector: str, expected: dict[str, Any], names: list[str], differences: Iterable[str]) -> None:
        """Settings of a detector's parts: those of the published model are the family's, others are named."""
        kept = [key for key in names if key in expected and equal(self[key], expected[key])]
        self.lines.append(Line("carried", kept, f"-> detector = {detector}", f"{len(kept)} settings of the family"))
        self.mentioned |= {*kept}
        for key in names:
            if key not in kept:
                known = f"the family has {expected[key]}" if key in expected else "no such setting of the family here"
                self.leave(key, known)
        self.lines += [Line("not carried", [], text, "(the detector)") for text in differences]

    def changed(self, name: str) -> bool:
        """Whether a setting, or one of a group, differs from the tool's default."""
        keys = self.under(name)
        return any(key not in self.defaults or not equal(self.values[key], self.defaults[key]) for key in keys)

    def _add(self, kind: str, names: str | Iterable[str], text: str) -> None:
        """A line about these settings, as far as they are there and no earlier line is about them."""
        names = [names] if isinstance(names, str) else list(names)
        carried = kind == "carried"
        keys = [key for key in self.under(*names) if carried or key not in self.mentioned]
        if not keys and not carried:
            return
        self.mentioned |= set(keys)
        if kind.endswith(" if changed"):
            kind = kind.removesuffix(" if changed") if any(map(self.changed, keys)) else "default"
        self.lines.append(Line(kind, keys, text, _settings({key: self.values[key] for key in keys}, names)))

    def finish(self, tables: dict[str, dict[str, Iterable[str]]] | None = None) -> None:
        """Name what the reader has not mentioned: by tables of reasons and names; what is off; the rest as unknown."""
        for reason, names in (tables or {}).get("not carried", {}).items():
            for name in names:
                self.leave(name, reason, always=False)
        for reason, names in (tables or {}).get("no effect", {}).items():
            for name in names:
                self.skip(name, reason)
        for key in [key for key in self.values if key not in self.mentioned]:
            if key in self.defaults and not self[key]:
                self.skip(key, "off")
            self.leave(key, f"not known as a setting of {self.tool}", always=key not in self.defaults)

    def table(self, everything: bool = False) -> str:
        """One line per setting, which says what became of it. `everything`: also the names of those at the tool's defaults."""
        text = []
        for kind in ("carried", "not carried", "no effect here"):
            prefix = "" if kind == "carried" else f"-> {kind}: "
            text += [f"  {printable(f'{line.shown} {prefix}{line.text}')}" for line in self.lines if line.kind == kind]
        if rest := [key for line in self.lines if line.kind == "default" for key in line.keys]:
            text.append(f"  {len(rest)} more are at the defaults of {self.tool}, which have no effect here")
            if everything:
                text.append(textwrap.fill(", ".join(rest), 100, initial_indent="    ", subsequent_indent="    "))
            else:
                text[-1] += " (--all names them)"
        return "\n".join(text)

    def write(self, output: Path, overwrite: bool = False) -> str:
        """Write the preset, checked by the recipe's own parser. Returns the command that runs it."""
        if output.exists() and not overwrite:
            raise Refused(f"{output} exists: give another name with -o, or --overwrite")
        recipe = Path(str(self.recipe.__file__)).name
        gpus = "single_gpu" if self.gpus == 1 else "multi_gpu"
        config = f"accelerate_configs/{gpus}{'_' + self.precision if self.precision else ''}.yaml"
        command = f"accelerate launch --config_file {config} recipes/{recipe} --config {shlex.quote(str(output))}"
        if self.preset.setdefault("data", ("FOLDER", "give yours with --data"))[0] == "FOLDER":
            command += " --data FOLDER"
        partial = output.with_name(f".{output.name}.partial.yaml")
        try:
            replace_file(partial, self._text(command).encode())
            parse(self.recipe.Config, ["--config", str(partial)], program=recipe)
            partial.replace(output)
        except OSError as error:
            raise Refused(f"{output}: can't be written: {error.strerror}") from None
        except Refused as error:
            raise Refused(str(error).replace(f"--config {partial}", f"{self.file}, as a preset")) from None
        finally:
            partial.unlink(missing_ok=True)
        return command

    def _text(self, command: str) -> str:
        left = [f"- {line.shown}: {line.text}" for line in self.lines if line.kind == "not carried"]
        opening = [
            f"Made from {self.file.name} of {self.tool} by tools/adopt. Nothing was measured with it.",
            "",
            f"  {command}",
            "",
            "Not carried:" if left else "Everything was carried.",
        ]
        wrapped = [line for text in left for line in textwrap.wrap(text, 126, subsequent_indent="  ")]
        text = [f"# {printable(line)}".rstrip() for line in opening + wrapped]
        config, defaults = self.recipe.Config, {}
        for field in dataclasses.fields(config):  # left out: what is the recipe's default for all data
            if field.metadata.get("photographs") is None:
                defaults[field.name] = field.default
        stated = {*config.__annotations__} & {name for base in config.__bases__ for name in base.__dataclass_fields__}
        stated |= {*self.preset} - {*defaults} | {"data", "model", "detector"}
        for flag in field_names(self.recipe.Config):
            if flag in self.preset and (flag in stated or self.preset[flag][0] != defaults[flag]):
                value, note = self.preset[flag]
                said = yaml.safe_dump({flag: value}, default_flow_style=False, allow_unicode=True, width=10**6).strip()
                text.append(said + (f"  # {printable(note)}" if note else ""))
        return "\n".join(text) + "\n"


@functools.cache
def facts(name: str) -> dict:
    """What is known of a tool: a file of facts/, with numbers as numbers."""
    return yaml.safe_load((FACTS / f"{name}.yaml").read_text())


def known(name: str) -> dict[str, Any]:
    """A tool's settings with their defaults, from the file of facts that lists them by what becomes of them."""
    tables = facts(name)
    groups = [tables["carried"], *tables["not carried"].values(), *tables["no effect"].values()]
    return {key: value for group in groups for key, value in group.items()}


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name: {"a": {"b": [{"c": 1}]}} -> {"a.b[0].c": 1}. Lists of plain values stay whole."""
    found: dict[str, Any] = {}
    if isinstance(values, dict) and values:
        for key, value in values.items():
            found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(values, (list, tuple)) and any(isinstance(value, dict) for value in values):
        for place, value in enumerate(values):
            found |= flat(value, f"{prefix}[{place}]")
    else:
        found[prefix] = values
    return found


def read_settings(file: Path) -> dict:
    """The YAML file of another tool, safely: no tag is executed. Numbers are numbers again. Raises `Refused`."""
    try:
        content = read_yaml(file, SMALL)
    except OSError as error:
        raise Refused(f"{file}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"{file}: not readable as plain YAML: {error}") from None
    if not isinstance(content, dict):
        raise Refused(f"{file}: must hold `key: value` lines")
    return numbers(content)


def numbers(value: Any) -> Any:
    """Texts that are numbers, as numbers; also 3e-4, which YAML 1.1 calls a text."""
    if isinstance(value, dict):
        return {str(key): numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [numbers(one) for one in value]
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+", value):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value):
        return float(value)
    return value


def rounded(number: float) -> float | int:
    """Six significant digits, as an int if it is one."""
    short = float(f"{number:.6g}")
    return int(short) if short == int(short) else short


def epochs_of(steps: float, batch: int, images: int) -> float | int:
    """Steps of a batch size as epochs of a data set; never more steps than asked for, though epochs round up to steps."""
    return rounded((steps - 0.01) * batch / images) if steps > 1 else rounded(steps * batch / images)


def falls(epochs: Iterable[float], beyond: float = 10**6) -> str:
    """`--step_epochs` for falls of the rate at these epochs. One number alone would mean a fall every so many epochs."""
    text = [str(rounded(epoch)) for epoch in epochs]
    return ",".join(text if len(text) != 1 else [*text, str(rounded(beyond))])


def _settings(values: dict[str, Any], groups: list[str]) -> str:
    """Settings and their values for a line. Groups of many are named by their own names."""
    if len(values) <= 6:
        shown = ", ".join(f"{key} = {_shown(value)}" for key, value in values.items())
        return shown or ", ".join(groups) or "(not in the file)"
    sizes = {
        group: sum(key == group or key.startswith((f"{group}.", f"{group}[")) for key in values) for group in groups
    }
    return ", ".join(f"{group} ({size} settings)" if size > 1 else group for group, size in sizes.items() if size)


def _shown(value: Any) -> str:
    text = str(value) if not isinstance(value, float) else f"{value:g}"
    return "''" if text == "" else text if len(text) <= 80 else text[:77] + "..."


def equal(one: Any, other: Any) -> bool:
    """Whether two settings are the same: lists as tuples, numbers to nine digits, and the ways to say nothing."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return one == other or (one in (None, "", "None", "null") and other in (None, ""))
