"""The text of --help: the flags that people use, or all of them, in groups."""

import ast
import dataclasses
import inspect
import os
import shutil
import textwrap
from typing import Any, NoReturn, get_args, get_type_hints

from common.config.fields import field_names, fields_with

_CONFIG = """  --config FILE
      YAML file of flags without dashes, such as a preset or a run's config.yaml; flags on the
      command line override it."""


def print_help(config_class: type, config: Any, program: str, everything: bool) -> NoReturn:
    """Print flags with their values in `config`, the recipe's own groups first, and exit. One
    process per machine prints.
    """
    titles, texts, kinds = _titles(config_class), _texts(config_class), get_type_hints(config_class)
    width = min(shutil.get_terminal_size().columns, 120)
    groups: dict[str, list[str]] = {"file": [_CONFIG]}
    shown = field_names(config_class) if everything else fields_with(config_class, "is_common")
    for name in field_names(config_class):
        if name in shown:
            choices = ",".join(map(str, get_args(kinds[name])))
            kind = f"{{{choices}}}" if choices else kinds[name].__name__.upper()
            value = getattr(config, name)
            flag = f"  --{name}, --no_{name}" if kinds[name] is bool else f"  --{name} {kind}"
            text = f"{texts[name]} [{'none' if value == '' else value}]"
            lines = textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
            groups.setdefault(titles[name], []).append(f"{flag}\n{lines}")
    parts = [f"usage: {program} [--config FILE] [--FLAG VALUE] ...", str(config_class.__doc__)]
    if not everything:
        number = sum(map(len, groups.values()))
        parts.append(f"These are {number} of {1 + len(titles)} flags; --help all shows every one.")
    parts += [f"{title}:\n" + "\n".join(flags) for title, flags in groups.items()]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("\n\n".join(parts), flush=True)
    raise SystemExit


def _titles(config_class: Any) -> dict[str, str]:
    """The group of each field: the heading before it where it is declared first."""
    titles: dict[str, str] = {}
    for declaring in reversed(config_class.__mro__):
        title = "recipe"
        for name in vars(declaring).get("__annotations__", {}):
            if name not in titles:
                title = config_class.__dataclass_fields__[name].metadata.get("heading", title)
                titles[name] = title
    return titles


def _texts(config_class: type) -> dict[str, str]:
    """The docstring under each field in the source, without its line breaks; "" where there is none."""
    texts = {field.name: "" for field in dataclasses.fields(config_class)}
    for declaring in reversed(config_class.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(declaring))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                texts[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return texts
