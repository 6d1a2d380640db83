"""Parsing: turns a dataclass of defaults, a YAML file and the command line into one checked configuration.

A field is a bool, an int, a float, a str, or one of some values (Literal). A YAML file is a list of
flags; flags override it.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import re
import sys
from collections.abc import Collection, Container, Sequence
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

from common.config.fields import get_field_names, get_fields_with
from common.config.help import print_help
from common.config.origin import Origin, read_origin
from common.config.secrets import check_secrets, redact_name
from common.config.synonyms import suggest_flag
from common.durable import replace_file
from common.errors import Refused
from common.files import SMALL, read_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

_MAX_INTEGER = 2**63 - 1  # that torch takes
_TYPE_NAMES = {int: "a whole number", float: "a number"}


def parse(config_class: type[C], argv: list[str] | None = None, program: str = "") -> C:
    """The configuration: defaults of `config_class`, overridden by `--config file.yaml`, overridden by flags.

    With `--eval_only`, the configuration of the run that made the weights replaces the defaults;
    other fields may decide on defaults, too (`option(defaults_from=...)`). Raises `Refused` for an
    unknown flag or key, and for a value that is missing, of the wrong type or beyond its limits.

    Args:
        argv: the command line without the program's name (default: of this process).
        program: the program's name for messages (default: of this process).
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not program:
        program = Path(sys.argv[0]).name
    help_index = _find_help(argv)
    path, flag_values = _parse_flags(argv[:help_index], config_class)
    if path is not None:
        file_values = _parse_values(
            _read_file(path), config_class, f"--config {path}: ", overridden=flag_values
        )
        flag_values = file_values | flag_values
    config = config_class(**flag_values)
    if help_index < len(argv):
        shows_all = argv[help_index + 1 : help_index + 2] == ["all"]
        print_help(config_class, config, program, shows_all)
    _check(config)
    if getattr(config, "eval_only", ""):
        origin = read_eval_origin(config)
        config = _get_eval_config(config_class, origin, flag_values, program)
        return _check(_set_weights(config, origin))
    for field in dataclasses.fields(config_class):
        value = getattr(config, field.name)
        if not value and field.metadata.get("required"):
            raise Refused(f"--{field.name} is missing: {field.metadata['required']}")
        if value and field.metadata.get("defaults_from"):
            defaults = field.metadata["defaults_from"](value)
            decided_values = _parse_values(defaults, config_class, f"--{field.name} {value}: ")
            config = _check(config_class(**decided_values | flag_values))
    return config


def _find_help(argv: Sequence[str]) -> int:
    """The index of --help; `len(argv)` without it."""
    for index, arg in enumerate(argv):
        if arg in ("-h", "--help"):
            return index
    return len(argv)


def read_eval_origin(config: Any) -> Origin:
    """The origin of the weights of `--eval_only`. Raises `Refused`."""
    field = type(config).__dataclass_fields__["eval_only"]
    read = field.metadata.get("origin", read_origin)
    return read(config.eval_only, get_fields_with(config, "is_recorded"))


def get_weight_fields(config: Any) -> list[str]:
    """The fields that say which weights a model is built with; `--eval_only` sets them."""
    fields = type(config).__dataclass_fields__
    names = get_fields_with(config, "is_weights")
    for name in get_fields_with(config, "weights_field"):
        names.append(fields[name].metadata["weights_field"])
    return names


def _set_weights(config: C, origin: Origin) -> C:
    """`config` with an exported model in place of the weights that its training began with.

    A checkpoint is loaded into the model once that is built. Raises `Refused` if a flag names
    another model than the export.
    """
    fields = type(config).__dataclass_fields__
    values = {name: fields[name].default for name in get_fields_with(config, "is_weights")}
    target = fields["eval_only"].metadata.get("weights_field")
    if target and not origin.is_state_dict:
        value = getattr(config, target)
        exported = origin.config.get(target)
        if target not in values and value != exported:
            raise Refused(
                f"--{target} {value}: {origin.path} brings its own {target}, {exported}; leave "
                f"--{target} out"
            )
        values[target] = origin.path
    return dataclasses.replace(config, **values)


def _check(config: C) -> C:
    """`config`, if all values are within their limits. Raises `Refused`."""
    check_secrets(str(getattr(config, "data", "")))
    for field in dataclasses.fields(config):
        _check_value(field, getattr(config, field.name))
    return config


def _check_value(field: dataclasses.Field, value: Any) -> None:
    """Raise `Refused` for a value beyond the limits of its field."""
    flag = f"--{field.name}"
    low = field.metadata.get("low")
    high = field.metadata.get("high")
    check = field.metadata.get("check")
    if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
        raise Refused(
            f"{flag} {value!a:.100}: holds bytes that are no text (UTF-8); rename what it names"
        )
    if value == "" and field.default != "":
        raise Refused(f"{flag} is empty: give it a value, or leave it out for {field.default}")
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused(f"{flag} {value}: must be a finite number")
    if (low is not None and value < low) or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise Refused(f"{flag} {value!s:.100}: must be {limit}")
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        raise Refused(f"{flag} {value!s:.100}: must be at most {_MAX_INTEGER}")
    if check:
        problem = check(value)
        if problem:
            raise Refused(f"{flag} {value:.100}: {problem}")


def save_config(config, path: Path) -> None:
    """Write the complete configuration as a file for `--config`, the recipe's own fields first."""
    values_by_field = dataclasses.asdict(config)
    values = {name: values_by_field[name] for name in get_field_names(type(config))}
    text = "".join(map(str, values.values()))
    # YAML keeps the line separators of Unicode only if they are escaped.
    allow_unicode = not re.search("[\x85\u2028\u2029]", text)
    content = yaml.safe_dump(values, sort_keys=False, allow_unicode=allow_unicode)
    replace_file(path, content.encode())


def get_identity(config) -> dict:
    """The fields that define the run: all except those that may change when it resumes."""
    values = dataclasses.asdict(config)
    for field in dataclasses.fields(config):
        is_unused = field.metadata.get("is_new") and values[field.name] == field.default
        if is_unused or field.metadata.get("may_change"):
            del values[field.name]
    return values


def compute_short_hash(values: dict) -> str:
    """A hash of `values`, six hex digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]


def suggest_names(name: str, names) -> str:
    """The end of a message about an unknown name: `; did you mean X, Y?`, or "" if no name is similar."""
    matches = difflib.get_close_matches(name, set(names), n=3, cutoff=0.6)
    return f"; did you mean {', '.join(matches)}?" if matches else ""


def suggest_path(path: Path) -> str:
    """The same for a path that does not exist, with the names in its folder; "" if it exists."""
    try:
        if path.exists():
            return ""
        return suggest_names(path.name, [file.name for file in path.parent.iterdir()])
    except (OSError, ValueError):
        return ""


def _suggest_preset(path: Path) -> str:
    """The same for a YAML file, with those in its folder and the presets of the recipes."""
    files = list(path.parent.glob("*.yaml")) + list(Path("recipes/presets").glob("*.yaml"))
    # Each file once, also if both folders are the same.
    presets = {file.resolve(): str(file) for file in files}
    for preset in presets.values():
        if Path(preset).stem == path.stem:
            return f"; did you mean {preset}?"
    return suggest_names(str(path), presets.values())


def _read_file(path: Path) -> dict:
    """The content of a YAML file. Raises `Refused`."""
    try:
        content = read_yaml(path, SMALL)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        problem = "a folder, not a file" if path.is_dir() else "no such file"
        raise Refused(f"--config {path}: {problem}{_suggest_preset(path)}") from None
    except OSError as error:
        raise Refused(f"--config {path}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"--config {path}: not readable as YAML: {error}") from None
    if content is None:  # a file with comments only
        return {}
    if not isinstance(content, dict):
        raise Refused(
            f"--config {path}: must hold `key: value` lines, found a {type(content).__name__}"
        )
    return content


def _parse_values(
    content: dict, config_class: type, where: str, overridden: Container[str] = ()
) -> dict[str, Any]:
    """Values by field from the `content` of a YAML file. Raises `Refused`.

    `where` begins messages. Fields in `overridden` get another value later. A stranger may have
    written the file, and a URL in it would send the value of a variable of the environment to a
    server.
    """
    types = _get_types(config_class)
    values: dict[str, Any] = {}
    for name, value in content.items():
        if name not in types:
            hint = suggest_flag(str(name), types, _get_recipe_file(config_class))
            if not hint:
                hint = suggest_names(str(name), types)
            raise Refused(f"{where}unknown key {name}{hint}")
        if isinstance(value, dict | list) or value is None:
            raise Refused(f"{where}{name} must be a single value, not {type(value).__name__}")
        is_bool = types[name] is bool
        if is_bool != isinstance(value, bool):
            expected = "true or false" if is_bool else "of the right type"
            raise Refused(f"{where}{name}: {value!r} is not {expected}")
        values[name] = _convert(name, value, types[name], where)
        if name not in overridden and re.search(r"://.*\$", str(value), re.DOTALL):
            advice = f"which is filled in only where you type it; give --{name} again as a flag"
            raise Refused(
                f"{where}{name} {redact_name(value):.200} names a variable of the environment, "
                f"{advice}"
            )
    return values


def _parse_flags(args: Sequence[str], config_class: type) -> tuple[Path | None, dict[str, Any]]:
    """The file that --config names, and the values by field of all other flags. Raises `Refused`."""
    types = _get_types(config_class) | {"config": str}
    recipe = _get_recipe_file(config_class)
    values: dict[str, Any] = {}
    remaining = list(args)
    while remaining:
        arg = remaining.pop(0)
        flag, equals_sign, value = arg.partition("=")
        has_value = bool(equals_sign)
        if not flag.startswith("--"):
            _refuse_argument(arg, types, recipe)
        name = flag.removeprefix("--").replace("-", "_")
        field = name if name in types else name.removeprefix("no_")
        if field not in types or (field != name and types[field] is not bool):
            hint = suggest_flag(name, types, recipe)
            if not hint:
                hint = suggest_names(name, types)
            if not hint:
                hint = "; --help all lists all flags"
            raise Refused(f"unknown flag {flag}{hint}")
        next_arg = remaining[0] if remaining else "--"
        if types[field] is bool:
            if has_value or next_arg.lower() in ("true", "false", "0", "1"):
                raise Refused(f"{flag} takes no value: give --{field} or --no_{field}")
            values[field] = field == name
            continue
        if not has_value and not next_arg.startswith("--"):
            value = remaining.pop(0)
            has_value = True
        if name == "config" and not value:
            raise Refused(f"{flag} needs the path of a YAML file")
        if not has_value:
            raise Refused(f"{flag} needs a value")
        if name == "config" and name in values:
            raise Refused("--config is given twice: name one file and set the rest by flags")
        values[name] = _convert(name, value, types[name])
    path = values.pop("config", None)
    return None if path is None else Path(path), values


def _refuse_argument(arg: str, types: Collection[str], recipe: Path) -> NoReturn:
    """Raise `Refused` for an argument where a flag is expected."""
    flag, equals_sign, value = arg.partition("=")
    name = flag.lstrip("-")
    advice = "each value stands behind its flag, as in --data FOLDER"
    if equals_sign:
        advice = f"a flag begins with two dashes: --{name} {value}"
    elif flag.startswith("-"):
        advice = "a flag begins with two dashes"
    raise Refused(f"{arg}: is no flag; {advice}{suggest_flag(name, types, recipe)}")


def _convert(name: str, value: Any, kind: Any, where: str = "") -> Any:
    """`value` in the type of its field. Raises `Refused`."""
    if kind is bool:
        return value
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        if str(value) not in choices:
            raise Refused(f"{where}--{name} {value}: must be one of {', '.join(choices)}")
        return choices[str(value)]
    try:
        return kind(str(value))
    except ValueError:
        raise Refused(f"{where}--{name} {value!s:.100}: must be {_TYPE_NAMES[kind]}") from None


def _get_eval_config(
    config_class: type[C], origin: Origin, flag_values: dict[str, Any], program: str
) -> C:
    """The configuration of the run that made these weights, overridden by `flag_values`.

    Raises `Refused` if that was a run of another recipe, or if neither the run nor a flag names the data.
    """
    content = {}
    unknown = []
    for name, value in origin.config.items():
        if hasattr(config_class, name):
            content[name] = value
        else:
            unknown.append(name)
    if origin.run and unknown and _lacks_fields(origin, config_class):
        flags = ", ".join(f"--{name}" for name in unknown[:5])
        recipe = origin.run.get("recipe")
        if not recipe:
            recipe = "another one"
        raise Refused(
            f"--eval_only {origin.path}: its run has flags that {program} does not know ({flags}); "
            f"evaluate it with the recipe that trained it, {recipe}"
        )
    run_values = _parse_values(
        content, config_class, f"--eval_only {origin.path}: ", overridden=flag_values
    )
    config = config_class(**run_values | flag_values)
    data = getattr(config, "data", "")
    if not data:
        raise Refused(
            f"--eval_only {origin.path}: does not say which data it was trained on; add --data"
        )
    if origin.trained_on(data):
        return config
    for name in get_fields_with(config_class, "reads_data"):
        run_values.pop(name, None)
    return config_class(**run_values | flag_values)


def _lacks_fields(origin: Origin, config_class: type) -> bool:
    """True if the run has no value of a field of the recipe's own that defines a run."""
    for field in dataclasses.fields(config_class):
        is_own = field.name in config_class.__annotations__
        if is_own and not field.metadata.get("may_change") and field.name not in origin.config:
            return True
    return False


def _get_types(config_class: type) -> dict[str, Any]:
    """The types of the fields. Raises `Refused` for one that a flag can't have."""
    hints = get_type_hints(config_class)
    types = {field.name: hints[field.name] for field in dataclasses.fields(config_class)}
    for name, kind in types.items():
        if kind not in (bool, int, float, str) and get_origin(kind) is not Literal:
            raise Refused(
                f"{config_class.__name__}.{name}: {kind} can't be given as a flag; take bool, int, "
                'float, str or Literal, such as a text of numbers, "8,11"'
            )
    return types


def _get_recipe_file(config_class: type) -> Path:
    """The file of the recipe that defines a configuration."""
    return Path(getattr(sys.modules[config_class.__module__], "__file__", ""))
