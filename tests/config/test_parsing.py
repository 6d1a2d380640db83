"""Parsing: defaults, a YAML file and flags give one checked configuration, or one line with the
error and a suggestion.
"""

import dataclasses
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.config.fields import OptimizationConfig, RunConfig, option
from common.config.parsing import (
    compute_short_hash,
    get_identity,
    parse,
    save_config,
    suggest_names,
)
from common.errors import Refused
from recipes import cls, det
from tests.harness.launching import ROOT


@dataclass
class Config(OptimizationConfig, RunConfig):
    """What a recipe's configuration is like."""

    data: str = option("digits", heading="data", is_common=True)
    """Text."""
    pretrained: bool = False
    """A switch that is off."""
    visible: bool = True
    """A switch that is on."""
    image_size: int = option(32, low=0)
    """A whole number."""
    crop_pct: float = option(1.0, low=0, high=1)
    """A number between limits."""
    temperature: float = 1.0
    """A number without limits."""
    loss: Literal["ce", "bce"] = "ce"
    """One of some."""
    augment: str = ""
    """Text that may be empty."""
    init: str = option("", defaults_from=lambda name: {"opt": name, "loss": "bce", "seed": 7})
    """Text that decides on other fields."""
    lr: float = 4e-3


def read_refusal(*arguments: object) -> str:
    with pytest.raises(Refused) as raised:
        parse(Config, [str(argument) for argument in arguments], "cls.py")
    return str(raised.value)


@pytest.fixture
def preset(tmp_path: Path):
    """Writes a YAML file and gives the flags that name it."""

    def write(text: str) -> list[str]:
        path = tmp_path / "preset.yaml"
        path.write_text(text)
        return ["--config", str(path)]

    return write


@pytest.mark.smoke
def test_flags_override_the_file_and_the_file_overrides_defaults(preset) -> None:
    assert (
        parse(Config, [])
        == parse(Config, preset("# only a comment\n"))
        == parse(Config, ["--name", ""])
        == Config()
    )
    # To YAML, 1e-3 and 007 are texts.
    file = preset("lr: 1e-3\nepochs: 5\npretrained: true\nvisible: no\nloss: bce\nname: 007\n")
    config = parse(Config, ["--epochs", "7", *file, "--no_pretrained", "--image-size=64"])
    assert config == Config(
        lr=1e-3, epochs=7.0, pretrained=False, visible=False, loss="bce", image_size=64, name="007"
    )
    # Also if a flag gives the default and the file another value.
    config = parse(Config, [*file, "--lr", "4e-3", "--visible", "--name", "-1"])
    assert config == Config(epochs=5.0, pretrained=True, loss="bce", name="-1")


@pytest.mark.parametrize(
    "text, message",
    [
        ("epoch: 3", "unknown key epoch; did you mean epochs"),
        ("lr: [1, 2]", "lr must be a single value, not list"),
        ("name: on", "name: True is not of the right type"),
        ("pretrained: 1", "pretrained: '1' is not true or false"),
        ("lr: 1\nseed: 2\nlr: 3", "lr is given twice"),
        ("data: ''", "--data is empty"),
        ("- lr", "must hold `key: value` lines, found a list"),
        ("lr: [", "not readable as YAML"),
        ("lr: !!python/object/apply:os.getpid []", "not readable as YAML"),
        ("lr: &a 1\n<<: *a", "unknown key <<"),
    ],
)
def test_an_error_in_a_file_is_refused_in_one_line(preset, text: str, message: str) -> None:
    line = read_refusal(*preset(text))
    assert message in line
    assert "preset.yaml" in line or line.startswith("--")  # the file, or the flag of that name


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--epoch", 3], "unknown flag --epoch; did you mean epochs"),
        (["--conf", "a.yaml"], "unknown flag --conf; did you mean config?"),
        (["--lr", "fast"], "--lr fast: must be a number"),
        (["--lr"], "--lr needs a value"),
        (["--lr", "--visible"], "--lr needs a value"),
        (["--no_lr", "1"], "unknown flag --no_lr"),
        (["--lr", "-1"], "--lr -1.0: must be between 0 and 1000000"),
        (["--temperature=-inf"], "--temperature -inf: must be a finite number"),
        (["--global_batch_size", "0"], "--global_batch_size 0: must be between 1 and 1048576"),
        (["--seed", "1.5"], "--seed 1.5: must be a whole number"),
        (["--loss", "mse"], "--loss mse: must be one of ce, bce"),
        (
            ["--pretrained=true"],
            "--pretrained takes no value: give --pretrained or --no_pretrained",
        ),
        (["--data="], "--data is empty: give it a value, or leave it out for digits"),
        (["--pretrained", "stray"], "stray: is no flag; each value stands behind its flag"),
        (["--config"], "--config needs the path of a YAML file"),
        (["--config", "a.yaml", "--config=b.yaml"], "--config is given twice"),
        (
            ["--config", "recipes/presets/digit.yaml"],
            "no such file; did you mean recipes/presets/digits.yaml",
        ),
        (["--config", "recipes/presets"], "--config recipes/presets: a folder, not a file"),
    ],
)
def test_an_error_on_the_command_line_is_refused_in_one_line(arguments: list, message: str) -> None:
    assert message in read_refusal(*arguments)


@pytest.mark.smoke
@pytest.mark.parametrize("folder", [Path("recipes/presets"), ROOT / "recipes/presets"])
def test_a_preset_is_suggested_once(folder, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    names = read_refusal("--config", f"{folder}/fashion_mnst.yaml").partition("did you mean ")[2]
    files = [Path(name).resolve() for name in names.rstrip("?").split(", ")]
    assert files.count(ROOT / "recipes/presets/fashion_mnist.yaml") == 1
    assert len(files) == len(set(files))


def test_a_name_that_is_there_twice_is_suggested_once() -> None:
    assert suggest_names("husky", ["malamute", "husk", "husk"]) == "; did you mean husk?"


NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=20
)


@given(
    st.builds(
        Config,
        data=NAMES,
        name=st.one_of(
            st.just(""),
            NAMES,
            st.sampled_from(["--help", "-1", "null", "yes", "1e5", "~", "a: b", "#", "'"]),
        ),
        pretrained=st.booleans(),
        visible=st.booleans(),
        image_size=st.integers(0, 10**12),
        crop_pct=st.floats(0, 1),
        temperature=st.floats(allow_nan=False, allow_infinity=False),
        lr=st.floats(0, 1e6),
        loss=st.sampled_from(["ce", "bce"]),
        seed=st.integers(0, 2**63 - 1),
    )
)
@example(Config(data="\x85", name="a\u2028b"))
@settings(max_examples=25)
def test_a_saved_configuration_comes_back_as_it_was(config: Config) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        save_config(config, path)
        assert parse(Config, ["--config", str(path)]) == config
        # The recipe's own come first.
        assert list(yaml.safe_load(path.read_text()))[:2] == ["data", "pretrained"]


def print_help(
    capsys: pytest.CaptureFixture, *args: str, config: type = Config
) -> tuple[str, list[str]]:
    """The help text, and the flags that it explains."""
    with pytest.raises(SystemExit) as end:
        parse(config, list(args), "cls.py")
    assert not end.value.code
    text = capsys.readouterr().out
    return text, re.findall(r"^  --(\w+)", text, re.MULTILINE)


def test_help_shows_few_flags_and_help_all_every_one(capsys, preset, monkeypatch) -> None:
    all_flags = ["config", *(field.name for field in dataclasses.fields(Config))]
    for flag in ("--help", "-h"):
        text, few = print_help(capsys, "--lr", "1", flag)
        assert {"config", "data", "lr", "epochs", "name"} <= set(few) < set(
            all_flags
        ) and "temperature" not in few
        assert (
            f"These are {len(few)} of {len(all_flags)} flags; --help all shows every one." in text
            and "cls.py" in text
        )
        text, flags = print_help(capsys, flag, "all")
        assert (
            sorted(flags) == sorted(all_flags)
            and "A switch that is off." in text
            and "These are" not in text
        )
        assert flags.index("data") < flags.index("val_share") < flags.index("global_batch_size")
        groups = re.findall(r"^(\w+):$", text, re.MULTILINE)
        assert len(groups) == len(set(groups)) == 8 and groups.index("data") < groups.index(
            "optimization"
        )
    file = preset("temperature: 0.4321")
    assert print_help(capsys, *file, "--help", "all")[0].count("[0.4321]") == 1, "of the preset"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert print_help(capsys, *file, "--help")[0] == "", "one process per machine prints"


@pytest.mark.parametrize("recipe", [cls, det])
def test_help_of_a_recipe_shows_at_most_25_flags(capsys, recipe) -> None:
    assert 20 <= len(print_help(capsys, "--help", config=recipe.Config)[1]) <= 25


def test_a_field_that_no_flag_can_set_is_refused_by_name() -> None:
    @dataclass
    class Copied(Config):
        widths: tuple[int, ...] = (1, 2)

    with pytest.raises(
        Refused,
        match=r"Copied.widths: tuple\[int, ...\] can't be given as a flag; take bool, int, float, str",
    ):
        parse(Copied, [])


def test_a_field_may_decide_on_defaults_of_others(preset) -> None:
    assert parse(Config, ["--init", "lion"]) == Config(init="lion", opt="lion", loss="bce", seed=7)
    config = parse(Config, [*preset("seed: 3"), "--init", "lion", "--loss", "ce"])
    assert config == Config(init="lion", opt="lion", loss="ce", seed=3)
    assert parse(Config, list(preset("init: lion"))).seed == 7


def test_fields_that_may_change_do_not_define_a_run() -> None:
    run = get_identity(Config())
    assert (
        "group_column" not in run
        and get_identity(Config(group_column="patient"))["group_column"] == "patient"
    )
    assert get_identity(Config(workers=7, name="x", epochs=3.0, max_micro_batch_size=9)) == run
    for changed in (Config(seed=1), Config(global_batch_size=65), Config(lr=0.1)):
        assert compute_short_hash(get_identity(changed)) != compute_short_hash(run)
    assert json.loads(json.dumps(run)) == run  # as it goes through a checkpoint's record
