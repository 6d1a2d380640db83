"""Hints about flags of other tools name flags that the recipes really have."""

import dataclasses
import re
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from common.config.parsing import parse
from common.config.synonyms import HINTS, LAUNCHER_HINTS, suggest_flag
from common.errors import Refused
from recipes import cls, det

RECIPES = {"cls": cls.Config, "det": det.Config}
FIELDS = {
    recipe: {field.name for field in dataclasses.fields(config)}
    for recipe, config in RECIPES.items()
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_names_of_other_tools_lead_to_flags_of_the_recipe(recipe: str) -> None:
    for text, names in HINTS.items():
        flag = re.match(r"--(\w+)", text)[1]
        for name in names.split() if flag in FIELDS[recipe] else ():
            with pytest.raises(Refused) as raised:
                parse(RECIPES[recipe], [f"--{name.replace('_', '-')}=1"])
            message = str(raised.value)
            assert (
                message.startswith(f"unknown flag --{name.replace('_', '-')}; here it is --")
                and f"--{flag}" in message
            )


def test_flags_in_the_tables_exist_in_recipes_or_in_the_launcher() -> None:
    named = set(re.findall(r"--(\w+)", " ".join(HINTS)))
    assert named <= FIELDS["cls"] | FIELDS["det"] | {"config"}
    options = {
        word for action in launch_command_parser()._actions for word in action.option_strings
    }
    first, *other_hints = LAUNCHER_HINTS
    assert {f"--{name}" for name in LAUNCHER_HINTS[first].split()} | set(
        re.findall(r"--\w+", " ".join(other_hints))
    ) <= options
    assert not {name for names in LAUNCHER_HINTS.values() for name in names.split()} & named


def test_a_flag_of_another_recipe_is_recognised() -> None:
    assert (
        suggest_flag("detector", FIELDS["cls"], Path(cls.__file__))
        == "; it is a flag of recipes/det.py"
    )
    assert suggest_flag("nonsense", FIELDS["cls"], Path(cls.__file__)) == ""
