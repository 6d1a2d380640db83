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
_CHOICES = (
    "dtype comm_hook lr_scaling schedule clip_mode loss class_weights sampling batch_norm detector "
    "variant opt augment step_epochs freeze_stages unfreeze_epochs levels short_sides"
).split()
_PICTURES = "confusion reliability mistakes predictions precision_recall misses".split()


class PublishedModel:
    """The best model of a run as it is published.

    Raises `Refused` for a folder that is no run, or has no whole best model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.best = folder / "best"
        if not (folder / "config.yaml").is_file():
            raise Refused(
                f"{folder}: no run folder, it has no config.yaml; name runs/NAME, not its best/"
            )
        if not (self.best / "results.json").is_file():
            raise Refused(
                f"{folder}: has no best/, which comes with the first checkpoint after an evaluation"
            )
        try:
            self._read(folder)
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

    def _read(self, folder: Path) -> None:
        check_regular(folder)
        self.content = _read_json(self.best / "config.json")
        results = _read_json(self.best / "results.json")
        run_info = _read_json(self.best / RUN_FILE)
        self.results = of_exported(results)
        newest = max((folder / "checkpoints").glob("step_*/record.json"), default=None)
        if newest:
            recorded = _read_json(newest)["best"]["files"]
            compare(self.best, recorded, besides=frozenset(os.listdir(self.best)))
        if "mIoU" in self.results:
            raise Refused(
                f"{folder}: is a model for segmentation, which has no card yet; upload its best/"
            )
        self.leading = next(name for name in _METRICS if name in self.results)
        self.step = int(run_info["step"])
        self.run = PastRun(folder)
        self.config = run_info["config"]
        self.run_info = {key: run_info[key] for key in ("name", "recipe", "step", "commit")}
        self.run_info["config"] = self._select_settings()
        self.classes = read_origin(str(self.best)).classes

    @property
    def is_detector(self) -> bool:
        return self.leading == "AP"

    @property
    def library(self) -> str:
        if "module" in self.content:  # a person's own module, whose class is in the recipe
            return "pytorch"
        if not self.is_detector:
            return "timm"
        return "torchvision" if "family" in self.content else "transformers"

    @property
    def pictures(self) -> list[str]:
        return [name for name in _PICTURES if (self.folder / "pictures" / f"{name}.png").is_file()]

    def collect_files(self) -> dict[str, bytes | Path]:
        """Collect the files beside the card: their content, or where it is."""
        files: dict[str, bytes | Path] = {}
        for name in _WEIGHTS:
            if (self.best / name).is_file():
                files[name] = self.best / name
        for name in self.pictures:
            files[f"pictures/{name}.png"] = self.folder / "pictures" / f"{name}.png"
        config = dict(self.content)
        config.pop("_name_or_path", None)  # which transformers writes
        documents = {"config.json": config, "results.json": self.results, RUN_FILE: self.run_info}
        for name, content in documents.items():
            files[name] = (json.dumps(content, indent=2) + "\n").encode()
        if self._has_script():
            files[DETECT.name] = DETECT
        return files

    def build_card(self, to: str, license_: str, dataset: str) -> str:
        """Build the text of README.md, with the hub's metadata first."""
        title = to.split("/")[1]
        settings = self.run_info["config"]
        model = settings.get("model", "")
        kind = f"{model} image classifier".strip()
        if self.is_detector:
            kind = f"{self.config['detector']} detector"
        results = []
        for key, value in self.results.items():
            if _is_result(key, value):
                results.append((display_name(key), _format_figure(value)))
        per_class = self.results.get("per_class") or {}
        if not dataset:
            dataset = "digits" if self.config.get("data") == "digits" else "not named"
        card = ModelCard.from_template(
            self._build_metadata(title, license_, dataset),
            template_path=str(Path(__file__).with_name("card.jinja")),
            title=escape(title),
            to=to,
            kind=kind,
            license=escape(license_),
            library=self.library,
            script=DETECT.name if self._has_script() else "",
            scores="sigmoid()" if self.leading == "f1" else "softmax(1)",
            run=escape(self.run.name),
            step=f"{self.step:,}",
            status=escape(str(self.run.status.get("status"))),
            averaged=any(key.startswith("raw_") for key in self.results),
            results=results,
            per_class_name=_PER_CLASS[self.leading],
            per_class=[(escape(name), _format_figure(value)) for name, value in per_class.items()],
            pictures=self.pictures,
            data=f"Data set: {escape(dataset)}",
            classes=[escape(name) for name in self.classes],
            training=self._describe_training(),
            settings=[(name, escape(str(value))) for name, value in settings.items()],
            images=f"{self.results['count']:,}",
            broken=self.results.get("broken"),
            leading=display_name(self.leading),
            began=self._describe_start(model),
        )
        return card.content

    def _build_metadata(self, title: str, license_: str, dataset: str) -> ModelCardData:
        """Build what the hub sorts models by."""
        task = _TASKS["det" if self.is_detector else "cls"]
        metric = _METRICS[self.leading]
        value = self.results[self.leading]
        tags = [task, "vision-recipes"]
        if self.config.get("detector") == "mask_rcnn":
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

    def _describe_start(self, model: str) -> str:
        """The weights that the run began with, for people; "" if it began with none."""
        if self.config.get("init"):
            return "other weights (--init)"
        if self.config.get("pretrained"):
            return f"the published weights of {escape(model) or 'its model'}"
        return ""

    def _select_settings(self) -> dict[str, Any]:
        """The flags that define the run, as far as their values can't name a file or a person."""
        settings = {}
        for key, value in self.config.items():
            is_checked_text = isinstance(value, str) and key in _CHOICES
            if is_checked_text or isinstance(value, int | float):
                settings[key] = value
        # "": an evaluation has to name them.
        settings["data"] = "digits" if self.config.get("data") == "digits" else ""
        if "family" in self.content:
            name = self.content["model"]
        else:
            name = self.content.get("architecture") or self.config.get("model", "")
        if timm.is_model(name) or name in ARCHITECTURES:
            settings["model"] = name
        return settings

    def _describe_training(self) -> list[tuple[str, str]]:
        summary = self.run.summary
        environment = self.run.environment
        seconds = float(summary["train_seconds"])
        images_per_second = float(summary["images_per_second"] or 0)
        world_size = int(environment["world_size"])
        num_nodes = world_size // int(environment["local_world_size"])
        noun = "processes" if world_size > 1 else "process"
        devices = [rank.split(" on ")[0] for rank in environment["ranks"]]
        packages: Mapping = environment["packages"]
        rows = {
            "length": f"{int(summary['step']):,} steps, {float(summary['epoch']):.1f} epochs",
            "time": f"{seconds:,.0f} s of training, {images_per_second:,.0f} images/s",
            "layout": f"{world_size} {noun} on {num_nodes} node(s)",
            "devices": ", ".join(dict.fromkeys(devices)),
            "precision": environment["precision"],
            "commit": environment["commit"],
            "versions": ", ".join(f"{name} {packages[name]}" for name in packages),
        }
        return [(name, escape(str(value))) for name, value in rows.items()]

    def _has_script(self) -> bool:
        """True if docs/detect.py loads the detector."""
        return self.library == "torchvision" and self.content.get("backbone") is not None


def escape(text: str) -> str:
    """`text` in Markdown, also in a cell of a table, as it is: nothing in it is markup or a link."""
    return re.sub(r"([\\|<>*_`\[\]()#!~&:@])", r"\\\1", make_printable(text))


def _read_json(file: Path) -> dict:
    content = json.loads(read_text(file, MEDIUM))
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} holds a {type(content).__name__}")
    return content


def _is_result(key: str, value: Any) -> bool:
    return isinstance(value, int | float) and not key.startswith("raw_") and "/" not in key


def _format_figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
