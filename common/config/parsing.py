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
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from common.config.fields import field_names, fields_with
from common.config.help import print_help
from common.config.origin import Origin, read_origin
from common.config.secrets import check_secrets, printable_name
from common.config.synonyms import hint
from common.durable import replace_file
from common.errors import Refused
from common.files import SMALL, read_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

_MOST = 2**63 - 1  # the largest integer that torch takes
_KINDS = {int: "a whole number", float: "a number"}


def parse(config_class: type[C], argv: list[str] | None = None, program: str = "") -> C:
    """The configuration: defaults of `config_class`, overridden by `--config file.yaml`, overridden by flags.

    With `--eval_only`, the configuration of the run that made the weights replaces the defaults;
    other fields may decide on defaults, too (`option(decides=...)`). Raises `Refused` for an
    unknown flag or key, and for a value that is missing, of the wrong type or beyond its limits.

    Args:
        argv: the command line without the program's name (default: of this process).
        program: the program's name for messages (default: of this process).
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    program = program or Path(sys.argv[0]).name
    asked = next((place for place, word in enumerate(argv) if word in ("-h", "--help")), len(argv))
    path, given = _of_words(argv[:asked], config_class)
    if path is not None:
        given = _of_file(_read(path), config_class, f"--config {path}: ", given) | given
    config = config_class(**given)
    if asked < len(argv):
        print_help(config_class, config, program, everything="all" in argv[asked + 1 : asked + 2])
    fields = {field.name: field for field in dataclasses.fields(_checked(config))}
    if getattr(config, "eval_only", ""):
        origin = read_weights(config)
        return _checked(_set_weights(_for_evaluation(config_class, origin, given, program), origin))
    for field in fields.values():
        value, metadata = getattr(config, field.name), field.metadata
        if not value and metadata.get("required"):
            raise Refused(f"--{field.name} is missing: {metadata['required']}")
        if value and metadata.get("decides"):
            decided = _of_file(
                metadata["decides"](value), config_class, f"--{field.name} {value}: "
            )
            config = _checked(config_class(**decided | given))
    return config


def read_weights(config: Any) -> Origin:
    """What the weights of `--eval_only` say about themselves. Raises `Refused`."""
    field = type(config).__dataclass_fields__["eval_only"]
    read = field.metadata.get("origin", read_origin)
    return read(config.eval_only, fields_with(config, "is_recorded"))


def weight_fields(config: Any) -> list[str]:
    """The fields that say which weights a model is built with; `--eval_only` sets them."""
    fields = type(config).__dataclass_fields__
    targets = [
        fields[name].metadata["weights_into"] for name in fields_with(config, "weights_into")
    ]
    return fields_with(config, "is_weights") + targets


def _set_weights(config: C, origin: Origin) -> C:
    """`config` with an exported model in place of the weights that its training began with.

    A checkpoint is loaded into the model once that is built. Raises `Refused` if a flag names
    another model than the export.
    """
    fields = type(config).__dataclass_fields__
    values = {name: fields[name].default for name in fields_with(config, "is_weights")}
    target = fields["eval_only"].metadata.get("weights_into")
    if target and not origin.is_alone:
        value, exported = getattr(config, target), origin.config.get(target)
        if target not in values and value != exported:
            raise Refused(
                f"--{target} {value}: {origin.path} brings its own {target}, {exported}; leave "
                f"--{target} out"
            )
        values[target] = origin.path
    return dataclasses.replace(config, **values)


def _checked(config: C) -> C:
    """`config`, if all values are within their limits. Raises `Refused`."""
    check_secrets(str(getattr(config, "data", "")))
    for field in dataclasses.fields(config):
        value, low, high = (
            getattr(config, field.name),
            field.metadata.get("low"),
            field.metadata.get("high"),
        )
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise Refused(
                f"--{field.name} {value!a:.100}: holds bytes that are no text (UTF-8); rename "
                "what it names"
            )
        if value == "" and field.default != "":
            raise Refused(
                f"--{field.name} is empty: give it a value, or leave it out for {field.default}"
            )
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
    replace_file(
        path, yaml.safe_dump(dict(everything), sort_keys=False, allow_unicode=plain).encode()
    )


def identity(config) -> dict:
    """The fields that define the run: all except those that may change when it resumes."""
    values = dataclasses.asdict(config)
    for field in dataclasses.fields(config):
        is_unused = field.metadata.get("later") and values[field.name] == field.default
        if is_unused or field.metadata.get("may_change"):
            del values[field.name]
    return values


def short_hash(values: dict) -> str:
    """A hash of `values`, six hex digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]


def nearest(name: str, names) -> str:
    """The end of a message about an unknown name: `; did you mean X, Y?`, or "" if no name is similar."""
    close = difflib.get_close_matches(name, set(names), n=3, cutoff=0.6)
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
        files = [*path.parent.glob("*.yaml"), *Path("recipes/presets").glob("*.yaml")]
        # Each file once, also if both folders are the same.
        presets = {file.resolve(): str(file) for file in files}.values()
        same = next((file for file in presets if Path(file).stem == path.stem), "")
        near = f"; did you mean {same}?" if same else nearest(str(path), presets)
        raise Refused(
            f"--config {path}: {'a folder, not a' if path.is_dir() else 'no such'} file{near}"
        ) from None
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


def _of_file(
    content: dict, config_class: type, where: str, given: Container[str] = ()
) -> dict[str, Any]:
    """The content of a YAML file as values by field. `where` begins messages. Fields in `given`
    replace its own.

    A stranger may have written it, and a URL in it would send the value of a variable of the
    environment to a server.
    """
    kinds, recipe = _kinds(config_class), _file_of(config_class)
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in kinds:
            raise Refused(
                f"{where}unknown key "
                f"{key}{hint(str(key), kinds, recipe) or nearest(str(key), kinds)}"
            )
        if isinstance(value, dict | list) or value is None:
            raise Refused(f"{where}{key} must be a single value, not {type(value).__name__}")
        if (kinds[key] is bool) != isinstance(value, bool):
            right = "true or false" if kinds[key] is bool else "of the right type"
            raise Refused(f"{where}{key}: {value!r} is not {right}")
        values[key] = _typed(key, value, kinds[key], where)
        if key not in given and re.search(r"://.*\$", str(value), re.DOTALL):
            advice = f"which is filled in only where you type it; give --{key} again as a flag"
            raise Refused(
                f"{where}{key} {printable_name(value):.200} names a variable of the environment, "
                f"{advice}"
            )
    return values


def _of_words(words: Sequence[str], config_class: type) -> tuple[Path | None, dict[str, Any]]:
    """The file that --config names, and the values by field of all other flags."""
    kinds, recipe = _kinds(config_class) | {"config": str}, _file_of(config_class)
    values: dict[str, Any] = {}
    rest = [*words]
    while rest:
        word = rest.pop(0)
        flag, assigned, value = word.partition("=")
        if not flag.startswith("--"):
            name = flag.lstrip("-")
            way = "each value stands behind its flag, as in --data FOLDER"
            if assigned or flag.startswith("-"):
                way = f"a flag begins with two dashes{f': --{name} {value}' if assigned else ''}"
            raise Refused(f"{word}: is no flag; {way}{hint(name, kinds, recipe)}")
        name = flag.removeprefix("--").replace("-", "_")
        switch = name if name in kinds else name.removeprefix("no_")
        if switch not in kinds or (switch != name and kinds[switch] is not bool):
            near = (
                hint(name, kinds, recipe) or nearest(name, kinds) or "; --help all lists all flags"
            )
            raise Refused(f"unknown flag {flag}{near}")
        if kinds[switch] is bool:
            if assigned or (rest and rest[0].lower() in ("true", "false", "0", "1")):
                raise Refused(f"{flag} takes no value: give --{switch} or --no_{switch}")
            values[switch] = switch == name
            continue
        if not assigned and rest and not rest[0].startswith("--"):
            assigned, value = "=", rest.pop(0)
        if not assigned or (name == "config" and not value):
            raise Refused(
                f"{flag} needs {'the path of a YAML file' if name == 'config' else 'a value'}"
            )
        if name == "config" and name in values:
            raise Refused("--config is given twice: name one file and set the rest by flags")
        values[name] = _typed(name, value, kinds[name])
    path = values.pop("config", None)
    return None if path is None else Path(path), values


def _typed(name: str, value: Any, kind: Any, where: str = "") -> Any:
    """`value` in the type of its field."""
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
        raise Refused(f"{where}--{name} {value!s:.100}: must be {_KINDS[kind]}") from None


def _for_evaluation(
    config_class: type[C], origin: Origin, given: dict[str, Any], program: str
) -> C:
    """The configuration of the run that made these weights, overridden by the `given` values.

    Raises `Refused` if that was a run of another recipe, or if neither the run nor a flag names the data.
    """
    weights = origin.path
    fixed = {
        field.name
        for field in dataclasses.fields(config_class)
        if not field.metadata.get("may_change")
    }
    unknown = [name for name in origin.config if not hasattr(config_class, name)]
    if (
        origin.run
        and unknown
        and fixed & config_class.__annotations__.keys() - origin.config.keys()
    ):
        named = ", ".join(f"--{name}" for name in unknown[:5])
        raise Refused(
            f"--eval_only {weights}: its run has flags that {program} does not know ({named}); "
            "evaluate it with the recipe that trained it, "
            f"{origin.run.get('recipe') or 'another one'}"
        )
    known = {name: value for name, value in origin.config.items() if name not in unknown}
    of_run = _of_file(known, config_class, f"--eval_only {weights}: ", given)
    config = config_class(**of_run | given)
    data = getattr(config, "data", "")
    if not data:
        raise Refused(
            f"--eval_only {weights}: does not say which data it was trained on; add --data"
        )
    if origin.trained_on(data):
        return config
    of_data = fields_with(config_class, "reads_data")
    return config_class(
        **{name: value for name, value in of_run.items() if name not in of_data} | given
    )


def _kinds(config_class: type) -> dict[str, Any]:
    """The types of the fields. Raises `Refused` for one that a flag can't have."""
    hints = get_type_hints(config_class)
    for name in (field.name for field in dataclasses.fields(config_class)):
        if hints[name] not in (bool, int, float, str) and get_origin(hints[name]) is not Literal:
            raise Refused(
                f"{config_class.__name__}.{name}: {hints[name]} can't be given as a flag; take "
                "bool, int, float, str or "
                'Literal, such as a text of numbers, "8,11"'
            )
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class)}


def _file_of(config_class: type) -> Path:
    """The file of the recipe that defines a configuration."""
    return Path(getattr(sys.modules[config_class.__module__], "__file__", ""))
