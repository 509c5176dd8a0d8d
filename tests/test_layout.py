from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]

# As in the design: a room imports only from rooms above it.
ROOMS: Final = (
    "errors",
    "latest",
    "hardware",
    "mig",
    "happenings",
    "config",
    "supervise",
    "drivers",
    "health",
    "resources",
    "placement",
    "container",
    "kubelet",
    "observe",
    "commands",
)

GENERATED: Final = ROOT / "_nvplug" / "kubelet" / "api"

MODULES: Final = sorted(path for path in (ROOT / "_nvplug").rglob("*.py") if GENERATED not in path.parents)
PROGRAM: Final = [ROOT / "nvplug.py", *MODULES]

# asyncio, and what runs on it.
ASYNCIO: Final = {"asyncio", "betterproto2", "grpclib", "h2", "trio_asyncio"}


def name_of(path: Path) -> str:
    """As pytest shows it."""
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    """The room that a file of _nvplug belongs to; "" for the package's own __init__.py."""
    part = path.relative_to(ROOT / "_nvplug").parts[0].removesuffix(".py")
    return "" if part == "__init__" else part


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), name_of(path))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it, types included."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: imports are absolute"
            # What is imported may itself be a module.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names(node: ast.AST) -> set[str]:
    """Every name in an expression."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def test_the_list_of_rooms_is_complete() -> None:
    """Every file belongs to a room of the list."""
    assert {room_of(path) for path in MODULES} <= {"", *ROOMS}


@pytest.mark.parametrize("path", [path for path in MODULES if room_of(path)], ids=name_of)
def test_a_room_imports_only_from_rooms_above_it(path: Path) -> None:
    """Dependencies point one way; and never to nvplug, which as a script is __main__ and would load twice."""
    room = room_of(path)
    allowed = {room, *ROOMS[: ROOMS.index(room)]}

    for module in imports(path):
        package, _, rest = module.partition(".")
        assert package != "nvplug"
        if package == "_nvplug":
            assert rest.partition(".")[0] in allowed, f"{module} is not above {room}"


@pytest.mark.parametrize("path", PROGRAM, ids=name_of)
def test_each_library_has_its_room(path: Path) -> None:
    """Only kubelet/ knows asyncio and what runs on it, and only drivers/ knows pynvml."""
    room = "" if path.name == "nvplug.py" else room_of(path)
    packages = {module.partition(".")[0] for module in imports(path)}

    if room != "kubelet":
        assert not packages & ASYNCIO
    if room != "drivers":
        assert "pynvml" not in packages


@pytest.mark.parametrize("path", PROGRAM, ids=name_of)
def test_only_the_supervisor_catches_what_nobody_foresaw(path: Path) -> None:
    """Elsewhere neither Exception nor BaseException is caught, however it is written."""
    for node in ast.walk(parsed(path)):
        where = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{where}: except without a class"
            caught = names(node.type)
        elif isinstance(node, ast.Call) and "suppress" in ast.unparse(node.func):
            caught = set().union(*map(names, node.args))
        else:
            continue
        if name_of(path) != "_nvplug/supervise.py":
            assert not caught & {"Exception", "BaseException"}, where


@pytest.mark.parametrize("path", PROGRAM, ids=name_of)
def test_nothing_prints(path: Path) -> None:
    """What the program says goes through the log, or is the answer of a command, written on purpose."""
    calls = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]

    assert not [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


@pytest.mark.parametrize("path", [path for path in PROGRAM if path.stat().st_size], ids=name_of)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    """Each file begins with a docstring."""
    assert ast.get_docstring(parsed(path))
