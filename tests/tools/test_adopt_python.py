"""Python configurations are evaluated, not executed: values are Python's own, inheritance is MMEngine's, work is bounded."""

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from common.errors import Refused
from tools.adopt.python_values import values_of


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    return path


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return [*map(plain, value)] if isinstance(value, (list, tuple)) else value


BASE = """
scale = (1333, 800)
pipeline = [dict(type='Resize', scale=scale)]
model = dict(type='A', neck=dict(depth=1, width=2))
"""
TOP = """
_base_ = ['base.py', './more.py']
'''A docstring.'''
epochs = 4 * 3 - -1
x = y = [(1333, side) for side in [640 + 32 * 2, 2**5]]
_base_.model.neck.width = 7
taken = _base_.pipeline[0].scale
last = [1, 2, 3][-2:]
also = {{_base_.scale}}
model = dict(neck=dict(_delete_=True, depth=_base_.model.neck.width // 2), head={'a': None, **dict(b=1.5 / 2)})
merged = dict(model['head'], c=taken[0], d=(1, 2)[:1], e='a' + 'b' * 2)
gone = 1
del gone
"""


def test_values_are_those_of_mmengine(tmp_path) -> None:
    config = pytest.importorskip("mmengine.config").Config
    written(tmp_path / "base.py", BASE)
    written(tmp_path / "more.py", "other = dict(a=1)\n")
    file = written(tmp_path / "top.py", TOP)
    ours = plain(values_of(file))
    assert ours == plain(config.fromfile(str(file), lazy_import=False)._cfg_dict)
    assert (
        ours["epochs"] == 13 and ours["model"]["neck"] == {"depth": 3} and ours["taken"] == ours["also"] == [1333, 800]
    )


# What each of these would do if it were executed is to make the file `mark`.
ATTACKS = [
    "import os\nos.system('touch {mark}')",
    "x = __import__('os').system('touch {mark}')",
    "help.update = eval\nx = help.update(\"open({mark!r}, 'w')\")\nhelp = eval = open = 1",
    "license.update = exec\nx = license.update(\"open({mark!r}, 'w')\")\nlicense = exec = 1",
    "quit.pop = open\nx = quit.pop({mark!r}, 'w')\nquit = open = 1",
    "_base_ = 'early.py'",
    "dict = eval\nx = dict('open({mark!r}, \"w\")')",
    "x = [dict for dict in [1]]",
    "x = ().__class__.__base__.__subclasses__()",
    "x = (lambda: open({mark!r}, 'w'))()",
    "def f():\n    open({mark!r}, 'w')",
    "x = open({mark!r}, 'w')",
    "e = open\nx = [e({mark!r}, 'w') for y in [0]]",
    "x = '{{{{ $HOME:x }}}}'",
    "_base_ = ['b.yaml']",
    "_base_ = 'mmdet::_base_/default_runtime.py'",
    "_base_ = 'bad.py'",
    "_base_ = [open({mark!r}, 'w')]",
    "with read_base():\n    from .bad import *",
    "from torch.nn import BatchNorm2d",
    "x = list(open({mark!r}, 'w'))",
    "with open({mark!r}, 'w'):\n    pass",
    "a = dict()\nx = a.update.__globals__",
    "x = f'{{open({mark!r}, 'w')}}'" if sys.version_info >= (3, 12) else "x = f'{{dict}}'",
    "for x in [3]: pass",
    "x = 'a'.__class__",
    "x = _base_.__class__",
    "_base_.x = 1",
    "from os import *",
    "x = '%s' % 1",
    "x: open({mark!r}, 'w') = 1",
    "x = (y := 1)",
]
SLOW = {  # would take more time or memory than there is
    "power": "x = 9**9**9",
    "powers": "x = 10**18\nx2 = x**63",
    "text": "x = 'a' * 10**10",
    "list": "x = [0] * 10**9",
    "lists": "x = [[[0] * 1000] * 1000] * 1000",
    "doubling": "a0 = [1] * 10\n" + "".join(f"a{n + 1} = [a{n}, a{n}]\n" for n in range(60)),
    "doubling texts": "a0 = 'a'\n" + "".join(f"a{n + 1} = a{n} + a{n}\n" for n in range(60)),
    "products": "x = 2**62\n" + "y = x * x * x\n",
    "nested lists": "x = " + "[" * 90 + "]" * 90,
    "nested brackets": "x = " + "(" * 10_000 + ")" * 10_000,
    "signs": "x = " + "-" * 10_000 + "1",
    "deep names": "a = [1]\n" + "a = [a]\n" * 100,
    "sums": "x = " + "1 + " * 50_000 + "1",
    "comprehensions": "x = [1] * 1000\ny = [[[[1 for a in x] for b in x] for c in x] for d in x]",
    "digits": "x = " + "9" * 5000,
    "itself": "_base_ = 'slow.py'",
    "in itself": "_base_ = 'early2.py'\n_base_.a.b = _base_.a\n_base_.a.b.b = _base_.a",
}


def is_refused(path: Path) -> bool:
    try:
        values_of(path)
    except Refused as error:
        assert "\n" not in str(error) and str(error).startswith(str(path.parent)), error
        return True
    return False


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_does_more_than_assign_values_is_refused_and_not_executed(attack, tmp_path) -> None:
    mark = tmp_path / "mark"
    written(tmp_path / "bad.py", f"open({str(mark)!r}, 'w')")
    written(tmp_path / "b.yaml", f"x: !!python/object/apply:os.system ['touch {mark}']")
    written(
        tmp_path / "early.py", f"help.update = eval\nx = help.update(\"open({str(mark)!r}, 'w')\")\nhelp = eval = 1"
    )
    assert is_refused(written(tmp_path / "config.py", attack.format(mark=str(mark))))
    assert not mark.exists()


def test_work_and_memory_are_bounded(tmp_path) -> None:
    written(tmp_path / "early2.py", "a = dict(b=1)")
    for name, text in SLOW.items():
        start = time.process_time()
        assert is_refused(written(tmp_path / "slow.py", text)), name
        assert time.process_time() - start < 5, name
    for level in range(40):  # each file inherits from the one before twice
        bases = f"_base_ = ['f{level - 1}.py', 'f{level - 1}.py']" if level else ""
        written(tmp_path / f"f{level}.py", f"{bases}\n")
    start = time.process_time()
    assert is_refused(tmp_path / "f39.py")
    assert time.process_time() - start < 20


LEAVES = (
    "1 -2 3.5 'a' None True x y z 2**70 [] 9 '{{x}}' open help _base_ ... __import__ '%d' eval b'x' 1j 1e999".split()
)
SHAPES = """({} + {});({} * {});{} ** {};({} - {});({} // {});[{}, {}];({}, {});dict(a={}, b={});{{'k': {}, **{}}}
[{}, {}][0];(({}, {}));[{} for w in [{}]];({})[{}];({})[{}:]""".replace("\n", ";").split(";")
ODD = """-({} or {});{}({});({}).update({});eval({}, {});({} if x else {});(lambda: {})({});[*{}, {}];f'{{{}}}{{{}}}'
({}).__class__[{}];getattr({}, {});open({}, {});{{{}, {}}};({} % {});({} << {});({} < {})""".replace("\n", ";").split(
    ";"
)
LINES = """x = {0};y = {0};z = x = {0};x = {0};y = {0};_base_ = {0};x.y = {0};x += {0};del x;{0};import os;x[0] = {0}
print({0});if {0}: x = 1;with read_base(): x = {0};from os import *""".replace("\n", ";").split(";")


def expression(draw: random.Random, depth: int) -> str:
    if not depth or draw.random() < 0.3:
        return draw.choice(LEAVES[:12] if draw.random() < 0.9 else LEAVES)
    shape = draw.choice(SHAPES if draw.random() < 0.95 else ODD)
    return shape.format(expression(draw, depth - 1), expression(draw, depth - 1))


def test_generated_files_execute_nothing_and_have_the_values_that_python_gives_them(tmp_path) -> None:
    """2,000 files, and 10,000 with RECIPES_FUZZ=10000: none executes anything, hangs or crashes."""
    count = int(os.environ.get("RECIPES_FUZZ", 2000))
    heard: list[str] = []
    listening = False

    def hook(event: str, args: tuple) -> None:
        if listening and event in ("exec", "import", "os.system", "subprocess.Popen", "object.__getattr__"):
            heard.append(event)

    sys.addaudithook(hook)
    draw, accepted, slowest = random.Random(0), 0, 0.0
    for _ in range(count):
        lines = [draw.choice(LINES[:5] if draw.random() < 0.9 else LINES) for _ in range(draw.randint(1, 4))]
        text = "\n".join(["x = y = z = 1", *(line.format(expression(draw, draw.randint(0, 4))) for line in lines)])
        file = written(tmp_path / "fuzz.py", text)
        start, listening, found = time.process_time(), True, None
        try:
            found = values_of(file)
        except Refused as error:
            assert "\n" not in str(error), text
        finally:
            listening = False
        slowest = max(slowest, time.process_time() - start)
        assert not heard, (text, heard)
        if found is not None:
            accepted += 1
            theirs: dict[str, Any] = {"__builtins__": {"dict": dict, "list": list, "tuple": tuple}}
            exec(text, theirs)
            assert repr(plain(found)) == repr(plain({name: theirs[name] for name in found})), text
    assert accepted > count / 6 and slowest < 2, (accepted, slowest)


@pytest.mark.long
def test_every_config_of_mmdetection_is_read_as_mmengine_reads_it(mmdetection_configs) -> None:
    config = pytest.importorskip("mmengine.config").Config
    counts = {"the same": 0, "refused": 0}
    for file in mmdetection_configs:
        try:
            ours = plain(values_of(file))
        except Refused:
            counts["refused"] += 1
            continue
        options = {
            "use_predefined_variables": False,
            "import_custom_modules": False,
            "use_environment_variables": False,
        }
        assert ours == plain(config.fromfile(str(file), lazy_import=False, **options)._cfg_dict), file
        counts["the same"] += 1
    assert counts == {"the same": 800, "refused": 69}
