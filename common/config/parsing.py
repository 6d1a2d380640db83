"""Parsing: turns a dataclass of defaults, a YAML file and the command line into one checked configuration.

A YAML file is a list of flags. The file and the command line go through the same typed parser; flags override the file.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import io
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tyro
import yaml

from common.config.fields import field_names
from common.config.help import print_help
from common.config.origin import OF_DATA, Origin, read_origin
from common.config.synonyms import hint, other_recipe
from common.durable import replace_file
from common.errors import Refused
from common.files import SMALL, read_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

_MOST = 2**63 - 1  # the largest integer that torch takes


def parse(config_class: type[C], argv: list[str] | None = None, program: str = "") -> C:
    """The configuration: defaults of `config_class`, overridden by `--config file.yaml`, overridden by flags.

    With `--eval_only`, the configuration of the run that made the weights replaces the defaults; other fields may decide on
    defaults, too (`option(decides=...)`).
    Raises `Refused` for an unknown flag or key, and for a value that is missing, of the wrong type or beyond its limits.

    Args:
        argv: the command line without the program's name (default: of this process).
        program: the program's name for messages (default: of this process).
    """
    path, argv = _take_config(list(sys.argv[1:] if argv is None else argv))
    program = program or Path(sys.argv[0]).name
    layers = [(f"--config {path}: ", _read(path))] if path else []
    asked = next((place for place, word in enumerate(argv) if word in ("-h", "--help")), None)
    if asked is not None:
        default = _layered(config_class, layers, [], program)
        print_help(config_class, default, program, everything="all" in argv[asked + 1 : asked + 2])
    config = _checked(_layered(config_class, layers, argv, program))
    fields = {field.name: field for field in dataclasses.fields(config)}
    if weights := getattr(config, "eval_only", ""):
        origin = fields["eval_only"].metadata.get("origin", read_origin)(weights)
        return _checked(_for_evaluation(config_class, origin, layers, argv, program))
    for field in fields.values():
        value, metadata = getattr(config, field.name), field.metadata
        if not value and metadata.get("required"):
            raise Refused(f"--{field.name} is missing: {metadata['required']}")
        if value and metadata.get("decides"):
            decided = (f"--{field.name} {value}: ", metadata["decides"](value))
            config = _checked(_layered(config_class, [decided, *layers], argv, program))
    return config


def _checked(config: C) -> C:
    """`config`, if all values are within their limits. Raises `Refused`."""
    for field in dataclasses.fields(config):
        value, low, high = getattr(config, field.name), field.metadata.get("low"), field.metadata.get("high")
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise Refused(f"--{field.name} {value!a:.100}: holds bytes that are no text (UTF-8); rename what it names")
        if value == "" and field.default != "":
            raise Refused(f"--{field.name} is empty: give it a value, or leave it out for {field.default}")
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"--{field.name} {value}: must be a finite number")
        if (low is not None and value < low) or (high is not None and value > high):
            limit = f"at least {low}" if high is None else f"between {low} and {high}"
            raise Refused(f"--{field.name} {value!s:.100}: must be {limit}")
        if isinstance(value, int) and abs(value) > _MOST:
            raise Refused(f"--{field.name} {value!s:.100}: must be at most {_MOST}")
        if wrong := field.metadata.get("check") and field.metadata["check"](value):
            raise Refused(f"--{field.name} {value:.100}: {wrong}")
    return config


def save(config, path: Path) -> None:
    """Write the complete configuration as a file for `--config`, the recipe's own fields first."""
    values = dataclasses.asdict(config)
    everything = [(name, values[name]) for name in field_names(type(config))]
    # YAML keeps the line separators of Unicode only if they are escaped.
    plain = not re.search("[\x85\u2028\u2029]", "".join(str(value) for _, value in everything))
    replace_file(path, yaml.safe_dump(dict(everything), sort_keys=False, allow_unicode=plain).encode())


def identity(config) -> dict:
    """The fields that define the run: all except those that may change when it resumes."""
    may_change = {field.name for field in dataclasses.fields(config) if field.metadata.get("may_change")}
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in may_change}


def short_hash(values: dict) -> str:
    """A hash of `values`, six hex digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]


def nearest(name: str, names) -> str:
    """The end of a message about an unknown name: `; did you mean X, Y?`, or "" if no name is similar."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
    return f"; did you mean {', '.join(close)}?" if close else ""


def nearest_path(path: Path) -> str:
    """The same for a path that does not exist, with the names in its folder; "" if it exists."""
    try:
        if path.exists():
            return ""
        return nearest(path.name, [other.name for other in path.parent.iterdir()])
    except (OSError, ValueError):
        return ""


def _read(path: Path) -> dict:
    try:
        content = read_yaml(path, SMALL)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        found = [
            str(file) for folder in (path.parent, Path("recipes/presets")) for file in sorted(folder.glob("*.yaml"))
        ]
        presets = {Path(file).stem: file for file in found}
        same = presets.get(path.stem, "")
        near = f"; did you mean {same}?" if same else nearest(str(path), found)
        raise Refused(f"--config {path}: {'a folder, not a' if path.is_dir() else 'no such'} file{near}") from None
    except OSError as error:
        raise Refused(f"--config {path}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"--config {path}: not readable as YAML: {error}") from None
    if content is None:  # a file with comments only
        return {}
    if not isinstance(content, dict):
        raise Refused(f"--config {path}: must hold `key: value` lines, found a {type(content).__name__}")
    return content


def _flags(content: dict, config_class, where: str) -> list[str]:
    """YAML content as flags: {'lr': 0.1, 'pretrained': True} -> ['--lr=0.1', '--pretrained']."""
    fields, recipe = {field.name: field.type for field in dataclasses.fields(config_class)}, _file_of(config_class)
    flags = []
    for key, value in content.items():
        if key not in fields:
            if others := [other for other in content if other not in fields and other_recipe(str(other), recipe)]:
                raise Refused(f"{where}is for {other_recipe(others[0], recipe)}: {recipe.name} has no {others[0]}")
            raise Refused(f"{where}unknown key {key}{hint(str(key), fields, recipe) or nearest(str(key), fields)}")
        if isinstance(value, (dict, list)) or value is None:
            raise Refused(f"{where}{key} must be a single value, not {value and type(value).__name__}")
        if (fields[key] is bool) != isinstance(value, bool):
            raise Refused(
                f"{where}{key}: {value!r} is not {'true or false' if fields[key] is bool else 'of the right type'}"
            )
        flags.append(f"--{key}={value}" if not isinstance(value, bool) else f"--{'' if value else 'no_'}{key}")
    return flags


def _layered(config_class: type[C], layers: list[tuple[str, dict]], argv: list[str], program: str) -> C:
    """The defaults overridden by each of `layers` in turn, then by `argv`. A layer is a prefix for messages, and values."""
    config: C | None = None
    for where, content in layers:
        config = _parse(config_class, _flags(content, config_class, where), config, program, where)
    return _parse(config_class, argv, config, program)


def _for_evaluation(
    config_class: type[C], origin: Origin, layers: list[tuple[str, dict]], argv: list[str], program: str
) -> C:
    """The configuration of the run that made these weights, overridden by `layers` and the flags in `argv`.

    Raises `Refused` if that was a run of another recipe, or if neither the run nor a flag names the data.
    """
    weights = origin.path
    fixed = {field.name for field in dataclasses.fields(config_class) if not field.metadata.get("may_change")}
    unknown = [name for name in origin.config if name not in fixed]
    if origin.run and unknown and fixed & config_class.__annotations__.keys() - origin.config.keys():
        named = ", ".join(f"--{name}" for name in unknown[:5])
        raise Refused(
            f"--eval_only {weights}: its run has flags that {program} does not know ({named}); evaluate it with the "
            f"recipe that trained it, {origin.run.get('recipe') or 'another one'}"
        )

    def given(but: Sequence[str] = ()) -> C:
        of_run = {name: value for name, value in origin.config.items() if name in fixed and name not in but}
        return _layered(config_class, [(f"--eval_only {weights}: ", of_run), *layers], argv, program)

    config = given()
    data = getattr(config, "data", "")
    if not data:
        raise Refused(f"--eval_only {weights}: does not say which data it was trained on; add --data")
    return config if origin.trained_on(data) else given(but=OF_DATA)


def _take_config(argv: list[str]) -> tuple[Path | None, list[str]]:
    rest, paths = [], []
    words = iter(argv)
    for word in words:
        if word == "--config":
            paths.append(next(words, ""))
        elif word.startswith("--config="):
            paths.append(word.removeprefix("--config="))
        else:
            rest.append(word)
    if len(paths) > 1:
        raise Refused(f"--config is given {len(paths)} times: name one file and set the rest by flags")
    if paths and not paths[0]:
        raise Refused("--config needs the path of a YAML file")
    return (Path(paths[0]) if paths else None), rest


def _parse(config_class: type[C], argv: list[str], default: C | None, program: str, where: str = "") -> C:
    kinds = {field.name: field.type for field in dataclasses.fields(config_class)}
    for word, following in zip(argv, [*argv[1:], ""], strict=False):  # strict would fail for an empty argv
        flag, _, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        switch = name if name in kinds else name.removeprefix("no_")
        if flag.startswith("--") and switch not in kinds:
            meant = hint(name, kinds, _file_of(config_class)) or nearest(name, [*kinds, "config"])
            raise Refused(f"{where}unknown flag {flag}{meant}")
        valued = value or following.lower() in ("true", "false", "0", "1")
        if flag.startswith("--") and kinds[switch] is bool and valued:
            raise Refused(f"{where}{flag} takes no value: give --{switch} or --no_{switch}")
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            parsed: Any = tyro.cli(config_class, prog=program, args=argv, default=default, use_underscores=True)
            return parsed
    except SystemExit:
        said = _one_line(captured.getvalue())
        raise Refused(where + said + _stray(said.partition("Unrecognized options: ")[2], config_class)) from None


def _stray(words: str, config_class: Any) -> str:
    """A hint about words that belong to no flag, as listed by tyro; "" if there are none."""
    first, fields = words.split(",")[0], config_class.__dataclass_fields__
    name, is_assignment, value = first.lstrip("-").partition("=")
    if first.startswith("-"):
        return hint(name, fields, _file_of(config_class)) or "; a flag begins with two dashes"
    if is_assignment:
        return f"; a flag begins with two dashes: --{name} {value}" + hint(name, fields, _file_of(config_class))
    return "; each value stands behind its flag, as in --data FOLDER" if first else ""


def _file_of(config_class: type) -> Path:
    """The file of the recipe that defines a configuration."""
    return Path(getattr(sys.modules[config_class.__module__], "__file__", ""))


_PLAINER = {  # messages of tyro, and the same in the style of the other refusals
    r"Error parsing (\S+): invalid literal for int\(\) with base 10: '(.*)'": "{0} {1}: must be a whole number",
    r"Error parsing (\S+): could not convert string to float: '(.*)'": "{0} {1}: must be a number",
    r"invalid choice '(.*)' for argument '(\S+)'. Expected one of \((.*)\).": "{1} {0}: must be one of {2}",
    r"Missing value for argument '(\S+)'.*": "{0} needs a value",
}


def _one_line(box: str) -> str:
    """The message in the box that tyro draws (with dashes if the terminal has no UTF-8): from its title to the first rule."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│ ") for line in box.splitlines()[1:]]
    message = []
    for line in lines:
        if set(line) - set("─╰╯-"):
            message.append(line)
        elif message:
            break
    said = " ".join(message)
    for theirs, ours in _PLAINER.items():
        if found := re.fullmatch(theirs, said):
            return ours.format(*(group.replace("'", "") for group in found.groups()))
    return said
