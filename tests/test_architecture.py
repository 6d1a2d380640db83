"""Rooms of common/ have faces, modules say what they are, and a recipe is one readable page.

That rooms import only from lower rooms stands in pyproject.toml, for import-linter, which `make lint` runs.
"""

import ast
import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from common.config.fields import OptimizationConfig, RunConfig
from common.run import Run

ROOT = Path(__file__).parent.parent
SOURCES = {
    path.relative_to(ROOT): path.read_text()
    for top in ("common", "compat", "recipes", "tools", "benchmarks", "tests")
    for path in sorted((ROOT / top).rglob("*.py"))
}
RECIPES = {path.stem: source for path, source in SOURCES.items() if path.parts[0] == "recipes"}
ROOMS = sorted(
    {path.parts[1].removesuffix(".py") for path in SOURCES if path.parts[0] == "common"}
    - {"__init__"}
)
FACES = [room for room in ROOMS if (ROOT / "common" / room).is_dir()]

SHARED = (OptimizationConfig, RunConfig)
# What a person reads who opens a recipe: names of the project in `main`, `run.x` included.
MOST_NAMES_IN_MAIN = 30
MOST_LINES = {"cls": 290, "det": 280, "seg": 250}
MOST_MODULES = 9
MOST_IMPORTED_NAMES = 34
MOST_ARGUMENTS_OF_PREPARE = 6
MOST_METHODS_OF_RUN = 15
MOST_FIELDS = 46

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


def test_one_module_calls_what_only_devices_of_a_kind_have() -> None:
    """Others call torch.accelerator, torch.Stream and torch.Event, which every kind has."""
    callers = set()
    for path, source in SOURCES.items():
        if path.parts[0] in ("common", "compat", "recipes", "tools"):
            nodes = [
                node
                for node in ast.walk(ast.parse(source))
                if isinstance(node, (ast.Attribute, ast.alias))
            ]
            names = {ast.unparse(node) for node in nodes}
            names |= {
                node.module
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.ImportFrom)
            }
            callers |= {str(path)} if names & OF_ONE_KIND else set()
    assert callers == {"common/distributed/devices.py"}


# --- docstrings


def test_modules_say_what_they_are() -> None:
    """There is a docstring, whose first sentence doesn't ask."""
    docstrings = {
        path: ast.get_docstring(ast.parse(source)) or "?" for path, source in SOURCES.items()
    }
    ends = {path: re.search(r"[.!?](?=\s|$)", text) for path, text in docstrings.items()}
    assert [str(path) for path, end in ends.items() if end and end[0] == "?"] == []


# --- recipes


def name_of(node: ast.AST) -> str:
    """The last part of a dotted name."""
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def main_of(tree: ast.Module) -> ast.FunctionDef:
    return next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"
    )


def imports_of(source: str) -> list[ast.ImportFrom]:
    """What is imported from common, by module."""
    nodes = ast.walk(ast.parse(source))
    return [
        node
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("common")
    ]


def names_in_main(source: str) -> set[str]:
    """Names in `main` that are imported from common or defined in the recipe, and what it uses of the run."""
    tree = ast.parse(source)
    project = {alias.asname or alias.name for node in imports_of(source) for alias in node.names}
    project |= {
        node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    project |= {
        name_of(target)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    }
    nodes = list(ast.walk(main_of(tree)))
    attributes = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    of_run = {name for name in attributes if re.fullmatch(r"run\.\w+", name)}
    return of_run | project & {node.id for node in nodes if isinstance(node, ast.Name)}


def out_of_order(source: str) -> list[str]:
    """A recipe reads: docstring, Config, build_* functions, evaluate, others, main and its guard."""
    tree = ast.parse(source)
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    in_order = re.fullmatch(r"Config( build_\w+)+( (?!build_)\w+)* main", " ".join(names))
    guard = ast.unparse(tree.body[-1]) == "if __name__ == '__main__':\n    run_main(main)"
    return (
        []
        if ast.get_docstring(tree) and in_order and names.count("evaluate") == 1 and guard
        else names
    )


def hidden_step(source: str) -> list[str]:
    """Lines of the step that don't stand in `main`, in their order."""
    calls = [node for node in ast.walk(main_of(ast.parse(source))) if isinstance(node, ast.Call)]
    callees = [name_of(call.func) for call in sorted(calls, key=lambda call: call.lineno)]
    return [] if [name for name in callees if name in STEP] == STEP else [f"main calls {callees}"]


def rank_tests(source: str) -> list[str]:
    """What tells one rank from another: a recipe does the same on all."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {name_of(node) for node in nodes} | {
        node.value for node in nodes if isinstance(node, ast.Constant)
    }
    return sorted(RANKS & (names | {node.name for node in nodes if isinstance(node, ast.alias)}))


def bad_fields(source: str) -> list[str]:
    """Fields of the dataclasses whose name ends in Config: too many, or without a docstring.

    A shared field that is stated again, to show its default, has its docstring where it is shared.
    """
    wrong = []
    explained = {field.name for base in SHARED for field in dataclasses.fields(base)}
    for node in ast.parse(source).body:
        if (
            isinstance(node, ast.ClassDef)
            and node.name.endswith("Config")
            and not node.name.startswith("_")
        ):
            fields = [line for line in node.body if isinstance(line, ast.AnnAssign)]
            if len(fields) > MOST_FIELDS:
                wrong.append(f"{node.name}: {len(fields)} fields, at most {MOST_FIELDS}")
            for line, following in zip(node.body, [*node.body[1:], None], strict=True):
                is_explained = isinstance(following, ast.Expr) and isinstance(
                    following.value, ast.Constant
                )
                restated = explained if node.name == "Config" and node.bases else ()
                if line in fields and not is_explained and line.target.id not in restated:
                    wrong.append(f"{node.name}.{line.target.id} has no docstring")
    return wrong


CHECKS = [out_of_order, hidden_step, rank_tests, bad_fields]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_recipe_passes(check, name: str) -> None:
    assert check(RECIPES[name]) == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_one_page(name: str) -> None:
    source = RECIPES[name]
    modules = {node.module for node in imports_of(source)}
    assert modules <= {f"common.{room}" for room in ROOMS}, (
        "a recipe imports from rooms, not from modules inside them"
    )
    names = [alias.name for node in imports_of(source) for alias in node.names]
    assert len(modules) <= MOST_MODULES and len(names) <= MOST_IMPORTED_NAMES
    assert len(source.splitlines()) <= MOST_LINES[name] and "partial" not in source
    assert len(names_in_main(source)) <= MOST_NAMES_IN_MAIN, sorted(names_in_main(source))
    listed = {room: import_module(f"common.{room}").__all__ for room in FACES}
    for node in imports_of(source):
        room = node.module.removeprefix("common.")
        assert room not in listed or {alias.name for alias in node.names} <= set(listed[room]), (
            f"{node.module}.__all__"
        )
        for alias in node.names:
            imported = getattr(import_module(node.module), alias.name)
            assert not inspect.ismodule(imported), (
                f"{node.module}.{alias.name}: import functions and classes"
            )


def test_a_run_is_small_to_look_at() -> None:
    methods = [
        name for name, value in vars(Run).items() if callable(value) and not name.startswith("_")
    ]
    assert len(methods) <= MOST_METHODS_OF_RUN, methods
    assert len(inspect.signature(Run.prepare).parameters) - 1 <= MOST_ARGUMENTS_OF_PREPARE


def test_shared_fields_of_configurations_are_explained_too() -> None:
    assert bad_fields(SOURCES[Path("common/config/fields.py")]) == []
