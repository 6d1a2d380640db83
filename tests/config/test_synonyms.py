"""Hints about flags of other tools name flags that the recipes really have."""

import dataclasses
import re
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from common.config.parsing import parse
from common.config.synonyms import FLAGS, LAUNCH, NOTES, OTHERS, hint
from common.errors import Refused
from recipes import cls, det

RECIPES = {"cls": cls.Config, "det": det.Config}
FIELDS = {recipe: {field.name for field in dataclasses.fields(config)} for recipe, config in RECIPES.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_names_of_other_tools_lead_to_flags_of_the_recipe_and_are_no_flags(recipe: str) -> None:
    known = {flag: names.split() for flag, names in FLAGS.items() if flag in FIELDS[recipe]}
    for flag, names in known.items():
        for name in names:
            with pytest.raises(Refused) as raised:
                parse(RECIPES[recipe], [f"--{name.replace('_', '-')}=1"])
            what, _, way = str(raised.value).partition("; ")
            assert what == f"unknown flag --{name.replace('_', '-')}" and f"--{flag}" in way, way
            assert way.startswith(("here it is ", "not needed: ")), way


def test_flags_in_the_tables_exist_in_recipes_or_in_the_launcher() -> None:
    fields = FIELDS["cls"] | FIELDS["det"]
    assert {*NOTES} <= {*FLAGS} <= fields and {*re.findall(r"--(\w+)", " ".join(NOTES.values()))} <= fields
    options = {word for action in launch_command_parser()._actions for word in action.option_strings}
    assert {f"--{name}" for name in LAUNCH.split()} <= options
    assert not {name for names in OTHERS.values() for name in names.split()} & fields


def test_a_flag_of_another_recipe_is_recognised() -> None:
    assert hint("detector", FIELDS["cls"], Path(cls.__file__)) == "; it is a flag of recipes/det.py"
    assert hint("nonsense", FIELDS["cls"], Path(cls.__file__)) == ""
