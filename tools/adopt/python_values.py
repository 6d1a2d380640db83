"""Values of a Python configuration, found by walking its syntax tree: nothing of the file is executed or imported.

Understood are assignments of literals, names, arithmetic, subscripts, `dict()` and list comprehensions, and MMEngine's way of
inheriting: `_base_ = [...]` with `_base_.name`. All else is refused with its line. Work and memory are bounded for all files
together, so that a file can't make this take long.
"""

import ast
import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from common.errors import Refused
from common.files import SMALL, read_text

_LARGEST = 2**63  # of whole numbers that are computed
_DEEPEST = 60  # lists and dicts inside each other
_MOST = 1_000_000  # values and characters of all files together
_TOO_MUCH = f"nested too deeply, or more than {_MOST:,} values and characters in all files"
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


def values_of(file: Path) -> dict[str, Any]:
    """The variables of a configuration, over its bases'. Raises `Refused` with the line."""
    try:
        return _File(file, [_MOST]).run()
    except RecursionError:  # of expressions, or of files that name each other
        raise Refused(f"{file}: {_TOO_MUCH}") from None


class _File:
    """One file: the variables that its statements and its bases have assigned so far.

    `left` is what all files together may still use, which they share.
    """

    def __init__(self, path: Path, left: list[int]) -> None:
        self.path, self.left, self.line = path, left, 0
        self.names: dict[str, Any] = {}
        self.base: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        try:
            text = read_text(self.path, SMALL)
            tree = ast.parse(text)
        except OSError as error:
            raise Refused(f"{self.path}: can't be read: {error.strerror}") from None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Refused(f"{self.path}: not readable as Python: {error!s:.100}") from None
        self.charge(len(text) + 1000)
        for statement in tree.body:
            self.line = statement.lineno
            self.statement(statement)
        return self.merged(self.base, {name: value for name, value in self.names.items() if not name.startswith("__")})

    def refuse(self, what: str) -> NoReturn:
        raise Refused(
            f"{self.path}: line {self.line}: {what}. This file is not executed; where it is trusted, write its values out: "
            f"python -c \"from mmengine.config import Config; Config.fromfile('{self.path}').dump('plain.py')\""
        )

    def charge(self, cost: int) -> None:
        self.left[0] -= cost
        if self.left[0] < 0:
            self.refuse(_TOO_MUCH)

    def measure(self, value: Any, depth: int = 0) -> None:
        """Charge for all that a value holds, as often as it holds it."""
        self.charge(len(value) + 1 if isinstance(value, str) else 1)
        if depth > _DEEPEST:
            self.refuse(_TOO_MUCH)
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            self.measure(one, depth + 1)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name), *others], value=value):
                found = self.value(value)
                self.assign(name, found)
                for other in others:
                    self.assign(
                        other.id if isinstance(other, ast.Name) else self.refuse("does more than assign"), found
                    )
            case ast.Assign(targets=[ast.Attribute(value=whole, attr=name)], value=value) if _is_base(whole):
                place = self.value(whole)
                self.item(place, name)
                place[name] = self.value(value)  # all who hold this dict see it, as in Python
                self.measure(self.base)
            case ast.Delete(targets=[ast.Name(id=name)]):
                self.item(self.names, name)
                del self.names[name]
            case ast.Expr(value=ast.Constant(value=str())):
                pass  # a docstring
            case _:
                self.refuse("does more than assign values")

    def assign(self, name: str, value: Any) -> None:
        if name == "dict":
            self.refuse("dict is assigned")
        if name != "_base_":
            self.names[name] = value
            return
        named = [value] if isinstance(value, str) else value
        if self.base or not isinstance(named, list) or not all(isinstance(one, str) for one in named):
            self.refuse("_base_ must be a text, or a list of texts, once")
        for one in named:
            path = self.path.parent / one
            if "::" in one or path.suffix != ".py":
                self.refuse(f"_base_ {one} is not a Python file beside this one: copy it there, and name that")
            if not path.is_file():
                raise Refused(f"{self.path}: _base_ {one} is missing: put it there as {path}")
            found = _File(path, self.left).run()
            if twice := sorted(self.base.keys() & found.keys()):
                self.refuse(f"{twice[0]} is in two of the files that _base_ names")
            self.base |= found

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

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, whose size is allowed."""
        self.line = getattr(node, "lineno", self.line)
        found = self.evaluated(node)
        if isinstance(found, str) and "{{" in found:
            self.refuse("MMEngine would replace {{...}} in this text")
        self.measure(found)
        return found

    def evaluated(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=None | str() | int() | float() as value):
                return value
            case ast.Name(id="_base_") if self.base:
                return self.base
            case ast.Name(id=name):
                return self.item(self.names, name)
            case ast.List(elts=items):
                return [self.value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(item) for item in items)
            case ast.Dict(keys=keys, values=values):
                return self.dictionary(zip(keys, values, strict=True))
            case ast.Call(func=ast.Name(id="dict"), args=args, keywords=words):
                return self.dictionary([(None, one) for one in args] + [(one.arg, one.value) for one in words])
            case ast.UnaryOp(op=op, operand=operand):
                return self.operation(op, self.value(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return self.operation(op, self.value(left), self.value(right))
            case ast.Subscript(value=whole, slice=place):
                return self.item(self.evaluated(whole), self.value(place))
            case ast.Slice(lower=lower, upper=upper, step=step):
                return slice(*(part and self.value(part) for part in (lower, upper, step)))
            case ast.Set(elts=[ast.Set(elts=[ast.Attribute() as inner])]):  # {{_base_.name}}
                return self.value(inner)
            case ast.Attribute(value=whole, attr=name) if _is_base(whole):
                return self.item(self.evaluated(whole), name)
            case ast.ListComp(
                elt=item, generators=[ast.comprehension(target=ast.Name(id=name), ifs=[], is_async=0) as of]
            ):
                places = self.value(of.iter)
                if not isinstance(places, (list, tuple)) or name in (*self.names, "_base_"):
                    self.refuse("goes over something else than a list, or hides a name")
                found = []
                for place in places:
                    self.assign(name, place)
                    found.append(self.value(item))
                self.names.pop(name, None)
                return found
        self.refuse(f"{type(node).__name__} is more than a value")

    def item(self, whole: Any, place: Any) -> Any:
        """`whole[place]`, of a dict also `whole.place`."""
        try:
            if isinstance(whole, (dict, list, tuple, str)):
                return whole[place]
        except (LookupError, TypeError, ValueError):
            pass
        self.refuse(f"there is no {place!s:.60}")

    def dictionary(self, pairs: Iterable[tuple[ast.expr | str | None, ast.expr]]) -> dict:
        result: dict[str, Any] = {}
        for key, node in pairs:
            name, value = self.value(key) if isinstance(key, ast.expr) else key, self.value(node)
            if key is None and isinstance(value, dict):  # dict(other), dict(**other)
                result |= value
            elif isinstance(name, (str, int)):
                result[str(name)] = value
            else:
                self.refuse("a dict has texts or whole numbers as keys")
        return result

    def operation(self, op: ast.operator | ast.unaryop, *values: Any) -> Any:
        are_numbers = all(isinstance(one, (int, float)) for one in values)
        if type(op) not in _OPERATIONS or not (are_numbers or isinstance(op, (ast.Add, ast.Mult))):
            self.refuse("no arithmetic of these values")
        if isinstance(op, ast.Mult) and not are_numbers:  # a list or text, so many times
            for one, times in (values, values[::-1]):
                if isinstance(one, (list, tuple, str)) and isinstance(times, int):
                    self.charge(len(one) * max(0, times))
        try:
            found = None if isinstance(op, ast.Pow) and abs(values[1]) > 63 else _OPERATIONS[type(op)](*values)
        except (TypeError, ValueError, ArithmeticError) as error:
            self.refuse(str(error)[:60])
        if isinstance(found, (complex, type(None))) or (isinstance(found, int) and abs(found) > _LARGEST):
            self.refuse("too large a number or power, or a complex one")
        return found


def _is_base(node: ast.expr) -> bool:
    """True if an expression leads to a setting of `_base_`, as in `_base_.param_scheduler[1].milestones`."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "_base_"
