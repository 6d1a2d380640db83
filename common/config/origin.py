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
from typing import Any, NoReturn

from common.errors import Refused, describe_error
from common.files import MEDIUM, check_regular, read_text

RUN_FILE = "run.json"
_MAX_NAMES = 5  # in a message


@dataclass(frozen=True)
class Origin:
    """What a folder says about the weights in it."""

    path: str  # as the flag names it
    # True for a state dict of the model that the recipe builds (a checkpoint, or a plain nn.Module),
    # False for a timm folder.
    is_state_dict: bool
    run: dict  # the result of `build_run_info`; empty if the folder names no run
    config: dict  # defaults of the flags under `--eval_only`
    classes: tuple[str, ...]  # names by class id; empty if the folder does not name them
    num_classes: int | None  # if known

    def describe(self, config: Mapping, data_fields: Sequence[str]) -> str:
        """A line that names the weights, and the settings of `config` that differ from their run's.

        `data_fields` say how data are read: a difference in them is expected if the data are others.
        """
        if self.run:
            run = f" of the run {self.run['name']}, step {self.run.get('step')}"
            source = "the run had"
        else:
            run = ", which names no run"
            source = "the folder has"
        ignored = {"eval_only"}
        if not self.trained_on(config["data"]):
            ignored.update(data_fields)
        if not self.run:
            ignored.add("data")
        texts = [f"evaluating {self.path}{run}"]
        for name, value in self.config.items():
            if name not in config:
                if self.run:
                    texts.append(
                        f"without --{name} {value} of the run, a flag that is not known here"
                    )
            elif config[name] != value and name not in ignored:
                value_text = self._format_value(value)
                texts.append(f"--{name} {config[name]}, where {source} {value_text}")
        return "; ".join(texts)

    def _format_value(self, value: Any) -> str:
        """A setting for people. In a folder that names no run, an empty one is the model's own."""
        if value:
            return str(value)
        if not self.run:
            return "its own"
        return "none" if value == "" else str(value)

    def trained_on(self, data: str) -> bool:
        """True if the run was trained on `data`, whose held-out part alone may be evaluated.

        A folder of the same name is taken for the same data, moved, if that of the run is not there.
        """
        recorded = self.config.get("data")
        if not recorded:
            return False
        recorded = str(recorded)
        if os.path.isabs(recorded) and not os.path.exists(recorded):
            return Path(recorded).name == Path(data).name
        return _resolve(recorded) == _resolve(data)

    def get_class_ids(
        self, classes: Sequence[str], data: str, aliases: Mapping[str, str]
    ) -> list[int]:
        """The model's class id of each name in `classes`, the classes of the data set `data`.

        `aliases` has the model's names of classes that have another name in the data. If the
        model's classes have no names, they are assumed to be in the same order. Raises `Refused`
        for a name that the model does not know, and for another number of classes without names.
        """
        if not self.classes:
            if self.num_classes not in (None, len(classes)):
                raise Refused(
                    f"{self.path} has {self.num_classes} classes without names, --data {data} has "
                    f"{len(classes)}: evaluate it on data of its own classes"
                )
            return list(range(len(classes)))
        class_ids = []
        unknown = []
        model_names = [aliases.get(name, name) for name in classes]
        for name, class_id in zip(classes, find_indices(model_names, self.classes), strict=True):
            if class_id is None:
                unknown.append(name)
            else:
                class_ids.append(class_id)
        if unknown:
            raise Refused(
                f"{self.path} does not know {len(unknown)} of the {len(classes)} classes of "
                f"--data {data} ({format_names(unknown)}); it knows {format_names(self.classes)}: "
                "evaluate it on data of its own classes"
            )
        return class_ids

    def describe_classes(self, classes: Sequence[str]) -> str:
        """How the classes of the data correspond to the model's, for people."""
        if not self.classes:
            return "taken to be the model's, which have no names, in this order"
        if len(classes) < len(self.classes):
            return f"of the {len(self.classes)} that the model knows"
        if tuple(classes) != self.classes:
            return "those of the model, which has them in another order"
        return "those of the model"


def read_origin(path: str, recorded: Sequence[str] = ()) -> Origin:
    """The origin of the weights in the folder `path`; of a run folder, its best/ is meant.

    Raises `Refused` if it has no weights or can't be read. `recorded` are fields that an evaluation
    of a checkpoint needs beside the run's identity, see `build_run_info`.
    """
    folder = Path(path)
    if (folder / "config.yaml").is_file() and (folder / "best/config.json").is_file():
        folder = folder / "best"
        path = str(folder)
    is_checkpoint = (folder / "manifest.json").is_file()
    if not is_checkpoint and not (folder / "config.json").is_file():
        _refuse_folder(path, folder)
    try:
        check_regular(folder)
        if not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir()):
            raise Refused(
                f"--eval_only {path}: has no weights (model.safetensors); copy the whole folder"
            )
        if is_checkpoint:
            return _read_checkpoint(path, folder, recorded)
        return _read_export(path, folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = describe_error(error)
        raise Refused(
            f"--eval_only {path} is incomplete ({reason}); copy it again, or name another"
        ) from None


def _refuse_folder(path: str, folder: Path) -> NoReturn:
    """Raise `Refused` for a folder that has neither an exported model nor a checkpoint."""
    if (folder / "config.yaml").is_file() or (folder / "checkpoints").is_dir():
        raise Refused(
            f"--eval_only {path}: this run has no best/ yet; name a folder in "
            f"{folder / 'checkpoints'}"
        )
    problem = "nothing is there"
    if folder.exists():
        problem = "neither config.json nor manifest.json is in it"
    raise Refused(
        f"--eval_only {path}: no exported model and no checkpoint, {problem}; name a run's best/"
    )


def _read_checkpoint(path: str, folder: Path, recorded: Sequence[str]) -> Origin:
    """The origin of a checkpoint. Raises an error of many types if its record is damaged."""
    record = _read_json(folder / "record.json")
    run = build_run_info({"name": folder.absolute().parent.parent.name} | record, recorded)
    classes = tuple(map(str, record.get("classes", [])))
    num_classes = len(classes) if classes else None
    return Origin(path, True, run, run["config"], classes, num_classes)


def _read_export(path: str, folder: Path) -> Origin:
    """The origin of an exported model. Raises an error of many types if a file is damaged."""
    content = _read_json(folder / "config.json")
    run = _read_json(folder / RUN_FILE) if (folder / RUN_FILE).is_file() else {}
    config = run["config"] if run else _get_own_settings(content)
    if run and not (isinstance(config, dict) and {"name", "step"} <= run.keys()):
        raise ValueError(f"{RUN_FILE} is not as a run writes it")
    classes = tuple(map(str, get_class_names(content)))
    num_classes = len(classes) if classes else content.get("num_classes")
    return Origin(path, "module" in content, run, config, classes, num_classes)


def find_indices(names: Sequence[str], known_names: Sequence[str]) -> list[int | None]:
    """Index in `known_names` of each of `names`, None if it is not there.

    Upper and lower case are the same, and so are _, - and a space. If several are the same, the one
    that is equal is meant, else the first.
    """
    index_by_name: dict[str, int] = {}
    index_by_normal_name: dict[str, int] = {}
    for index, name in enumerate(known_names):
        index_by_name.setdefault(name, index)
        index_by_normal_name.setdefault(_normalize(name), index)
    indices = []
    for name in names:
        indices.append(index_by_name.get(name, index_by_normal_name.get(_normalize(name))))
    return indices


def _normalize(name: str) -> str:
    return " ".join(re.split("[\\s_-]+", name.strip().casefold()))


def build_run_info(record: Mapping, recorded: Sequence[str] = ()) -> dict:
    """The content of `run.json`, from a checkpoint's record.

    It has name, recipe, step, commit and configuration of the run. The configuration is the run's
    identity and the fields `recorded`, which its evaluations depend on.
    """
    info = {key: record.get(key) for key in ("name", "recipe", "step")}
    info["commit"] = record.get("environment", {}).get("commit")
    names = list(record["identity"]) + list(recorded)
    info["config"] = {name: record["config"][name] for name in names if name in record["config"]}
    return info


def key_by_class(results: dict, classes: Sequence[str]) -> dict:
    """`results`, with each list of one value per class as a dict: [0.5, 1.0] -> {"cat": 0.5, "dog": 1.0}.

    A list may be longer than `classes`; the remainder is left out.
    """
    keyed = {}
    for key, value in results.items():
        if isinstance(value, list):
            value = dict(zip(classes, value, strict=False))
        keyed[key] = value
    return keyed


def _read_json(file: Path) -> dict:
    content = json.loads(read_text(file, MEDIUM))
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} holds a {type(content).__name__}")
    return content


def get_class_names(content: Mapping) -> list[str]:
    """Class names, by class id, in the configuration of an exported model.

    Empty if it has none, or two that are equal.
    """
    names = content.get("label_names")
    if not names and content.get("pretrained_cfg"):
        names = content["pretrained_cfg"].get("label_names")
    for key in ("classes", "id2label"):
        if not names:
            names = content.get(key)
    if not names:
        return []
    if isinstance(names, Mapping):
        names = [names.get(class_id, names.get(str(class_id))) for class_id in range(len(names))]
    if None in names or len(set(names)) < len(names):
        return []
    return list(names)


def _get_own_settings(content: dict) -> dict:
    """Defaults for a timm folder that names no run: its own sizes. Its data must be named by a flag."""
    return {"data": "", "image_size": 0, "crop_pct": 0.0, "model": content.get("architecture", "")}


def _resolve(data: str) -> str:
    """The real path of `data` if it exists; else `data` unchanged."""
    path = os.path.expanduser(data)
    return os.path.realpath(path) if os.path.exists(path) else data


def format_names(names: Sequence[str]) -> str:
    """The first few of `names`, for a message."""
    text = ", ".join(names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
        text += ", ..."
    return text
