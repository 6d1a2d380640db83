"""Publishing a run: the model card, and the files beside the weights.

It is built from the fields that are named here: numbers, switches, choices, and names that a recipe
has checked against a list. A path, a note or a command can't be in one of them, so none of these is
published. Names of classes and of the run are.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from common.checkpoints import Damaged, compare
from common.config.origin import RUN_FILE, read_origin
from common.detection.models.detr_architectures import ARCHITECTURES
from common.detection.models.spec import MASK_FAMILIES
from common.errors import Refused, describe_error, make_printable
from common.files import MEDIUM, check_regular, read_text
from common.run import PastRun
from common.run.progress import display_name, of_exported

DETECT = Path(__file__).resolve().parents[2] / "docs" / "detect.py"
_TASKS = {"cls": "image-classification", "det": "object-detection"}
# The hub's names, by the leading result.
_METRICS = {"top1": "accuracy", "f1": "f1", "AP": "mean_average_precision"}
# Results of each class, by the leading result.
_PER_CLASS = {"top1": "Accuracy", "f1": "F1", "AP": "AP"}
_WEIGHTS = ("model.safetensors", "config.json", "preprocessor_config.json")
# Flags whose text the recipe checks: it is a choice, or a list of numbers. Of others only numbers
# and switches are published.
_CHOICES = """dtype comm_hook lr_scaling schedule clip_mode loss class_weights sampling batch_norm
    detector variant opt augment step_epochs freeze_stages unfreeze_epochs levels short_sides""".split()
_PICTURES = """confusion reliability mistakes predictions precision_recall misses""".split()


class Published:
    """The best model of a run as it is published. Raises `Refused` for a folder that is no run, or
    has no whole best model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.best = folder, folder / "best"
        if not (folder / "config.yaml").is_file():
            raise Refused(
                f"{folder}: no run folder, it has no config.yaml; name runs/NAME, not its best/"
            )
        if not (self.best / "results.json").is_file():
            raise Refused(
                f"{folder}: has no best/, which comes with the first checkpoint after an evaluation"
            )
        try:
            check_regular(folder)
            self.content, results, of_run = (
                _read(self.best / name) for name in ("config.json", "results.json", RUN_FILE)
            )
            self.results = of_exported(results)
            if newest := max((folder / "checkpoints").glob("step_*/record.json"), default=None):
                compare(
                    self.best,
                    _read(newest)["best"]["files"],
                    besides=frozenset(os.listdir(self.best)),
                )
            self.leading = next(name for name in _METRICS if name in self.results)
            self.step, self.run, self.config = (
                int(of_run["step"]),
                PastRun(folder),
                of_run["config"],
            )
            self.of_run = {key: of_run[key] for key in ("name", "recipe", "step", "commit")}
            self.of_run["config"] = self._settings()
            self.classes = read_origin(str(self.best)).classes
        except Damaged as error:
            raise Refused(
                f"{self.best}: is not what the run saved ({error}); start the run again, which "
                "mends it"
            ) from None
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            StopIteration,
            RecursionError,
        ) as error:
            reason = describe_error(error)
            raise Refused(
                f"{folder}: not a whole run folder ({reason:.200}); copy it again"
            ) from None

    @property
    def is_detector(self) -> bool:
        return self.leading == "AP"

    @property
    def library(self) -> str:
        if "module" in self.content:  # a person's own module, whose class is in the recipe
            return "pytorch"
        return (
            "timm"
            if not self.is_detector
            else "torchvision"
            if "family" in self.content
            else "transformers"
        )

    @property
    def pictures(self) -> list[str]:
        return [name for name in _PICTURES if (self.folder / "pictures" / f"{name}.png").is_file()]

    def files(self) -> dict[str, bytes | Path]:
        """The files beside the card: their content, or where it is."""
        found: dict[str, bytes | Path] = {
            name: self.best / name for name in _WEIGHTS if (self.best / name).is_file()
        }
        found |= {
            f"pictures/{name}.png": self.folder / "pictures" / f"{name}.png"
            for name in self.pictures
        }
        # Of transformers.
        content = {key: value for key, value in self.content.items() if key != "_name_or_path"}
        documents = {"config.json": content, "results.json": self.results, RUN_FILE: self.of_run}
        found |= {
            name: (json.dumps(content, indent=2) + "\n").encode()
            for name, content in documents.items()
        }
        return found | ({DETECT.name: DETECT} if self._has_script() else {})

    def card(self, to: str, license_: str, dataset: str) -> str:
        """The text of README.md, with the hub's metadata first."""
        title = to.split("/")[1]
        model = self.of_run["config"].get("model", "")
        per_class = self.results.get("per_class") or {}
        if not dataset:
            dataset = "digits" if self.config.get("data") == "digits" else "not named"
        card = ModelCard.from_template(
            self._metadata(title, license_, dataset),
            template_path=str(Path(__file__).with_name("card.jinja")),
            title=cell(title),
            to=to,
            kind=f"{self.config['detector']} detector"
            if self.is_detector
            else f"{model} image classifier".strip(),
            license=cell(license_),
            library=self.library,
            has_masks=self.config.get("detector") in MASK_FAMILIES,
            script=DETECT.name if self._has_script() else "",
            scores="sigmoid()" if self.leading == "f1" else "softmax(1)",
            run=cell(self.run.name),
            step=f"{self.step:,}",
            status=cell(str(self.run.status.get("status"))),
            averaged=any(key.startswith("raw_") for key in self.results),
            results=[
                (display_name(key), _figure(value))
                for key, value in self.results.items()
                if _is_result(key, value)
            ],
            per_class_name=_PER_CLASS[self.leading],
            per_class=[(cell(name), _figure(value)) for name, value in per_class.items()],
            pictures=self.pictures,
            data=f"Data set: {cell(dataset)}",
            classes=list(map(cell, self.classes)),
            training=self._training(),
            settings=[(name, cell(str(value))) for name, value in self.of_run["config"].items()],
            images=f"{self.results['count']:,}",
            broken=self.results.get("broken"),
            leading=display_name(self.leading),
            began=self._name_start(model),
        )
        return card.content

    def _metadata(self, title: str, license_: str, dataset: str) -> ModelCardData:
        """What the hub sorts models by."""
        task = _TASKS["det" if self.is_detector else "cls"]
        metric = _METRICS[self.leading]
        value = self.results[self.leading]
        tags = [task, "vision-recipes"]
        if self.config.get("detector") in MASK_FAMILIES:
            tags.append("instance-segmentation")
        results = None
        if value is not None:
            results = [
                EvalResult(task, dataset, dataset, metric, value, dataset_split="validation")
            ]
        return ModelCardData(
            license=license_ or None,
            library_name=self.library,
            pipeline_tag=task,
            tags=tags,
            metrics=[metric],
            model_name=title,
            eval_results=results,
        )

    def _name_start(self, model: str) -> str:
        """The weights that the run began with, for people; "" if it began with none."""
        if self.config.get("init"):
            return "other weights (--init)"
        if self.config.get("pretrained"):
            return f"the published weights of {cell(model) or 'its model'}"
        return ""

    def _settings(self) -> dict[str, Any]:
        """The flags that define the run, as far as their values can't name a file or a person."""
        settings = {
            key: value
            for key, value in self.config.items()
            if key in _CHOICES or not isinstance(value, str)
        }
        settings = {
            key: value for key, value in settings.items() if isinstance(value, str | int | float)
        }
        name = self.content.get("architecture") or self.config.get("model", "")
        name = self.content["model"] if "family" in self.content else name
        # "": an evaluation has to name them.
        settings["data"] = "digits" if self.config.get("data") == "digits" else ""
        return settings | ({"model": name} if timm.is_model(name) or name in ARCHITECTURES else {})

    def _training(self) -> list[tuple[str, str]]:
        summary, facts = self.run.summary, self.run.environment
        seconds, world = float(summary["train_seconds"]), int(facts["world_size"])
        packages: Mapping = facts["packages"]
        rows = {
            "length": f"{int(summary['step']):,} steps, {float(summary['epoch']):.1f} epochs",
            "time": f"{seconds:,.0f} s of training, {float(summary['images_per_second'] or 0):,.0f} images/s",
            "layout": (
                f"{world} process{'es' * (world > 1)} on "
                f"{world // int(facts['local_world_size'])} node(s)"
            ),
            "devices": ", ".join(dict.fromkeys(rank.split(" on ")[0] for rank in facts["ranks"])),
            "precision": facts["precision"],
            "commit": facts["commit"],
            "versions": ", ".join(f"{name} {packages[name]}" for name in packages),
        }
        return [(name, cell(str(value))) for name, value in rows.items()]

    def _has_script(self) -> bool:
        """True if docs/detect.py loads the detector."""
        return self.library == "torchvision" and self.content.get("backbone") is not None


def cell(text: str) -> str:
    """`text` in Markdown, also in a cell of a table, as it is: nothing in it is markup or a link."""
    return re.sub(r"([\\|<>*_`\[\]()#!~&:@])", r"\\\1", make_printable(text))


def _read(file: Path) -> dict:
    content = json.loads(read_text(file, MEDIUM))
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} holds a {type(content).__name__}")
    return content


def _is_result(key: str, value: Any) -> bool:
    return isinstance(value, int | float) and not key.startswith("raw_") and "/" not in key


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
