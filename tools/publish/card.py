"""The model card: README.md with the hub's metadata first. All figures are those of the run folder."""

import re
from pathlib import Path

from common.errors import printable
from tools.publish.run import METRICS, Finished

DETECTORS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "detectors.md"
DETECT = "detect.py"  # what the script of that page is called in a published folder
WEAKEST = 3  # classes that the limits name
_TASKS = {"cls": "image-classification", "det": "object-detection"}
_NAMES = {"top1": "Top-1 accuracy", "top5": "Top-5 accuracy", "mean_class_accuracy": "Mean class accuracy"}
_NAMES |= {
    "f1_macro": "Macro F1",
    "f1": "F1",
    "exact_match": "Exact match",
    "loss": "Loss",
    "count": "Images",
    "broken": "Images that could not be read",
}
# Rows of the start table that the card repeats; the others are about the machine or stand in the configuration.
_OF_DATA = (
    "data",
    "images a class",
    "boxes a class",
    "trained on",
    "evaluated",
    "not evaluated",
    "train notes",
    "val notes",
)
_OF_TRAINING = ("model", "begins with", "input", "batch norm", "layout", "batch", "learning rate", "length")


def card(run: Finished, to: str, license_: str) -> str:
    """The text of README.md, with the hub's metadata first."""
    from huggingface_hub import EvalResult, ModelCardData

    task, metric = _TASKS["det" if run.is_detector else "cls"], METRICS[run.leading]
    data = plain(str(run.config["data"]))
    tags = [task, "vision-recipes", *(["instance-segmentation"] if run.config.get("detector") == "mask_rcnn" else [])]
    value = run.results[run.leading]
    results = [EvalResult(task, data, data, metric, value, dataset_split="validation")] if value is not None else None
    metadata = ModelCardData(
        license=license_ or None,
        library_name=run.library,
        pipeline_tag=task,
        tags=tags,
        metrics=[metric],
        model_name=to.split("/")[1],
        eval_results=results,
    )
    parts = [f"---\n{metadata.to_yaml()}\n---", f"# {to.split('/')[1]}", _what(run, license_)]
    parts += ["## Use", _use(run, to), "## Results", *_results(run), "## Data", _table(run, _OF_DATA), _classes(run)]
    parts += ["## Training", *_training(run), "## Limits", _limits(run)]
    return "\n\n".join(parts) + "\n"


def _what(run: Finished, license_: str) -> str:
    model, by = run.config["model"], f"run {run.folder.resolve().name}, step {run.step:,}"
    kind = f"{run.config['detector']} detector on {model}" if run.is_detector else f"{model} image classifier"
    lines = [f"A {plain(kind)} of {len(run.classes):,} classes, trained with vision-recipes ({by})."]
    if run.status != "finished":
        lines.append(f"The run was not finished ({run.status}) when this was written.")
    none = "**License: none was given.** Without one, nobody else may use the model."
    return " ".join([*lines, f"License: {license_}." if license_ else none])


def _use(run: Finished, to: str) -> str:
    if run.library == "timm":
        scores = "sigmoid()" if run.leading == "f1" else "softmax(1)"
        return f"""```python
import timm
import torch
from PIL import Image

model = timm.create_model("hf-hub:{to}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
with torch.no_grad():
    scores = model(transform(Image.open("photo.jpg").convert("RGB"))[None]).{scores}[0]
for score, place in zip(*scores.topk(min(5, len(scores)))):
    print(model.pretrained_cfg["label_names"][place], f"{{score:.4f}}")
```"""
    if run.library == "transformers":
        return f"""```python
from transformers import pipeline

for found in pipeline("object-detection", "{to}", threshold=0.3)("photo.jpg"):
    print(found["label"], f"{{found['score']:.4f}}", found["box"])
```"""
    if detect_script(run):
        return f"""```bash
hf download {to} --local-dir model
python model/{DETECT} model photo.jpg  # needs torch, torchvision, timm and safetensors
```"""
    return "`model.safetensors` is the state dict. Load it with vision-recipes: `--eval_only FOLDER`."


def detect_script(run: Finished) -> str:
    """The script that loads the detector with torchvision; "" if none does."""
    if run.library != "torchvision" or run.content.get("backbone") is None:
        return ""
    (script,) = re.findall(r"^```python\n(.*?)^```$", DETECTORS_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return script


def _results(run: Finished) -> list[str]:
    overall = {name: value for name, value in run.results.items() if isinstance(value, int | float) and "/" not in name}
    rows = [f"| {_NAMES.get(name, name)} | {_figure(value)} |" for name, value in overall.items()]
    per_class = run.results.get("per_class") or {}
    lines = ["\n".join(["| Result | Validation |", "| --- | --- |", *rows])]
    if per_class:
        what = "AP" if run.is_detector else "F1" if run.leading == "f1" else "Accuracy"
        rows = [f"| {_cell(name)} | {_figure(value)} |" for name, value in per_class.items()]
        lines.append("\n".join([f"| Class | {what} |", "| --- | --- |", *rows]))
    shown = [path.name for path in sorted((run.folder / "pictures").glob("*.png"))]
    return lines + [f"![{name.removesuffix('.png')}](pictures/{name})" for name in shown]


def _classes(run: Finished) -> str:
    return f"Classes, by id from 0: {', '.join(map(_cell, run.classes))}."


def _training(run: Finished) -> list[str]:
    facts = {name: run.start[name] for name in _OF_TRAINING if name in run.start}
    facts |= {"time": f"{run.summary['train_seconds']:,} s of training, {run.summary['images_per_second']} images/s"}
    facts |= {"devices": ", ".join(dict.fromkeys(rank.split(" on ")[0] for rank in run.environment["ranks"]))}
    facts |= {"commit": str(run.environment["commit"]), "python": run.environment["python"]}
    facts |= {"versions": ", ".join(f"{name} {version}" for name, version in run.environment["packages"].items())}
    settings = "\n".join(f"| `--{name}` | {_cell(plain(str(value)))} |" for name, value in run.config.items())
    return [
        f"```bash\n{plain(run.environment['command'])}\n```",
        "\n".join(
            ["| | |", "| --- | --- |", *(f"| {name} | {_cell(plain(value))} |" for name, value in facts.items())]
        ),
        f"<details><summary>All settings</summary>\n\n| flag | value |\n| --- | --- |\n{settings}\n\n</details>",
    ]


def _limits(run: Finished) -> str:
    per_class = {name: value for name, value in (run.results.get("per_class") or {}).items() if value is not None}
    weakest = sorted(per_class, key=lambda name: per_class[name])[:WEAKEST]
    unmeasured = [name for name, value in (run.results.get("per_class") or {}).items() if value is None]
    name = _NAMES.get(run.leading, run.leading)
    part = f" ({_cell(plain(run.start['evaluated']))})" if "evaluated" in run.start else ""
    lines = [
        f"- Measured on {run.results['count']:,} images{part}, and on nothing else. Expect less on other cameras, places "
        "and times.",
        f"- Chosen as the best of {run.evaluations} evaluations ({name}) on these same images, so the figures are a little "
        "high.",
    ]
    if weakest:
        lines.append(
            f"- Weakest classes: {', '.join(f'{_cell(name)} {_figure(per_class[name])}' for name in weakest)}."
        )
    if unmeasured:
        lines.append(
            f"- Not measured, since the validation images do not show them: {', '.join(map(_cell, unmeasured))}."
        )
    if run.results.get("broken"):
        lines.append(f"- {run.results['broken']:,} validation images could not be read, and count as wrong.")
    began = plain(
        str(run.config.get("init") or (run.config["model"] if run.config.get("pretrained") == "true" else ""))
    )
    if began:
        lines.append(f"- Began with the weights of {_cell(began)}, whose license and limits hold here, too.")
    return "\n".join(lines)


def _table(run: Finished, names: tuple[str, ...]) -> str:
    rows = [f"| {name} | {_cell(plain(run.start[name]))} |" for name in names if name in run.start]
    return "\n".join(["| | |", "| --- | --- |", *rows])


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _cell(text: str) -> str:
    """`text` in a cell of a table, as it is: nothing in it is markup."""
    return re.sub(r"([\\|<>*_`\[\]])", r"\\\1", printable(text))


def plain(text: str) -> str:
    """`text` without the folders before the names of files: whose they are concerns nobody else."""
    return re.sub(r"(?<![\w.:/])(?:~|/)[^\s,:'\"]*/(?=[^\s/])", "", text)
