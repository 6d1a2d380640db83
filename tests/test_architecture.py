"""Rooms of common/ have faces, modules say what they are, and a recipe is one readable page.

That rooms import only from lower rooms stands in pyproject.toml, for import-linter, which `make lint` runs.
"""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from common.config.fields import OptimizationConfig, RunConfig
from common.run import Run

ROOT = Path(__file__).parent.parent
SOURCES = {}
for top in ("common", "compat", "recipes", "tools", "benchmarks", "tests"):
    for path in sorted((ROOT / top).rglob("*.py")):
        SOURCES[path.relative_to(ROOT)] = path.read_text()
RECIPES = {path.stem: path.read_text() for path in (ROOT / "recipes").glob("*.py")}
FACES = sorted(path.parent.name for path in (ROOT / "common").glob("*/__init__.py"))
ROOMS = FACES + sorted(path.stem for path in (ROOT / "common").glob("[!_]*.py"))

SHARED = (OptimizationConfig, RunConfig)
# What a person reads who opens a recipe: names of the project in `main`, `run.x` included.
MAX_NAMES_IN_MAIN = 30
MAX_LINES = {"cls": 290, "det": 280, "seg": 250}
MAX_MODULES = 9
MAX_IMPORTED_NAMES = 34
MAX_ARGUMENTS_OF_PREPARE = 6
MAX_METHODS_OF_RUN = 15
MAX_FIELDS = 46

STEP = ["backward", "clip_gradients", "step", "zero_grad"]
RANKS = {
    "rank",
    "local_rank",
    "node_rank",
    "get_rank",
    "process_index",
    "local_process_index",
    "RANK",
    "LOCAL_RANK",
}
RANKS |= {"is_main", "is_main_process", "is_local_main", "is_local_main_process", "on_main_process"}


# --- rooms


@pytest.mark.parametrize("room", ROOMS)
def test_the_map_of_rooms_names_every_room(room: str) -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    # config/, errors.py or `errors`, but not config/fields.py.
    assert re.search(rf"\b{room}(/(?!\w)|\.py|`)", text)


@pytest.mark.parametrize("room", FACES)
def test_a_face_has_the_names_that_it_lists(room: str) -> None:
    face = import_module(f"common.{room}")
    assert len(face.__all__) == len(set(face.__all__)) > 0
    for name in face.__all__:
        assert getattr(face, name) is not None
    with pytest.raises(ImportError, match="no_such_name"):
        exec(f"from common.{room} import no_such_name")


# --- devices

OF_ONE_KIND = {f"torch.{kind}" for kind in ("cuda", "mps", "xpu", "npu", "get_device_module")}


def find_nodes(tree: ast.AST, *kinds: type) -> list:
    """All nodes of these kinds below `tree`."""
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def test_one_module_calls_what_only_devices_of_a_kind_have() -> None:
    """Others call torch.accelerator, torch.Stream and torch.Event, which every kind has."""
    callers = []
    for path, source in SOURCES.items():
        if path.parts[0] in ("common", "compat", "recipes", "tools"):
            tree = ast.parse(source)
            names = list(map(ast.unparse, find_nodes(tree, ast.Attribute, ast.alias)))
            for node in find_nodes(tree, ast.ImportFrom):
                names.append(node.module)
            if OF_ONE_KIND.intersection(names):
                callers.append(str(path))
    assert callers == ["common/distributed/devices.py"]


# --- docstrings


def test_modules_say_what_they_are() -> None:
    """There is a docstring, whose first sentence doesn't ask."""
    for path, source in SOURCES.items():
        docstring = ast.get_docstring(ast.parse(source))
        assert docstring, path
        end = re.search(r"[.!?](?=\s|$)", docstring)
        assert not end or end[0] != "?", path


# --- recipes


def get_name(node: ast.AST) -> str:
    """The name of a variable, a function or a class, or the last part of a dotted one."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.alias)):
        return node.name
    return ""


def find_main(tree: ast.Module) -> ast.FunctionDef:
    return next(node for node in find_nodes(tree, ast.FunctionDef) if node.name == "main")


def find_imports(source: str) -> list[ast.ImportFrom]:
    """What is imported from common, by module."""
    imports = []
    for node in find_nodes(ast.parse(source), ast.ImportFrom):
        if (node.module or "").startswith("common"):
            imports.append(node)
    return imports


def find_names_in_main(source: str) -> set[str]:
    """Names in `main` that are imported from common or defined in the recipe, and what it uses of the run."""
    tree = ast.parse(source)
    project = set()
    for node in find_imports(source):
        for alias in node.names:
            project.add(alias.asname or alias.name)
    for node in tree.body:
        project.add(get_name(node))
        if isinstance(node, ast.Assign):
            project |= set(map(get_name, node.targets))
    names = set()
    for node in find_nodes(find_main(tree), ast.Name, ast.Attribute):
        text = ast.unparse(node)
        if text in project or re.fullmatch(r"run\.\w+", text):
            names.add(text)
    return names


def check_order(source: str) -> list[str]:
    """A recipe reads: docstring, Config, build_* functions, evaluate, others, main and its guard."""
    tree = ast.parse(source)
    names = list(filter(None, map(get_name, tree.body)))
    problems = []
    if not ast.get_docstring(tree):
        problems.append("there is no docstring")
    if not re.fullmatch(r"Config( build_\w+)+( (?!build_)\w+)* main", " ".join(names)):
        problems.append(f"another order: {names}")
    if names.count("evaluate") != 1:
        problems.append(f"not one evaluate: {names}")
    if ast.unparse(tree.body[-1]) != "if __name__ == '__main__':\n    run_main(main)":
        problems.append("there is no guard")
    return problems


def check_step(source: str) -> list[str]:
    """Lines of the step that don't stand in `main`, in their order."""
    calls = find_nodes(find_main(ast.parse(source)), ast.Call)
    calls.sort(key=lambda call: call.lineno)
    callees = [get_name(call.func) for call in calls]
    if list(filter(STEP.__contains__, callees)) == STEP:
        return []
    return [f"main calls {callees}"]


def check_ranks(source: str) -> list[str]:
    """What tells one rank from another: a recipe does the same on all."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        names.add(node.value if isinstance(node, ast.Constant) else get_name(node))
    return sorted(RANKS & names)


def check_fields(source: str) -> list[str]:
    """Fields of the dataclasses whose name ends in Config: too many, or without a docstring.

    A shared field that is stated again, to show its default, has its docstring where it is shared.
    """
    problems = []
    shared = set()
    for base in SHARED:
        shared |= base.__dataclass_fields__.keys()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or not re.fullmatch("(?!_).*Config", node.name):
            continue
        explained = shared if node.name == "Config" and node.bases else set()
        num_fields = 0
        for line, following in zip(node.body, node.body[1:] + [None], strict=True):
            if not isinstance(line, ast.AnnAssign):
                continue
            num_fields += 1
            value = getattr(following, "value", None)
            has_docstring = isinstance(following, ast.Expr) and isinstance(value, ast.Constant)
            if not has_docstring and line.target.id not in explained:
                problems.append(f"{node.name}.{line.target.id} has no docstring")
        if num_fields > MAX_FIELDS:
            problems.append(f"{node.name}: {num_fields} fields, at most {MAX_FIELDS}")
    return problems


CHECKS = [check_order, check_step, check_ranks, check_fields]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_recipe_passes(check, name: str) -> None:
    assert check(RECIPES[name]) == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_one_page(name: str) -> None:
    source = RECIPES[name]
    imports = find_imports(source)
    for node in imports:
        assert node.module.removeprefix("common.") in ROOMS, "a recipe imports no inner module"
    assert len({node.module for node in imports}) <= MAX_MODULES
    assert sum(len(node.names) for node in imports) <= MAX_IMPORTED_NAMES
    assert len(source.splitlines()) <= MAX_LINES[name] and "partial" not in source
    names_in_main = find_names_in_main(source)
    assert len(names_in_main) <= MAX_NAMES_IN_MAIN, sorted(names_in_main)
    for node in imports:
        module = import_module(node.module)
        for alias in node.names:
            if node.module.removeprefix("common.") in FACES:
                assert alias.name in module.__all__, f"{node.module}.__all__"
            assert not inspect.ismodule(getattr(module, alias.name)), (
                f"{node.module}.{alias.name}: import functions and classes"
            )


def test_a_run_is_small_to_look_at() -> None:
    methods = [name for name in vars(Run) if callable(getattr(Run, name)) and name[0] != "_"]
    assert len(methods) <= MAX_METHODS_OF_RUN, methods
    assert len(inspect.signature(Run.prepare).parameters) - 1 <= MAX_ARGUMENTS_OF_PREPARE


def test_shared_fields_of_configurations_are_explained_too() -> None:
    assert check_fields(SOURCES[Path("common/config/fields.py")]) == []
