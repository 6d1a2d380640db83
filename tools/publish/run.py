"""What a run folder says about its best model, for the model card."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from common.checkpoints.store import Damaged, compare
from common.config.origin import read_origin
from common.errors import Refused
from common.files import MEDIUM, SMALL, check_regular, read_text, read_yaml

METRICS = {"top1": "accuracy", "f1": "f1", "AP": "mean_average_precision"}  # the hub's names, by the leading result


@dataclass(frozen=True)
class Finished:
    """What a run folder says about its best model. All values are those of its files."""

    folder: Path
    config: dict  # of the run
    content: dict  # config.json of best/
    results: dict  # of best/
    step: int  # of best/
    summary: dict
    environment: dict
    classes: tuple[str, ...]
    start: dict  # rows of the newest start table
    evaluations: int
    status: str

    @property
    def leading(self) -> str:
        return next(name for name in METRICS if name in self.results)

    @property
    def is_detector(self) -> bool:
        return "AP" in self.results

    @property
    def library(self) -> str:
        if "module" in self.content:  # a person's own module, whose class is in the recipe
            return "pytorch"
        return "timm" if not self.is_detector else "torchvision" if "family" in self.content else "transformers"


def read(folder: Path) -> Finished:
    """Raises `Refused` for a folder that is no run, or a run without a whole best model."""
    best = folder / "best"
    if not (folder / "config.yaml").is_file():
        raise Refused(f"{folder}: no run folder, it has no config.yaml; name runs/NAME, not its best/")
    if not (best / "results.json").is_file():
        raise Refused(f"{folder}: has no best/, which comes with the first checkpoint after an evaluation")
    try:
        check_regular(folder)
        files = {name: json.loads(read_text(best / f"{name}.json", MEDIUM)) for name in ("config", "results", "run")}
        of_run = {
            name: json.loads(read_text(folder / f"{name}.json", SMALL)) for name in ("summary", "environment", "status")
        }
        newest = max((folder / "checkpoints").glob("step_*/record.json"), default=None)
        if newest:  # which knows the hashes of best/
            recorded = json.loads(read_text(newest, MEDIUM))["best"]["files"]
            compare(best, recorded, besides=frozenset(os.listdir(best)))
        key = f'"eval/{next(name for name in METRICS if name in files["results"])}"'
        with (folder / "metrics.jsonl").open() as lines:
            rows = sum(key in line for line in lines)
        start = dict(re.findall(r"^\S+ \S+ {4}(\S.*?) {2,}(.*)$", (folder / "log.txt").read_text(), re.MULTILINE))
        config = read_yaml(folder / "config.yaml", SMALL, switches=False)
        step, status = int(files["run"]["step"]), of_run.pop("status")["status"]
        found = folder, config, files["config"], files["results"], step
        return Finished(
            *found, **of_run, classes=read_origin(str(best)).classes, start=start, evaluations=rows, status=status
        )
    except Damaged as error:
        raise Refused(f"{best}: is not what the run saved ({error}); start the run again, which mends it") from None
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Refused(f"{folder}: not a whole run folder ({reason:.200}); copy it again") from None
