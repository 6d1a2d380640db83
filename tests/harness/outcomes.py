"""What a run leaves behind, and how two runs are compared: by rows, files and tensors."""

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from common.checkpoints.store import Damaged, compare
from common.config.parsing import parse
from tests.harness.several import load_recipe

Tensors = dict[str, torch.Tensor]


def read(file: Path) -> dict:
    return json.loads(file.read_text())


def read_rows(file: Path) -> list[dict]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


@dataclass(frozen=True)
class Outcome:
    """What became of one command line, and the run folder that it was to write."""

    outcome: str = "ok"  # or refused, exit, failed: see several.py
    text: str = ""
    stdout: str = ""
    folder: Path = Path()

    def read(self, name: str) -> dict:
        """A JSON file of the run folder."""
        return read(self.folder / name)

    @property
    def rows(self) -> list[dict]:
        """The lines of metrics.jsonl."""
        return read_rows(self.folder / "metrics.jsonl")

    def column(self, key: str) -> np.ndarray:
        """The values of `key` in the rows that have it: float64[rows]."""
        return np.array([row[key] for row in self.rows if key in row])

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint's folder."""
        return max((self.folder / "checkpoints").glob("step_*"))

    def tensors(self, file: str = "model") -> Tensors:
        """Tensors of the newest checkpoint: of its model, ema or optimizer."""
        return load_file(self.checkpoint / f"{file}.safetensors")


def select_parameters(tensors: Tensors) -> Tensors:
    """Of a model's state, the weights."""
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(buffers)}


def select_statistics(tensors: Tensors) -> Tensors:
    """Of a model's state, the running means and variances."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.endswith(("running_mean", "running_var"))
    }


def compute_relative_distance(reference: Tensors, actual: Tensors, start: Tensors) -> float:
    """The distance of `actual` from `reference`, as a share of the way from `start` to `reference`; 0 for
    the same bits.
    """
    assert reference and reference.keys() == actual.keys() <= start.keys()
    apart, moved = (
        sum(
            (tensor.double() - state[name].double()).square().sum()
            for name, tensor in reference.items()
        )
        .sqrt()
        .item()
        for state in (actual, start)
    )
    assert moved > 0, "nothing has moved: the comparison would prove nothing"
    return apart / moved


def build_initial_state(run: Outcome) -> Tensors:
    """The state of the model with which a run began: built from its configuration, and so from its seed."""
    recipe = load_recipe(Path(run.read("environment.json")["recipe"]))
    config = parse(recipe.Config, ["--config", str(run.folder / "config.yaml")])
    classes = read(run.checkpoint / "record.json")["classes"]
    return recipe.build_model(config, tuple(classes), torch.device("cpu")).state_dict()


def assert_same_training(whole: Outcome, cut: Outcome, start: Tensors | None = None) -> None:
    """`cut` made the steps of `whole`, the last of them if it was resumed: numbers and tensors
    agree within 1e-8.

    These are losses, gradient norms, results, and the last checkpoint's model, moving average and
    optimizer. With the weights `start` of the first step, differences of weights are compared with
    how far the weights have moved since.
    """
    numbers = {
        key for row in whole.rows for key, value in row.items() if isinstance(value, (int, float))
    }
    compared = {key for key in numbers if key.startswith(("train/", "eval/"))}
    assert {"train/loss", "train/grad_norm"} <= compared and any(
        key.startswith("eval/") for key in compared
    )
    for key in compared:
        actual, expected = (run.column(key).astype(float) for run in (cut, whole))
        assert len(actual), key
        np.testing.assert_allclose(
            actual, expected[-len(actual) :], rtol=1e-8, atol=1e-8, err_msg=key
        )
    assert cut.rows[-1]["step"] == whole.rows[-1]["step"]
    for file in whole.checkpoint.glob("*.safetensors"):
        expected = whole.tensors(file.stem)
        actual = cut.tensors(file.stem)
        shapes = [
            {name: (tensor.shape, tensor.dtype) for name, tensor in each.items()}
            for each in (actual, expected)
        ]
        assert shapes[0] == shapes[1], file.name
        if start and file.stem != "optimizer" and expected.keys() <= start.keys():
            assert (
                compute_relative_distance(
                    select_parameters(expected), select_parameters(actual), start
                )
                <= 1e-8
            ), file.name
            expected = select_statistics(expected)
        for name, tensor in expected.items():
            tolerance = 1e-6 if file.stem == "optimizer" else 1e-8
            torch.testing.assert_close(actual[name], tensor, rtol=tolerance, atol=1e-8, msg=name)


def identical(left: Tensors, right: Tensors) -> bool:
    """True if two states have the same names, types and bits."""
    return left.keys() == right.keys() and all(
        tensor.dtype == right[name].dtype and torch.equal(tensor, right[name])
        for name, tensor in left.items()
    )


def read_best_files(run: Path) -> dict[str, bytes | dict]:
    """The content of the files in `best/`, by name; without the run's name, and the commit, which
    may come between two runs.
    """
    files = {path.name: path.read_bytes() for path in (run / "best").iterdir()}
    return files | {"run.json": json.loads(files["run.json"]) | {"name": "", "commit": ""}}


def has_best(run: Path, record: dict) -> bool:
    """True if the best model that a checkpoint's record names is whole, in `best/` or where the
    next start looks for it.
    """
    for name in ("best", ".best.tmp", ".best.old"):
        with contextlib.suppress(Damaged, OSError):
            compare(run / name, record["best"]["files"])
            return True
    return False


def seal(checkpoint: Path) -> None:
    """Make the manifest fit the files that are there now."""
    files = [path for path in checkpoint.iterdir() if path.name != "manifest.json"]
    stamps = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }
    (checkpoint / "manifest.json").write_text(json.dumps(stamps))
