"""The text of --help: the flags that people use, or all of them, in groups."""

import ast
import dataclasses
import inspect
import os
import shutil
import textwrap
from typing import Any, NoReturn, get_args, get_type_hints

from common.config.fields import get_field_names, get_fields_with

_CONFIG = """  --config FILE
      YAML file of flags without dashes, such as a preset or a run's config.yaml; flags on the
      command line override it."""


def print_help(config_class: type, config: Any, program: str, shows_all: bool) -> NoReturn:
    """Print flags with their values in `config`, the recipe's own groups first, and exit.

    Without `shows_all`, only the flags that people use. One process per machine prints.
    """
    titles = _get_titles(config_class)
    names = get_field_names(config_class)
    if not shows_all:
        common_names = get_fields_with(config_class, "is_common")
        names = [name for name in names if name in common_names]
    descriptions = _read_descriptions(config_class)
    kinds = get_type_hints(config_class)
    groups: dict[str, list[str]] = {"file": [_CONFIG]}
    for name in names:
        value = getattr(config, name)
        flag = _format_flag(name, kinds[name], value, descriptions[name])
        groups.setdefault(titles[name], []).append(flag)
    paragraphs = [f"usage: {program} [--config FILE] [--FLAG VALUE] ...", str(config_class.__doc__)]
    if not shows_all:
        num_flags = 1 + len(names)
        paragraphs.append(
            f"These are {num_flags} of {1 + len(titles)} flags; --help all shows every one."
        )
    for title, flags in groups.items():
        lines = "\n".join(flags)
        paragraphs.append(f"{title}:\n{lines}")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("\n\n".join(paragraphs), flush=True)
    raise SystemExit


def _format_flag(name: str, kind: Any, value: Any, description: str) -> str:
    """The lines about a flag: its name and type, and its description with its value."""
    choices = ",".join(map(str, get_args(kind)))
    if kind is bool:
        flag = f"--{name}, --no_{name}"
    elif choices:
        flag = f"--{name} {{{choices}}}"
    else:
        flag = f"--{name} {kind.__name__.upper()}"
    if value == "":
        value = "none"
    width = min(shutil.get_terminal_size().columns, 120)
    indent = " " * 6
    text = f"{description} [{value}]"
    lines = textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)
    return f"  {flag}\n{lines}"


def _get_titles(config_class: Any) -> dict[str, str]:
    """The group of each field: the heading before it where it is declared first."""
    titles: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        title = "recipe"
        for name in vars(base).get("__annotations__", {}):
            if name not in titles:
                title = config_class.__dataclass_fields__[name].metadata.get("heading", title)
                titles[name] = title
    return titles


def _read_descriptions(config_class: type) -> dict[str, str]:
    """The docstring under each field in the source, without its line breaks; "" without a docstring."""
    descriptions = {field.name: "" for field in dataclasses.fields(config_class)}
    for base in reversed(config_class.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, docstring in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(docstring, ast.Expr)
                and isinstance(docstring.value, ast.Constant)
            ):
                words = str(docstring.value.value).split()
                descriptions[ast.unparse(field.target)] = " ".join(words)
    return descriptions
