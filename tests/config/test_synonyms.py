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
    all_names = [name for names in known.values() for name in names]
    assert len(all_names) == len(set(all_names)) > 60, "each leads to one flag"
    for flag, names in known.items():
        for name in names:
            with pytest.raises(Refused) as raised:
                parse(RECIPES[recipe], [f"--{name.replace('_', '-')}=1"])
            said = str(raised.value)
            what, _, way = said.partition("; ")
            assert what == f"unknown flag --{name.replace('_', '-')}" and f"--{flag}" in way, said
            assert way.startswith(("here it is ", "not needed: ")), said


def test_every_flag_and_note_of_the_table_is_of_a_recipe() -> None:
    assert {*NOTES} <= {*FLAGS} <= FIELDS["cls"] | FIELDS["det"]
    for text in NOTES.values():
        assert {*re.findall(r"--(\w+)", text)} <= FIELDS["cls"] | FIELDS["det"]


def test_flags_of_the_launcher_exist_there_and_not_in_recipes() -> None:
    options = {word for action in launch_command_parser()._actions for word in action.option_strings}
    assert {f"--{name}" for name in LAUNCH.split()} <= options
    for names in OTHERS.values():
        assert not {*names.split()} & (FIELDS["cls"] | FIELDS["det"])


def test_a_flag_of_another_recipe_is_recognised() -> None:
    assert hint("detector", FIELDS["cls"], Path(cls.__file__)) == "; it is a flag of recipes/det.py"
    assert hint("label_column", FIELDS["det"], Path(det.__file__)) == "; it is a flag of recipes/cls.py"
    assert hint("nonsense", FIELDS["cls"], Path(cls.__file__)) == ""
