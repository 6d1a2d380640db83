"""The text of --help: the flags that people use, or all of them, in groups."""

import contextlib
import dataclasses
import io
import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, get_type_hints

import tyro
from docstring_parser import parse_from_object

from common.config.fields import field_names

# `--help` shows these and --config; `--help all` shows every flag.
_OFTEN = """
    data val_share split detector model pretrained init image_size short_sides batch_norm augment hflip
    global_batch_size max_micro_batch_size epochs max_steps seed workers opt lr warmup_epochs ema_decay
    name dry_run eval_only tracker
""".split()


@dataclass
class _Preset:
    config: str = ""
    """YAML file of flags without dashes, such as a preset or a run's config.yaml; flags on the command line override it."""


def print_help(config_class: type, config, program: str, everything: bool) -> NoReturn:
    """Print flags with their values in `config`, the recipe's own groups first, and exit. One process per machine prints."""
    titles = _titles(config_class)
    groups: dict[str, list[str]] = {}
    for name in field_names(config_class):
        if everything or name in _OFTEN:
            groups.setdefault(titles[name], []).append(name)
    parts: list[tuple[str, type, dict]] = [("file", _Preset, {})]
    parts += [(title, _only(config_class, names), dataclasses.asdict(config)) for title, names in groups.items()]
    shown = dataclasses.make_dataclass("Flags", [(title, kind) for title, kind, _ in parts])
    shown.__doc__ = config_class.__doc__
    if not everything:
        number = 1 + sum(map(len, groups.values()))
        shown.__doc__ = f"{shown.__doc__}\n\nThese are {number} of {1 + len(titles)} flags; --help all shows every one."
    default = shown(*(kind(**values) for _, kind, values in parts))
    others = os.environ.get("LOCAL_RANK", "0") != "0"
    try:
        with contextlib.redirect_stdout(io.StringIO()) if others else contextlib.nullcontext():
            plain = (tyro.conf.OmitArgPrefixes,)
            tyro.cli(shown, prog=program, args=["--help"], default=default, use_underscores=True, config=plain)
    except BrokenPipeError:  # the reader has closed the pipe, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports it again when it exits
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


def _only(config_class: Any, names: list[str]) -> type:
    """`config_class` with these of its fields, whose help texts are the docstrings in its source, without their line breaks."""
    kinds = reversed(config_class.__mro__[:-1])
    texts = {doc.arg_name: str(doc.description) for kind in kinds for doc in parse_from_object(kind).params}
    hints = get_type_hints(config_class)
    part: Any = type(config_class.__name__, (config_class,), {"__doc__": ""})
    part.__annotations__ = {
        name: Annotated[hints[name], tyro.conf.arg(help=" ".join(texts[name].split()))] for name in names
    }
    part.__dataclass_fields__ = {name: config_class.__dataclass_fields__[name] for name in names}
    return part
