"""Passwords and signatures are neither printed nor recorded, and a stranger's file can't have them
sent away.
"""

import json
import os
import re
from dataclasses import dataclass

import pytest

from common.config.fields import option
from common.config.parsing import parse
from common.config.secrets import redact_name
from common.errors import Refused, make_printable
from common.files import to_json
from common.shards.names import list_shards

LIST = "https://h/train-{000..001}.tar?$SIGNATURE,https://h/val.tar?$SIGNATURE"


@dataclass
class Config:
    data: str = ""
    eval_only: str = option("", may_change=True)


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> None:
    monkeypatch.setenv("SIGNATURE", "Policy=abc,SECRET1*{1..2}?SECRET2@SECRET3/%SECRET4")
    monkeypatch.setenv("TOKEN", "SECRET5")
    monkeypatch.setenv("COMMAS", "x,SECRET*,{1..2}")


@pytest.mark.parametrize(
    "data, names, printed",
    [
        ("https://h/a.tar?$SIGNATURE", ["https://h/a.tar?SIGNATURE_VALUE"], "https://h/a.tar"),
        ("https://h/$TOKEN/a.tar", ["https://h/SECRET5/a.tar"], "https://h/$TOKEN/a.tar"),
        ("https://h/${TOKEN}b/a.tar", ["https://h/SECRET5b/a.tar"], "https://h/$TOKENb/a.tar"),
        ("https://bob:$TOKEN@h/a.tar", ["https://bob:SECRET5@h/a.tar"], "https://h/a.tar"),
        (
            "https://h/a.tar?k=$TOKEN&s=${SIGNATURE}",
            ["https://h/a.tar?k=SECRET5&s=SIGNATURE_VALUE"],
            "https://h/a.tar",
        ),
        (
            "https://h:8080/$COMMAS/a.tar",
            ["https://h:8080/x,SECRET*,{1..2}/a.tar"],
            "https://h:8080/$COMMAS/a.tar",
        ),
        (
            LIST,
            [f"https://h/{name}.tar?SIGNATURE_VALUE" for name in ("train-000", "train-001", "val")],
            "https://h/train-000.tar",
        ),
    ],
)
def test_values_are_filled_in_last_and_shown_nowhere(monkeypatch, data, names, printed) -> None:
    shards = list_shards(data)
    assert shards == [name.replace("SIGNATURE_VALUE", os.environ["SIGNATURE"]) for name in names]
    assert redact_name(shards[0]) == printed
    for text in (
        make_printable(f"could not read {shards[0]}"),
        str(Refused(shards)),
        json.dumps(to_json({"x": [shards]})),
    ):
        assert "SECRET" not in text


@pytest.mark.parametrize(
    "data",
    [
        "http://bob:SECRET@h/a.tar?$SIGNATURE",
        "http://SECRET@h/a.tar",
        "http://bob:SEC/RET?SECRET@h/a.tar?$SIGNATURE",
        "https://h/a.tar?$SIGNATURE&key=SECRET",
        "https://h/a.tar?$SIGNATURE,https://h/b.tar?SECRET",
        " HTTPS://h/a.tar?SECRET",
        "simplecache::https://h/a.tar?SECRET",
        "abfs://c/a.tar?sv=1&sig=SECRET",
    ],
)
def test_a_secret_that_is_typed_is_refused_whatever_else_is(data) -> None:
    for read in (list_shards, lambda data: parse(Config, ["--data", data])):
        with pytest.raises(Refused, match="a password or signature would be recorded") as error:
            read(data)
        assert "SECRET" not in str(error.value)


def test_a_variable_that_is_not_set_is_refused() -> None:
    with pytest.raises(Refused, match="the environment has no variable NOTHING"):
        list_shards("https://h/a.tar?$NOTHING")


def test_variables_are_filled_in_only_where_they_are_typed(tmp_path) -> None:
    preset = tmp_path / "preset.yaml"
    config = {"data": "http://evil/$TOKEN/a.tar?k=$SIGNATURE"}
    preset.write_text(f"data: {config['data']}\n")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "run.json").write_text(json.dumps({"name": "a", "step": 1, "config": config}))
    ways = {
        f"--config {preset}:": ["--config", str(preset)],
        f"--eval_only {tmp_path}:": ["--eval_only", str(tmp_path)],
    }
    for start, argv in ways.items():
        with pytest.raises(
            Refused,
            match=rf"^{re.escape(start)} data http.*only where you type it; give --data again as a flag$",
        ):
            parse(Config, argv)
        assert parse(Config, [*argv, "--data", LIST]).data == LIST
