"""Modules import downward only, and a recipe is one readable file. Every check is shown to fail where it should."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {path.stem: path.read_text() for path in sorted((ROOT / "common").glob("*.py")) if path.stem != "__init__"}
PACKAGES = sorted(path.parent for path in (ROOT / "common").glob("*/__init__.py"))  # what the recipes of one task share
RECIPES = {path.stem: path.read_text() for path in sorted((ROOT / "recipes").glob("*.py"))}
MOST_LINES = {"det": 400}  # others: 350
MOST_FIELDS = 40


def documented(package: str) -> list[tuple[str, str]]:
    """The modules of a package as docs/design.md has them, lowest first, with the question of each."""
    chapter = (ROOT / "docs" / "design.md").read_text().split(f"## Modules of {package}/\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \| (.*) \|$", chapter, re.MULTILINE)


ROWS = documented("common")

NAMELESS = {"util", "utils", "utility", "utilities", "misc", "helper", "helpers", "tools", "lib", "core", "base"}
RANK_NAMES = {
    "is_main",
    "is_main_process",
    "is_local_main",
    "is_local_main_process",
    "is_last_process",
    "on_main_process",
    "on_local_main_process",
    "process_index",
    "local_process_index",
    "RANK",
    "LOCAL_RANK",
}
RANK_CALLS = {"rank", "local_rank", "node_rank", "get_rank", "get_node_local_rank"}
BY_STRING = {"getattr", "setattr", "eval", "exec", "globals", "locals", "vars", "__import__"}


# --- the checks: each takes source text and returns what is wrong with it


def imports_of(source: str, package: str = "common") -> set[str]:
    """`from common import a`, `from common.b import x`, `import common.c`, `import recipes.cls` -> a, b, c, recipes."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = (f"{package}." if node.level else "") + (f"{node.module}." if node.module else "")
            names += [module + alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    inside = {name.removeprefix(f"{package}.").split(".")[0] for name in names if name.startswith(f"{package}.")}
    return inside | {"recipes" for name in names if name.split(".")[0] == "recipes"}


def upward_imports(order: list[str], sources: dict[str, str], package: str = "common") -> list[str]:
    height = {name: place for place, name in enumerate(order)}
    return [
        f"{name} imports {imported}"
        for name, source in sources.items()
        for imported in sorted(imports_of(source, package))
        if imported not in height or height[imported] >= height.get(name, len(order))
    ]


def cycle(imports: dict[str, set[str]]) -> list[str]:
    try:
        list(TopologicalSorter(imports).static_order())
    except CycleError as error:
        return error.args[1]
    return []


def question(source: str) -> str:
    return (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]


def asks_no_question(source: str) -> bool:
    """Whether the docstring's first sentence does not end in a question mark."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    end = re.search(r"[.!?](?=\s|$)", docstring)
    return not end or end[0] != "?"


def too_long(source: str, most: int) -> list[str]:
    lines = len(source.splitlines())
    return [f"{lines} lines, at most {most}"] if lines > most else []


def out_of_order(source: str) -> list[str]:
    """Docstring, imports, Config, build_*, train_step, evaluate, others, main, the guard."""
    tree = ast.parse(source)
    wrong = [] if ast.get_docstring(tree) else ["no docstring"]
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for name in ("Config", "evaluate", "main"):
        if names.count(name) != 1:
            return [*wrong, f"{names.count(name)} x {name}"]
    builders = [place for place, name in enumerate(names) if name.startswith("build_")]
    if names[0] != "Config":
        wrong.append(f"{names[0]} stands before Config")
    if builders != list(range(1, 1 + len(builders))) or not builders:
        wrong.append("build_* functions do not follow Config in one block")
    if "train_step" in names and names.index("train_step") > names.index("evaluate"):
        wrong.append("train_step stands after evaluate")
    if names[-1] != "main":
        wrong.append("main is not the last")
    if ast.unparse(tree.body[-1]) != "if __name__ == '__main__':\n    launch.run(main)":
        wrong.append("does not end in launch.run(main)")
    return wrong


def rank_tests(source: str) -> list[str]:
    """Names that tell the main process from others, and ranks that something depends on."""
    tree = ast.parse(source)
    named = [node for node in ast.walk(tree) if _name(node) in RANK_NAMES]
    named += [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in RANK_NAMES]
    named += [node for node in ast.walk(tree) if isinstance(node, ast.alias) and node.name in RANK_NAMES]
    conditions = [node for node in ast.walk(tree) if isinstance(node, (ast.Compare, ast.BoolOp))]
    conditions += [node.operand for node in ast.walk(tree) if isinstance(node, ast.UnaryOp)]
    branching = (ast.If, ast.IfExp, ast.While, ast.Assert)
    conditions += [node.test for node in ast.walk(tree) if isinstance(node, branching)]
    asked = [
        call
        for condition in conditions
        for call in ast.walk(condition)
        if isinstance(call, ast.Call) and _name(call.func) in RANK_CALLS
    ]
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in named + asked]


def bad_fields(source: str, most: int) -> list[str]:
    """Fields of the dataclasses whose name ends in Config: too many, without a docstring, or derived from others."""
    wrong = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and not node.name.startswith("_"):
            fields = [line for line in node.body if isinstance(line, ast.AnnAssign)]
            if len(fields) > most:
                wrong.append(f"{node.name}: {len(fields)} fields, at most {most}")
            for line, following in zip(node.body, [*node.body[1:], None], strict=True):
                if line in fields and not _is_text(following):
                    wrong.append(f"{node.name}.{line.target.id} has no docstring")
            methods = [line.name for line in node.body if isinstance(line, ast.FunctionDef)]
            wrong += [f"{node.name}.{name} is a method" for name in methods]
    return wrong


def found_by_string(source: str) -> list[str]:
    """Calls that find something by text that a user gives; but for the number type, and names that stand right there."""
    tree = ast.parse(source)
    fine = {id(call) for loop in ast.walk(tree) for name in _literal_names(loop) for call in _lookups(loop, name)}
    wrong = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = _name(call.func)
        if name == "import_module" or isinstance(call.func, ast.Name) and name in BY_STRING:  # not model.eval()
            attribute = call.args[1] if name in ("getattr", "setattr") else None
            dtype = ast.unparse(call) == "getattr(torch, config.dtype)"
            if not (isinstance(attribute, ast.Constant) or dtype or id(call) in fine):
                wrong.append(f"line {call.lineno}: {ast.unparse(call)}")
    return wrong


def hidden_loss(source: str) -> list[str]:
    """The step's lines stand in `main`, or in one function that it calls; the loss is one more call away at most."""
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    called = {_name(call.func) for call in ast.walk(functions["main"]) if isinstance(call, ast.Call)}
    near = [functions["main"], *(function for name, function in functions.items() if name in called)]
    wrong = []
    for line in ("backward", "clip_gradients", "step", "zero_grad"):
        if not any(line in _calls(function) for function in near):
            wrong.append(f"{line} is not called from main, nor from a function that main calls")
    for function in near:
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and _name(call.func) == "backward":
                used = {node.id for argument in call.args for node in ast.walk(argument) if isinstance(node, ast.Name)}
                if not used & _results_of_calls(function):
                    wrong.append(f"{function.name}: what goes backward is not the result of a call that stands there")
    return wrong


def _name(node: ast.AST) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _literal_names(loop: ast.AST) -> list[str]:
    """Names that a loop or comprehension gives to the constants of a tuple or list that stands in it."""
    rounds = [loop] if isinstance(loop, ast.For) else getattr(loop, "generators", [])
    return [
        each.target.id
        for each in rounds
        if isinstance(each.target, ast.Name) and isinstance(each.iter, (ast.Tuple, ast.List))
        if all(isinstance(element, ast.Constant) for element in each.iter.elts)
    ]


def _lookups(loop: ast.AST, name: str) -> list[ast.Call]:
    """Calls such as getattr(config, name)."""
    calls = [
        call for call in ast.walk(loop) if isinstance(call, ast.Call) and _name(call.func) in ("getattr", "setattr")
    ]
    return [call for call in calls if _name(call.args[1]) == name]


def _calls(function: ast.FunctionDef) -> set[str]:
    return {_name(call.func) for call in ast.walk(function) if isinstance(call, ast.Call)}


def _results_of_calls(function: ast.FunctionDef) -> set[str]:
    """Names that are assigned the result of a call (or a part of it)."""
    return {
        name.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }


# --- common


@pytest.mark.smoke
def test_modules_import_only_what_the_documentation_lists_before_them() -> None:
    assert upward_imports([name for name, _ in ROWS], MODULES) == []


def test_modules_form_no_cycle() -> None:
    assert cycle({name: imports_of(source) for name, source in MODULES.items()}) == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_of_one_task_stands_above_the_modules_and_is_built_like_them(package: Path) -> None:
    sources = {path.stem: path.read_text() for path in sorted(package.glob("*.py")) if path.stem != "__init__"}
    assert cycle({name: imports_of(source, f"common.{package.name}") for name, source in sources.items()}) == []
    rows = documented(f"common/{package.name}")
    assert upward_imports([name for name, _ in rows], sources, f"common.{package.name}") == []
    assert dict(rows) == {name: question(source) for name, source in sources.items()}
    for name, source in sources.items():
        assert imports_of(source) <= {*MODULES, package.name}, name
        assert not asks_no_question(source) and not set(name.split("_")) & NAMELESS, name


def test_the_documentation_lists_every_module_with_its_question() -> None:
    assert dict(ROWS) == {name: question(source) for name, source in MODULES.items()}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_answers_one_question(name: str) -> None:
    assert not asks_no_question(MODULES[name])
    assert not set(name.split("_")) & NAMELESS


def test_an_upward_import_a_cycle_and_a_recipe_would_be_seen() -> None:
    sources = {"low": "import numpy", "middle": "from common.low import x", "high": "from common import low, middle"}
    assert upward_imports(["low", "middle", "high"], sources) == []
    assert cycle({name: imports_of(source) for name, source in sources.items()}) == []
    assert upward_imports(["low", "high", "middle"], sources) == ["high imports middle"]
    late = sources | {"low": "def f():\n    from common import high"}  # also where it hides in a function
    assert upward_imports(["low", "middle", "high"], late) == ["low imports high"]
    assert {"low", "high"} <= set(cycle({name: imports_of(source) for name, source in late.items()}))
    for line in ("import recipes.cls", "from recipes import cls", "from recipes.cls import main"):
        assert upward_imports(["low"], {"low": line}) == ["low imports recipes"]
    for line in ("import common.other", "from . import other", "from .other import x", "from common.other import x"):
        assert upward_imports(["low"], {"low": line}) == ["low imports other"]


def test_a_module_without_a_question_would_be_seen() -> None:
    good = [
        '"""Which files, such as a.yaml, are there?"""',
        '"""What?\n\nThis. And that."""',
        '"""How? (so) Because."""',
    ]
    assert not any(map(asks_no_question, good))
    bad = ['"""Helpers."""', "import os", '"""Sums. What else?"""', '"""No end"""']
    assert all(map(asks_no_question, bad))


# --- recipes


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_one_readable_file(name: str) -> None:
    source = RECIPES[name]
    assert too_long(source, MOST_LINES.get(name, 350)) == []
    assert out_of_order(source) == []
    assert bad_fields(source, MOST_FIELDS) == []
    assert rank_tests(source) == []
    assert found_by_string(source) == []
    assert hidden_loss(source) == []
    assert "recipes" not in imports_of(source)


def test_shared_fields_of_configurations_are_explained_too() -> None:
    assert bad_fields(MODULES["config"], MOST_FIELDS) == []


RECIPE = '''
"""Train a thing."""
import torch

class Config:
    """Fields."""
    lr: float = 1.0
    """Rate."""

def build_model(config):
    return torch.nn.Linear(1, 1).to(getattr(torch, config.dtype))

def evaluate(model):
    return [getattr(model, name) for name in ("weight", "bias")]

def main():
    seed = key_of(config.seed, rank())
    for step in range(3):
        loss = losses_of(model(images), targets)
        accelerator.backward(loss.sum() * scale)
        clip_gradients(model.parameters())
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    launch.run(main)
'''.strip()


def doctored(old: str, new: str) -> str:
    assert RECIPE.count(old) == 1
    return RECIPE.replace(old, new)


def test_the_example_recipe_passes_every_check() -> None:
    checks = (out_of_order, rank_tests, found_by_string, hidden_loss)
    assert [check(RECIPE) for check in checks] + [bad_fields(RECIPE, 1), too_long(RECIPE, 25)] == [[]] * 6


def test_a_recipe_that_is_too_long_would_be_seen() -> None:
    assert too_long(RECIPE, 24) == ["25 lines, at most 24"]


@pytest.mark.parametrize(
    "old, new, told",
    [
        ('"""Train a thing."""\n', "", "no docstring"),
        ("class Config:", "def early():\n    pass\n\nclass Config:", "early stands before Config"),
        ("def build_model", "def make_model", "build_* functions do not follow"),
        (
            "def evaluate",
            "def draw():\n    pass\n\ndef build_more():\n    pass\n\ndef evaluate",
            "build_* functions do not",
        ),
        ("def evaluate", "def test", "0 x evaluate"),
        ("def main", "def train_step():\n    pass\n\ndef main", "train_step stands after evaluate"),
        ("if __name__", "def late():\n    pass\n\nif __name__", "main is not the last"),
        ("launch.run(main)", "main()", "does not end in launch.run(main)"),
    ],
)
def test_a_recipe_in_another_order_would_be_seen(old: str, new: str, told: str) -> None:
    assert told in "; ".join(out_of_order(doctored(old, new)))


@pytest.mark.parametrize(
    "line",
    [
        "if is_main(): print(1)",
        "if accelerator.is_main_process: print(1)",
        "if rank() == 0: print(1)",
        "if not rank(): print(1)",
        "print(1) if collectives.rank() else None",
        "rank() or print(1)",
        "0 < dist.get_rank()",
        "main = not local_rank()",
        "accelerator.on_main_process(print)(1)",
        "if accelerator.process_index: pass",
        "from common.distributed.collectives import is_local_main",
        "os.environ['LOCAL_RANK']",
        "while local_rank() < 1: pass",
    ],
)
def test_a_rank_test_would_be_seen(line: str) -> None:
    assert rank_tests(doctored("seed = key_of(config.seed, rank())", line))


@pytest.mark.parametrize(
    "old, new, told",
    [
        ('    """Rate."""\n', "", "Config.lr has no docstring"),
        ('    """Rate."""\n', '    """Rate."""\n    mixup: float = 0.0\n', "Config.mixup has no docstring"),
        ('    """Rate."""\n', '    """Rate."""\n    a: int = 1\n    """A."""\n', "Config: 2 fields, at most 1"),
        (
            '    """Rate."""\n',
            '    """Rate."""\n    def __post_init__(self): pass\n',
            "Config.__post_init__ is a method",
        ),
    ],
)
def test_a_field_without_words_and_a_field_too_many_would_be_seen(old: str, new: str, told: str) -> None:
    assert told in bad_fields(doctored(old, new), 1)


@pytest.mark.parametrize(
    "call",
    [
        "getattr(models, config.model)()",
        "getattr(torch, config.loss)",
        "eval(config.loss)",
        "globals()[config.model]()",
        "importlib.import_module(config.model)",
        "setattr(model, config.head, 1)",
        "[getattr(models, name) for name in config.names]",
    ],
)
def test_what_is_found_by_a_users_text_would_be_seen(call: str) -> None:
    assert found_by_string(doctored("key_of(config.seed, rank())", call))


def test_a_step_out_of_sight_would_be_seen() -> None:
    body = RECIPE[RECIPE.index("        loss =") : RECIPE.index("if __name__")]
    one_deeper = RECIPE.replace(body, "        train_step()\n\n").replace(
        "def evaluate", f"def train_step():\n{body}def evaluate"
    )
    assert hidden_loss(one_deeper) == []
    two_deeper = one_deeper.replace("        train_step()\n", "        train_epoch()\n").replace(
        "def evaluate", "def train_epoch():\n    train_step()\n\ndef evaluate"
    )
    assert "backward is not called from main, nor from a function that main calls" in hidden_loss(two_deeper)
    assert hidden_loss(doctored("        optimizer.zero_grad()\n", "")) == [
        "zero_grad is not called from main, nor from a function that main calls"
    ]
    inside = doctored("        loss = losses_of(model(images), targets)\n", "").replace(
        "loss.sum()", "model.loss.sum()"
    )
    assert hidden_loss(inside) == ["main: what goes backward is not the result of a call that stands there"]
