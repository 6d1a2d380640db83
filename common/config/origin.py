"""Origin of the weights in a folder: the run that made them, its configuration and its classes.

A checkpoint records them in `record.json`, an exported `best/` in `run.json` and `config.json`. A
folder that another program wrote has only a `config.json`, which may lack the names of the classes.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import Refused, describe_error
from common.files import MEDIUM, check_regular, read_text

RUN_FILE = "run.json"
_NAMED = 5  # how many names a message has


@dataclass(frozen=True)
class Origin:
    """What a folder says about the weights in it."""

    path: str  # as it was given
    # A state dict for the model that the recipe builds (a checkpoint, or a plain nn.Module), not a
    # timm folder.
    is_alone: bool
    run: dict  # the result of `made_by`; empty if the folder names no run
    config: dict  # defaults of the flags under `--eval_only`
    classes: tuple[str, ...]  # names by class id; empty if the folder does not name them
    count: int | None  # of classes, if known

    def describe(self, config: Mapping, data_fields: Sequence[str]) -> str:
        """A line that names the weights, and the settings of `config` that differ from their run's.

        `data_fields` say how data are read: a difference in them is expected if the data are others.
        """
        of = (
            f" of the run {self.run['name']}, step {self.run.get('step')}"
            if self.run
            else ", which names no run"
        )
        parts, had = (
            [f"evaluating {self.path}{of}"],
            "the run had" if self.run else "the folder has",
        )
        unsaid = ["eval_only"]
        if not self.trained_on(config["data"]):
            unsaid.extend(data_fields)
        if not self.run:
            unsaid.append("data")
        for key, value in self.config.items():
            if key not in config:
                parts += (
                    [f"without --{key} {value} of the run, a flag that is not known here"]
                    if self.run
                    else []
                )
            elif config[key] != value and key not in unsaid:
                theirs = (
                    value
                    if value or (self.run and value != "")
                    else "none"
                    if self.run
                    else "its own"
                )
                parts.append(f"--{key} {config[key]}, where {had} {theirs}")
        return "; ".join(parts)

    def trained_on(self, data: str) -> bool:
        """True if the run was trained on `data`, whose held-out part alone may be evaluated.

        A folder of the same name is taken for the same data, moved, if that of the run is not there.
        """
        recorded = str(self.config.get("data") or "")
        if os.path.isabs(recorded) and not os.path.exists(recorded):
            return Path(recorded).name == Path(data).name
        return bool(recorded) and _place(recorded) == _place(data)

    def places(self, classes: Sequence[str], data: str, called: Mapping[str, str]) -> list[int]:
        """The model's class id of each name in `classes`, the classes of the data set `data`.

        `called` has the model's names of classes that have another name in the data. If the model's
        classes have no names, they are assumed to be in the same order. Raises `Refused` for a name
        that the model does not know, and for another number of classes if they have no names.
        """
        if not self.classes:
            if self.count not in (None, len(classes)):
                raise Refused(
                    f"{self.path} has {self.count} classes without names, --data {data} has "
                    f"{len(classes)}: evaluate it on data of its own classes"
                )
            return list(range(len(classes)))
        found = places_of([called.get(name, name) for name in classes], self.classes)
        if unknown := [name for name, place in zip(classes, found, strict=True) if place is None]:
            raise Refused(
                f"{self.path} does not know {len(unknown)} of the {len(classes)} classes of "
                f"--data {data} ({some(unknown)}); it knows {some(self.classes)}: evaluate it on "
                "data of its own classes"
            )
        return [place for place in found if place is not None]

    def matched(self, classes: Sequence[str]) -> str:
        """How the classes of the data correspond to the model's, in words."""
        if not self.classes:
            return "taken to be the model's, which have no names, in this order"
        if len(classes) < len(self.classes):
            return f"of the {len(self.classes)} that the model knows"
        return "those of the model" + (
            "" if tuple(classes) == self.classes else ", which has them in another order"
        )


def read_origin(path: str, recorded: Sequence[str] = ()) -> Origin:
    """The origin of the weights in the folder `path`; of a run folder, its best/ is meant.

    Raises `Refused` if it has no weights or can't be read. `recorded` are fields that an evaluation
    of a checkpoint needs beside the run's identity, see `made_by`.
    """
    folder = Path(path)
    if (folder / "config.yaml").is_file() and (folder / "best/config.json").is_file():
        folder = folder / "best"
        path = str(folder)
    is_checkpoint = (folder / "manifest.json").is_file()
    if not is_checkpoint and not (folder / "config.json").is_file():
        if (folder / "config.yaml").is_file() or (folder / "checkpoints").is_dir():
            raise Refused(
                f"--eval_only {path}: this run has no best/ yet; name a folder in "
                f"{folder / 'checkpoints'}"
            )
        found = (
            "neither config.json nor manifest.json is in it"
            if folder.exists()
            else "nothing is there"
        )
        raise Refused(
            f"--eval_only {path}: no exported model and no checkpoint, {found}; name a run's best/"
        )
    try:
        check_regular(folder)
        if not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir()):
            raise Refused(
                f"--eval_only {path}: has no weights (model.safetensors); copy the whole folder"
            )
        if is_checkpoint:
            record = _read(folder / "record.json")
            content = {}
            run = made_by({"name": folder.absolute().parent.parent.name} | record, recorded)
            names = record.get("classes", [])
        else:
            content = _read(folder / "config.json")
            run = _read(folder / RUN_FILE) if (folder / RUN_FILE).is_file() else {}
            names = label_names(content)
        config = run["config"] if run else _own(content)
        if run and not (isinstance(config, dict) and {"name", "step"} <= run.keys()):
            raise ValueError(f"{RUN_FILE} is not as a run writes it")
        count = len(names) or content.get("num_classes")
        return Origin(
            path, is_checkpoint or "module" in content, run, config, tuple(map(str, names)), count
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = describe_error(error)
        raise Refused(
            f"--eval_only {path} is incomplete ({reason}); copy it again, or name another"
        ) from None


def places_of(names: Sequence[str], known: Sequence[str]) -> list[int | None]:
    """Index in `known` of each of `names`, None if it is not there. A name is the same in any case,
    and with _, - or a space.

    If several are the same, the one that is equal is meant, else the first.
    """
    exact = {name: number for number, name in reversed([*enumerate(known)])}
    alike = {_plain(name): number for number, name in reversed([*enumerate(known)])}
    return [exact.get(name, alike.get(_plain(name))) for name in names]


def _plain(name: str) -> str:
    return " ".join(re.split("[\\s_-]+", name.strip().casefold()))


def made_by(record: Mapping, recorded: Sequence[str] = ()) -> dict:
    """The content of `run.json`, from a checkpoint's record: name, recipe, step, commit and
    configuration of the run.

    The configuration is the run's identity and the fields `recorded`, which its evaluations depend on.
    """
    known = {key: record.get(key) for key in ("name", "recipe", "step")}
    keys = list(record["identity"]) + list(recorded)
    config = {key: record["config"][key] for key in keys if key in record["config"]}
    return known | {"commit": record.get("environment", {}).get("commit"), "config": config}


def by_name(results: dict, classes: Sequence[str]) -> dict:
    """`results`, with each list of one value per class as a dict: [0.5, 1.0] -> {"cat": 0.5, "dog": 1.0}.

    A list may be longer than `classes`; the rest is left out.
    """
    return {
        key: dict(zip(classes, value, strict=False)) if isinstance(value, list) else value
        for key, value in results.items()
    }


def _read(file: Path) -> dict:
    content = json.loads(read_text(file, MEDIUM))
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} holds a {type(content).__name__}")
    return content


def label_names(content: Mapping) -> list[str]:
    """Class names, by class id, in the configuration of an exported model; empty if it has none, or
    two alike.
    """
    own = content.get("pretrained_cfg") or {}
    names = (
        content.get("label_names")
        or own.get("label_names")
        or content.get("classes")
        or content.get("id2label")
    )
    if isinstance(names, Mapping):
        names = [names.get(number, names.get(str(number))) for number in range(len(names))]
    return [*names] if names and None not in names and len(set(names)) == len(names) else []


def _own(content: dict) -> dict:
    """Defaults for a timm folder that names no run: its own sizes. Its data must be given."""
    return {"data": "", "image_size": 0, "crop_pct": 0.0, "model": content.get("architecture", "")}


def _place(data: str) -> str:
    """The real path of `data` if it exists; else `data` unchanged."""
    return (
        os.path.realpath(os.path.expanduser(data))
        if os.path.exists(os.path.expanduser(data))
        else data
    )


def some(names: Sequence[str]) -> str:
    """The first few of `names`, for a message."""
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
