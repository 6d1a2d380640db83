"""Values of a Python configuration, found by walking its syntax tree: nothing of the file is executed or imported.

Understood are assignments of literals, names, arithmetic, subscripts, `dict()`, `list()` and `tuple()`, and what MMEngine reads
as inheritance: `_base_ = [...]` with `_base_.name`, and `with read_base():`. All else is refused with its line. Work and memory
are bounded for all files together, so that a file can't make this take long.
"""

import ast
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from common.errors import Refused
from common.files import SMALL, read_text

_LARGEST = 2**63  # of whole numbers
_LONGEST = 100_000  # items of a list, characters of a text
_DEEPEST = 60  # lists and dicts inside each other, and expressions
_MOST = 1_000_000  # values, nodes and characters of all files together
_CALLS = {"dict": dict, "list": list, "tuple": tuple}
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_NAMES = {
    "BatchNorm2d": "BN",
    "SyncBatchNorm": "SyncBN",
    "PretrainedInit": "Pretrained",
}  # of classes, in MMEngine's registry


def values_of(file: Path) -> dict[str, Any]:
    """The variables of a configuration, merged over those of its bases. Raises `Refused`, with the file and the line."""
    return _Reader().read(file, ())


class _Reader:
    """Reads a file and what it inherits from, within one budget."""

    def __init__(self) -> None:
        self.left = _MOST

    def read(self, file: Path, above: tuple[Path, ...]) -> dict[str, Any]:
        if file.resolve() in above or len(above) > _DEEPEST:
            raise Refused(f"{file}: _base_ leads in a circle")
        try:
            text = read_text(file, SMALL)
            tree = ast.parse(text)
        except OSError as error:
            raise Refused(f"{file}: can't be read: {error.strerror}") from None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Refused(f"{file}: not readable as Python: {error!s:.100}") from None
        return _File(self, file, (*above, file.resolve()), len(text)).run(tree)


class _File:
    """One file: the variables that its statements have assigned so far, and those of its bases."""

    def __init__(self, reader: _Reader, path: Path, above: tuple[Path, ...], length: int) -> None:
        self.reader, self.path, self.above = reader, path, above
        self.names: dict[str, Any] = {}
        self.classes: dict[str, str] = {}  # imported, of which a text stands for each
        self.base: dict[str, Any] = {}
        self.node: ast.AST = ast.Module([], [])
        self.charge(length + 1000)

    def run(self, tree: ast.Module) -> dict[str, Any]:
        for statement in tree.body:
            self.node = statement
            self.statement(statement)
        return self.merged(self.base, {name: value for name, value in self.names.items() if not name.startswith("__")})

    def refuse(self, what: str) -> NoReturn:
        raise Refused(
            f"{self.path}: line {getattr(self.node, 'lineno', 0)}: {what}. This file is not executed; where it is trusted, "
            'write its values out: python -c "from mmengine.config import Config; '
            f"Config.fromfile('{self.path}').dump('plain.py')\""
        )

    def charge(self, cost: int) -> None:
        """Take `cost` from what all files together may use."""
        self.reader.left -= cost
        if self.reader.left < 0:
            self.refuse(f"more than {_MOST:,} values, expressions and characters in all files")

    # statements

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=targets, value=value) if len(names := _names(targets)) == len(targets):
                found = self.value(value)
                for name in names:
                    self.assign(name, found)
            case ast.Assign(targets=[ast.Attribute(value=whole, attr=name)], value=value) if _is_base(whole):
                self.change(self.value(whole), name, self.value(value))
            case ast.Delete(targets=targets) if len(names := _names(targets)) == len(targets):
                for name in names:
                    self.lookup(name)
                    self.names.pop(name, None)
            case ast.Expr(value=ast.Constant(value=str())):
                pass  # a docstring
            case ast.ImportFrom(module="mmengine.config", names=[ast.alias(name="read_base", asname=None)], level=0):
                pass
            case ast.ImportFrom(module=str(), names=names, level=0) if all(one.name != "*" for one in names):
                self.classes |= {one.asname or one.name: _NAMES.get(one.name, one.name) for one in names}
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="read_base")))], body=body):
                for line in body:
                    self.node = line
                    self.inherit(line)
            case _:
                self.refuse("does more than assign values")

    def assign(self, name: str, value: Any) -> None:
        self.measure(value, 0)
        if name in _CALLS or name == "read_base":
            self.refuse(f"{name} is assigned")
        if name == "_base_":
            if self.base:
                self.refuse("_base_ is assigned twice")
            named = [value] if isinstance(value, str) else value
            if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
                self.refuse("_base_ must be a text, or a list of texts")
            for one in named:
                found = self.file_of(one)
                if twice := sorted(self.base.keys() & found.keys()):
                    self.refuse(f"{twice[0]} is in two of the files that _base_ names")
                self.base |= found
            return
        self.names[name] = value

    def change(self, whole: Any, name: str, value: Any) -> None:
        """`_base_.name = value`, in place, so that all who hold this dict see it, as in Python."""
        self.key(whole, name)
        whole[name] = value
        self.measure(self.base, 0)

    def inherit(self, node: ast.stmt) -> None:
        """`from .models.retinanet import *`, in a read_base: the variables of that file become those of this one."""
        if not isinstance(node, ast.ImportFrom) or not node.level or not node.module:
            self.refuse("read_base() holds more than `from .file import *`")
        found = self.file_of("../" * (node.level - 1) + node.module.replace(".", "/") + ".py")
        for one in node.names:
            if one.name != "*" and one.name not in found:
                self.refuse(f"{node.module} has no {one.name}")
            self.names |= found if one.name == "*" else {one.asname or one.name: found[one.name]}

    def file_of(self, name: str) -> dict[str, Any]:
        path = self.path.parent / name
        if "::" in name or path.suffix != ".py":
            self.refuse(f"_base_ {name} is not a Python file beside this one: copy it there, and name that")
        if not path.is_file():
            raise Refused(f"{self.path}: _base_ {name} is missing: put it there as {path}")
        return self.reader.read(path, self.above)

    def merged(self, base: dict, top: dict) -> dict:
        """`top` over `base`, as MMEngine merges them: dicts key by key, unless they have `_delete_`."""
        self.charge(len(base) + len(top))
        result = dict(base)
        for key, value in top.items():
            if isinstance(value, dict) and key in result:
                rest = {name: one for name, one in value.items() if name != "_delete_"}
                if not value.get("_delete_") and not isinstance(result[key], dict):
                    self.refuse(f"{key} is a dict, in its base it is none")
                result[key] = rest if value.get("_delete_") else self.merged(result[key], rest)
            else:
                result[key] = value
        return result

    def measure(self, value: Any, depth: int) -> None:
        """Charge for all that a value holds, as often as it holds it. Refuses a value that is nested too deeply."""
        self.charge(1)
        if depth > _DEEPEST:
            self.refuse(f"values more than {_DEEPEST} deep")
        if isinstance(value, str):
            self.charge(len(value))
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            self.measure(one, depth + 1)

    # expressions

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        self.node = node if hasattr(node, "lineno") else self.node
        self.charge(1)
        if depth > _DEEPEST:
            self.refuse(f"expressions more than {_DEEPEST} deep")
        match node:
            case ast.Constant(value=value) if value is None or isinstance(value, (str, int, float)):
                return self.bounded(value)
            case ast.Name(id=name):
                return self.lookup(name)
            case ast.List(elts=items):
                return [self.value(one, depth + 1) for one in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(one, depth + 1) for one in items)
            case ast.Dict(keys=keys, values=values):
                given = [key and self.value(key, depth + 1) for key in keys]
                if None in [one for key, one in zip(keys, given, strict=True) if key]:
                    self.refuse("None as a key")
                return self.dictionary(list(zip(given, values, strict=True)), depth)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=words) if name in _CALLS:
                if name == "dict":
                    pairs = [(None, one) for one in args] + [(one.arg, one.value) for one in words]
                    return self.dictionary(pairs, depth)
                given = [self.value(one, depth + 1) for one in args]
                if len(given) > 1 or words or not all(isinstance(one, (list, tuple, dict)) for one in given):
                    self.refuse(f"{name}() takes one list, tuple or dict")
                return _CALLS[name](*given)
            case ast.UnaryOp(op=op, operand=operand):
                return self.operation(op, self.value(operand, depth + 1))
            case ast.BinOp(left=left, op=op, right=right):
                return self.operation(op, self.value(left, depth + 1), self.value(right, depth + 1))
            case ast.Subscript(value=whole, slice=place):
                return self.item(self.value(whole, depth + 1), place, depth)
            case ast.Set(elts=[ast.Set(elts=[ast.Attribute() as inner])]):  # {{_base_.name}}
                return self.value(inner, depth + 1)
            case ast.Attribute(value=whole, attr=name) if _is_base(whole):
                return self.key(self.value(whole, depth + 1), name)
            case ast.ListComp(elt=item, generators=[ast.comprehension(target=ast.Name(id=name), iter=place, ifs=[])]):
                return self.listed(item, name, self.value(place, depth + 1), depth)
        self.refuse(f"{type(node).__name__} is more than a value")

    def listed(self, item: ast.expr, name: str, places: Any, depth: int) -> list:
        """`[item for name in places]`."""
        if not isinstance(places, (list, tuple)) or name in self.names or name in _CALLS:
            self.refuse("goes over something else than a list, or hides a name")
        found = []
        for self.names[name] in places:
            found.append(self.value(item, depth + 1))
        self.names.pop(name, None)
        return found

    def lookup(self, name: str) -> Any:
        if name == "_base_" and self.base:
            return self.base
        if name not in self.names and name not in self.classes:
            self.refuse(f"{name[:60]} is not assigned above")
        return self.names.get(name, self.classes.get(name))

    def key(self, whole: Any, name: Any) -> Any:
        if not isinstance(whole, dict) or not isinstance(name, str) or name not in whole:
            self.refuse(f"there is no {name!s:.60}")
        return whole[name]

    def item(self, whole: Any, place: ast.expr, depth: int) -> Any:
        if isinstance(place, ast.Slice) and isinstance(whole, (list, tuple, str)):
            parts: list[Any] = [part and self.value(part, depth + 1) for part in (place.lower, place.upper, place.step)]
            if all(part is None or isinstance(part, int) for part in parts) and parts[2] != 0:
                self.charge(len(whole))
                return whole[slice(*parts)]
        elif not isinstance(place, ast.Slice):
            index = self.value(place, depth + 1)
            if isinstance(whole, (list, tuple, str)) and isinstance(index, int) and -len(whole) <= index < len(whole):
                return whole[index]
            return self.key(whole, index)
        self.refuse("no such place")

    def dictionary(self, pairs: list[tuple[Any, ast.expr]], depth: int) -> dict:
        result: dict[str, Any] = {}
        for key, node in pairs:
            value = self.value(node, depth + 1)
            if key is None and isinstance(value, dict):  # dict(other), dict(**other)
                self.charge(len(value))
                result |= value
            elif isinstance(key, (str, int)):
                result[str(key)] = value
            else:
                self.refuse("a dict has texts or whole numbers as keys")
        return result

    def operation(self, op: ast.operator | ast.unaryop, *values: Any) -> Any:
        numbers = all(isinstance(one, (int, float)) for one in values)
        repeated = isinstance(op, ast.Mult) and {isinstance(one, int) for one in values} == {True, False}
        if isinstance(op, ast.Pow) and numbers and abs(values[1]) > 63:
            self.refuse("too large a power")
        if repeated:
            count, whole = sorted(values, key=lambda one: not isinstance(one, int))
            if isinstance(whole, (list, tuple, str)) and count * len(whole) > _LONGEST:
                self.refuse(f"longer than {_LONGEST:,}")
        elif not numbers and not isinstance(op, (ast.Add, ast.Not)):
            self.refuse("no arithmetic of these values")
        if type(op) not in _OPERATIONS:
            self.refuse("an operator that is not evaluated")
        try:
            return self.bounded(_OPERATIONS[type(op)](*values))
        except (TypeError, ValueError, ArithmeticError) as error:
            self.refuse(str(error)[:60])

    def bounded(self, value: Any) -> Any:
        """A value whose own size is allowed."""
        if isinstance(value, int) and abs(value) > _LARGEST:
            self.refuse("too large a number")
        if isinstance(value, complex):
            self.refuse("a complex number")
        if isinstance(value, str) and "{{" in value:
            self.refuse("MMEngine would replace {{...}} in this text")
        if isinstance(value, (str, list, tuple)):
            if len(value) > _LONGEST:
                self.refuse(f"longer than {_LONGEST:,}")
            self.charge(len(value))
        return value


def _names(targets: list[ast.expr]) -> list[str]:
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _is_base(node: ast.expr) -> bool:
    """Whether an expression leads to a setting of `_base_`, as in `_base_.param_scheduler[1].milestones`."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "_base_"
