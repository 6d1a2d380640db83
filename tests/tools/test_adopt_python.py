"""Python configurations are evaluated, not executed: values are Python's own, inheritance is MMEngine's, work is bounded."""

import time
from pathlib import Path
from typing import Any

import pytest

from common.errors import Refused
from tests.tools.test_adopt import written
from tools.adopt.python_values import values_of


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
    "quit.pop = open\nx = quit.pop({mark!r}, 'w')\nquit = open = 1",
    "_base_ = 'early.py'",
    "dict = eval\nx = dict('open({mark!r}, \"w\")')",
    "x = ().__class__.__base__.__subclasses__()",
    "x = (lambda: open({mark!r}, 'w'))()",
    "def f():\n    open({mark!r}, 'w')",
    "x = '{{{{ $HOME:x }}}}'",
    "_base_ = ['b.yaml']",
    "_base_ = 'mmdet::_base_/default_runtime.py'",
    "_base_ = 'bad.py'",
    "_base_ = [open({mark!r}, 'w')]",
    "with read_base():\n    from .bad import *",
    "a = dict()\nx = a.update.__globals__",
    "x = f'{{open}}'",
    "for x in [3]: pass",
    "_base_.x = 1",
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
    "nested lists": "x = " + "[" * 90 + "]" * 90,
    "nested brackets": "x = " + "(" * 10_000 + ")" * 10_000,
    "signs": "x = " + "-" * 700 + "1",
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


def test_what_does_more_than_assign_values_is_refused_and_not_executed(tmp_path) -> None:
    mark = str(tmp_path / "mark")
    written(tmp_path / "bad.py", f"open({mark!r}, 'w')")
    written(tmp_path / "b.yaml", f"x: !!python/object/apply:os.system ['touch {mark}']")
    written(tmp_path / "early.py", ATTACKS[2].format(mark=mark))
    for attack in ATTACKS:
        assert is_refused(written(tmp_path / "config.py", attack.format(mark=mark))), attack
        assert not Path(mark).exists(), attack


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
        options = dict.fromkeys(
            ("use_predefined_variables", "import_custom_modules", "use_environment_variables"), False
        )
        assert ours == plain(config.fromfile(str(file), lazy_import=False, **options)._cfg_dict), file
        counts["the same"] += 1
    assert counts == {"the same": 800, "refused": 69}
