"""The rooms of the package: what may import what."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import lapwing
from lapwing import Likelihood, Method
from lapwing.covariance import Covariance, Structure
from lapwing.covariance.latent import BaseLatent

ROOT = Path(lapwing.__file__).parent
ORDER = (
    "environment", "display", "errors", "options", "files", "linalg", "ranks", "data", "jacobian", "network", "tangent",
    "covariance", "likelihoods", "prediction", "methods", "running", "posterior", "tuning", "fitting", "deployment",
    "evaluation", "integrations", "cli", "__main__",
)  # fmt: skip
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")}


@cache
def parsed(name: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(FILES[name].read_text())


@cache
def nodes(name: str) -> list[ast.AST]:
    """All nodes of a module's syntax tree."""
    return list(ast.walk(parsed(name)))


TYPES_ONLY = ast.dump(ast.parse("TYPE_CHECKING", mode="eval").body)


@cache
def imports(name: str) -> set[str]:
    """The modules of lapwing that one imports when it runs: at its top, or in a function."""
    package = name.split(".")[:-1]
    types_only = {
        id(inner) for node in nodes(name) if isinstance(node, ast.If) and ast.dump(node.test) == TYPES_ONLY
        for inner in ast.walk(node)
    }  # fmt: skip
    modules = set()
    for node in nodes(name):
        if not isinstance(node, ast.ImportFrom) or not node.level or id(node) in types_only:
            continue
        base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
        for alias in node.names:
            for path in ([*base, alias.name], [*base, alias.name, "__init__"], base, [*base, "__init__"]):
                module = ".".join(part for part in path if part)
                if module in FILES:
                    modules.add(module)
                    break
    return modules


def test_every_room_is_in_the_order():
    assert {name.split(".")[0] for name in FILES} == {*ORDER, "__init__"}


def test_imports_go_downwards():
    for name in FILES:
        room = name.split(".")[0]
        if room != "__init__":
            above = {other for other in imports(name) if ORDER.index(other.split(".")[0]) > ORDER.index(room)}
            assert not above, f"{name} imports {', '.join(sorted(above))} from above"


def test_public_modules_say_what_is_public():
    """docs/versions.md counts on their `__all__`; reading it here needs none of the packages that they adapt."""
    for path in (*ROOT.glob("integrations/[a-z]*.py"), ROOT / "evaluation" / "__init__.py"):
        body = ast.parse(path.read_text()).body
        defined = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        (names,) = (
            ast.literal_eval(n.value)
            for n in body
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
        )
        if path.parent.name == "integrations":
            assert set(names) == {name for name in defined if not name.startswith("_")}, path.name


def test_no_circle():
    graph = {name: {other for other in imports(name) if other != name} for name in FILES}
    assert list(TopologicalSorter(graph).static_order())  # a circle raises a CycleError that names it


def test_every_room_says_what_lives_there():
    for path in ROOT.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert text, f"{path} has no docstring"
        if path.parent.parent == ROOT:
            assert "Begin with" in " ".join(text.split()), f"{path} does not say where to begin"


TRAITS = (Covariance, Structure, BaseLatent, Likelihood, Method)
"""Roots of the classes that no code outside their room asks for by name: it asks what they declare."""


def family(kind: type) -> set[str]:
    """The names of a class and of all its subclasses in the package."""
    inside = {kind.__name__} if kind.__module__.startswith("lapwing.") else set()
    return inside.union(*(family(sub) for sub in kind.__subclasses__()))


def test_other_rooms_ask_for_traits_and_not_for_classes():
    for root in TRAITS:
        room, names = root.__module__.split(".")[1], family(root) - {root.__name__}
        for name in FILES:
            if name.split(".")[0] == room:
                continue
            for node in nodes(name):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                    asked = {ast.unparse(n).split(".")[-1] for n in ast.walk(node.args[1])} & names
                    assert not asked, f"{name} asks for the class {', '.join(asked)} in line {node.lineno}"


def test_no_class_name_is_used_twice():
    """A traceback that ends in a class says which one it is. A leading underscore makes no other name."""
    places: dict[str, list[str]] = {}
    for name in FILES:
        for node in nodes(name):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"{name}:{node.lineno}")
    assert not {kind: where for kind, where in places.items() if len(where) > 1}


def constants(name: str) -> dict[str, str]:
    """The names in capitals that a module assigns at its top, also in tuples, without underscores -> their values."""
    found = {}
    for node in parsed(name).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            several = isinstance(target, ast.Tuple)
            values = node.value.elts if several and isinstance(node.value, ast.Tuple) else [node.value]
            names = target.elts if several else [target]
            for one, value in zip(names, values if len(values) == len(names) else values * len(names), strict=True):
                if isinstance(one, ast.Name) and one.id.isupper():
                    found[one.id.lstrip("_")] = ast.unparse(value)
    return found


def test_no_constant_has_two_values():
    """A name says what a constant limits. If it stands for two numbers, a reader takes one for the other."""
    values: dict[str, dict[str, str]] = {}
    for name in FILES:
        for constant, value in constants(name).items():
            values.setdefault(constant, {})[name] = value
    assert not {constant: where for constant, where in values.items() if len(set(where.values())) > 1}


LONGEST_BODY = 80
"""Lines of a function's body, without its docstring."""


def test_no_function_is_long():
    for name in FILES:
        for node in nodes(name):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                assert lines <= LONGEST_BODY or name == "fitting.fit", f"{name}.{node.name} has {lines} lines"


WINGS = "prediction.streamlined", "deployment", "methods.valla", "methods.sampled_lla"
"""Parts that a reader of the core need not enter."""

DOORS = "__init__", "fitting.registry"
"""The modules that import wings."""


def test_wings_are_imported_only_where_methods_and_public_names_are_listed():
    def wing_of(name: str) -> str | None:
        return next((wing for wing in WINGS if name == wing or name.startswith(f"{wing}.")), None)

    for name in FILES:
        if not wing_of(name) and name not in DOORS:
            wings = {other for other in imports(name) if wing_of(other)}
            assert not wings, f"{name} imports {', '.join(sorted(wings))} from a wing"


LINES = {
    "__init__": 91, "environment": 100, "errors": 155, "options": 202, "files": 192, "linalg": 528, "ranks": 205,
    "data": 1354, "jacobian": 2286, "network": 3366, "tangent": 1472, "covariance": 2724, "likelihoods": 5755,
    "prediction": 5103, "methods": 4711, "running": 574, "posterior": 1907, "tuning": 4322, "fitting": 2670,
    "deployment": 1001, "evaluation": 1735, "integrations": 1176, "display": 48, "cli": 247, "__main__": 8,
}  # fmt: skip
"""The most lines of each room. CONTRIBUTING.md says who may raise a number."""


def test_no_room_has_more_lines_than_its_ceiling():
    rooms = dict.fromkeys(LINES, 0)
    for name, path in FILES.items():
        rooms[name.split(".")[0]] += len(path.read_text().splitlines())
    above = {room: lines for room, lines in rooms.items() if lines > LINES[room]}
    assert not above, f"more lines than the ceiling: {above}"
