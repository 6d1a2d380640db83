"""A tool finds the recipe, the configuration and the weights of a run; what it can't use is refused
in one line.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.detection.weights import sources
from common.errors import Refused
from tests.harness.outcomes import Outcome
from tests.tools.changed import update_json
from tools.command_line import hide_unset_flag, refuse_unwritable
from tools.trained import RECIPES, TrainedModel, load, load_recipe


def test_a_run_folder_is_taken_by_init_as_tools_take_it(trained_detector) -> None:
    of_run, of_best = (
        sources.read_weights(str(path)) for path in (trained_detector, trained_detector / "best")
    )
    assert of_run.settings == of_best.settings and of_run.tensors.keys() == of_best.tensors.keys()


UNFIT = {  # by recipe: how a weight is changed, and what is said
    "cls int8": (lambda tensor: tensor.to(torch.int8), "int8"),
    "cls infinite": (lambda tensor: tensor / 0, "has numbers that are not finite"),
    "cls short": (lambda tensor: tensor[:1], "can't be loaded: expected a complete timm folder"),
    "det bool": (lambda tensor: tensor > 0, "another detector: 1 tensors differ"),
    "det infinite": (lambda tensor: tensor / 0, "has numbers that are not finite"),
}


@pytest.fixture(scope="module")
def unfit(
    trained_classifier, trained_detector, run_several, tmp_path_factory
) -> dict[str, tuple[str, Outcome]]:
    """The name of the tensor that was changed, and the evaluation of these weights."""
    folder = tmp_path_factory.mktemp("unfit")
    names = {}
    cases = {}
    for case, (change, _) in UNFIT.items():
        recipe = case.split()[0]
        run = trained_detector if recipe == "det" else trained_classifier
        tensors = load_file(run / "best" / "model.safetensors")
        names[case] = next(name for name in tensors if tensors[name].ndim == 4)
        best = shutil.copytree(run / "best", folder / case)
        changed = tensors | {names[case]: change(tensors[names[case]])}
        save_file(changed, best / "model.safetensors", {"format": "pt"})
        cases[case] = [f"recipes/{recipe}.py", "--eval_only", best, "--data", "digits"]
    outcomes = run_several(1, cases)
    return {case: (names[case], outcomes[case]) for case in UNFIT}


@pytest.mark.parametrize("case", UNFIT)
def test_weights_that_are_no_numbers_are_refused_by_name(unfit, case: str) -> None:
    name, ended = unfit[case]
    assert ended.outcome == "refused" and UNFIT[case][1] in ended.text and name in ended.text, ended
    assert "\n" not in ended.text and "hub" not in ended.text


def test_the_recipe_of_a_copied_best_is_this_projects(trained_classifier, tmp_path) -> None:
    best = shutil.copytree(trained_classifier / "best", tmp_path / "best")
    trained = load(str(best))
    assert trained.recipe.__file__.endswith("recipes/cls.py") and trained.config.image_size == 32
    # And is not looked for on the hub.
    with pytest.raises(Refused, match=r"clss: nothing is there.*cls.*run folder"):
        load(str(trained_classifier.with_name("clss")))


def test_no_name_in_a_file_becomes_code(trained_classifier, tmp_path, monkeypatch) -> None:
    best = shutil.copytree(trained_classifier / "best", tmp_path / "flowers" / "best")
    (tmp_path / "flowers" / "source").mkdir()
    evil = tmp_path / "flowers" / "source" / "evil.py"
    for file in (evil, best / "evil.py"):
        file.write_text(f"open({str(tmp_path / 'EXECUTED')!r}, 'w')\n")
    monkeypatch.chdir(best)
    for name in (
        "evil",
        "../source/evil",
        str(best / "evil"),
        "../recipes/cls",
        ["evil"],
        {"cls": 1},
        7,
    ):
        update_json(best / "run.json", recipe=name)
        with pytest.raises(
            Refused, match=r"was trained by .*which is not .*name that file by --recipe"
        ):
            load(str(best))
    checkpoint = max((trained_classifier / "checkpoints").glob("step_*"))
    checkpoint = shutil.copytree(checkpoint, tmp_path / "checkpoints" / checkpoint.name)
    update_json(checkpoint / "record.json", recipe="../evil")
    with pytest.raises(Refused, match="name that file by --recipe"):
        load(str(checkpoint))
    assert not (tmp_path / "EXECUTED").exists()


def test_a_recipe_that_the_user_names_is_executed(trained_classifier, tmp_path) -> None:
    best = shutil.copytree(trained_classifier / "best", tmp_path / "best")
    update_json(best / "run.json", recipe="mine")
    copy = Path(shutil.copy(RECIPES / "cls.py", tmp_path / "mine.py"))
    assert load(
        str(best), ["--recipe", str(RECIPES / "det.py"), "--recipe", str(copy)]
    ).recipe.__file__ == str(copy)
    with pytest.raises(Refused, match=r"mine\.py, which is not .*det\.py"):
        load(str(best), ["--recipe", str(RECIPES / "det.py")])
    copy.write_text("Config = None\n")
    with pytest.raises(Refused, match=r"mine\.py.*build_model"):
        load(str(best), ["--recipe", str(copy)])


def test_another_source_than_the_runs_is_not_used_unasked(trained_classifier, tmp_path) -> None:
    best = shutil.copytree(trained_classifier / "best", tmp_path / "best")
    kept_source = tmp_path / "source" / "cls.py"
    kept_source.parent.mkdir()
    text = (RECIPES / "cls.py").read_text()
    kept_source.write_text("# a remark\n" + text)
    assert load(str(best)).recipe.__file__ == str(RECIPES / "cls.py")
    kept_source.write_text(text + "CHANGED = 1\n")
    with pytest.raises(
        Refused, match=rf"trained by another cls\.py than .*--recipe {kept_source}, which executes"
    ):
        load(str(best))
    assert (
        load(
            str(best), ["--recipe", str(RECIPES / "cls.py"), "--recipe", str(kept_source)]
        ).recipe.CHANGED
        == 1
    )
    assert load(str(best), ["--recipe", str(RECIPES / "cls.py")]).recipe.__file__ == str(
        RECIPES / "cls.py"
    )


@pytest.mark.parametrize(
    "recipe, old, new, task",
    [
        ("seg", "decoder", "neck", "segmentation"),
        ("cls", "label_smoothing", "decoder", "classification"),
        ("det", "width", "decoder", "detection"),
    ],
)
def test_a_flag_of_a_copy_does_not_decide_the_task(tmp_path, recipe, old, new, task) -> None:
    text = (RECIPES / f"{recipe}.py").read_text()
    assert f"    {old}: " in text
    copy = tmp_path / "mine.py"
    copy.write_text(text.replace(old, new))
    module = load_recipe(copy)
    trained = TrainedModel(module, module.Config(), None)
    assert hasattr(trained.config, new) and trained.task == task


@pytest.mark.parametrize(
    "argv, message, expected",
    [
        ("predict runs/a a.png", "--eval_only runs/a: no best/ yet", "runs/a: no best/ yet"),
        ("audit runs/a", "--data /data/a: nothing is there", "/data/a: nothing is there"),
        (
            "audit runs/a --data /data/a",
            "--data /data/a: nothing is there",
            "--data /data/a: nothing is there",
        ),
        (
            "audit runs/a --data=/data/a",
            "--data /data/a: nothing is there",
            "--data /data/a: nothing is there",
        ),
        (
            "audit runs/a",
            "runs/a: no checkpoint; --data FOLDER",
            "runs/a: no checkpoint; --data FOLDER",
        ),
    ],
)
def test_a_refusal_begins_with_no_flag_that_was_not_given(
    monkeypatch, argv, message, expected
) -> None:
    monkeypatch.setattr("sys.argv", argv.split())
    with pytest.raises(Refused) as raised, hide_unset_flag():
        raise Refused(message)
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    "tool, words", [("predict", "a.png"), ("compare", "RUN"), ("export", "--to onnx")]
)
def test_a_tool_names_no_flag_of_the_recipe(tool: str, words: str, launch, tmp_path) -> None:
    """Of a run that has no best/ yet."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("data: digits\n")
    words = words.replace("RUN", str(run))  # compared with itself
    done = launch.start_python(["-m", f"tools.{tool}", run] + words.split()).finish()
    assert done.returncode == 2
    assert f"{run}: this run has no best/ yet" in done.stderr and "--eval_only" not in done.stderr


def test_what_cant_be_written_is_refused_in_one_line(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused) as raised, refuse_unwritable("--output here"):
        (tmp_path / "file" / "folder").mkdir()
    assert str(raised.value) == "--output here: can't be written (Not a directory); name another"
