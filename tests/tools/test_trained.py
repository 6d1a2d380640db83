"""A tool finds the recipe, the configuration and the weights of a run; what it can't use is refused in one line."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.detection.weights import sources
from common.errors import Refused
from tools.trained import load


def test_a_run_folder_is_taken_by_init_as_tools_take_it(trained_detector) -> None:
    of_run, of_best = (sources.read(str(path)) for path in (trained_detector, trained_detector / "best"))
    assert of_run.settings == of_best.settings and of_run.tensors.keys() == of_best.tensors.keys()


def test_weights_that_are_no_numbers_are_refused_by_name(
    trained_classifier, trained_detector, run_several, tmp_path
) -> None:
    cases, expected = {}, {}
    for run, kind, change, said in (
        (trained_classifier, "int8", lambda tensor: tensor.to(torch.int8), "int8"),
        (trained_classifier, "infinite", lambda tensor: tensor / 0, "has numbers that are not finite"),
        (trained_classifier, "short", lambda tensor: tensor[:1], "can't be made of this folder"),
        (trained_detector, "bool", lambda tensor: tensor > 0, "another detector: 1 tensors differ"),
        (trained_detector, "infinite", lambda tensor: tensor / 0, "has numbers that are not finite"),
    ):
        tensors = load_file(run / "best" / "model.safetensors")
        name = next(name for name in tensors if tensors[name].ndim == 4)
        best = shutil.copytree(run / "best", tmp_path / f"{run.name} {kind}")
        save_file(tensors | {name: change(tensors[name])}, best / "model.safetensors", {"format": "pt"})
        cases[best.name] = [f"recipes/{run.name}.py", "--eval_only", best, "--data", "digits"]
        expected[best.name] = said, name
    for case, ended in run_several(1, cases).items():
        said, name = expected[case]
        assert ended.outcome == "refused" and said in ended.text and name in ended.text, ended
        assert "\n" not in ended.text and "hub" not in ended.text


def test_the_recipe_of_a_copied_best_is_the_repositorys_and_what_is_gone_or_too_old_is_refused_by_name(
    trained_classifier, tmp_path
) -> None:
    best = shutil.copytree(trained_classifier / "best", tmp_path / "best")
    trained = load(str(best))
    assert trained.recipe.__file__.endswith("recipes/cls.py") and trained.config.image_size == 32
    with pytest.raises(Refused, match=r"clss: nothing is there.*cls.*run folder"):  # and is not looked for on the hub
        load(str(trained_classifier.with_name("clss")))
    record = json.loads((best / "run.json").read_text())
    (best / "run.json").write_text(json.dumps(record | {"recipe": "mine"}))
    with pytest.raises(Refused, match=r"mine\.py"):
        load(str(best))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "mine.py").write_text("Config = None\n")
    with pytest.raises(Refused, match=r"mine\.py.*build_evaluation"):
        load(str(best))
