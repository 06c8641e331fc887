"""Rooms import only rooms before them, and only `kernels` knows FBGEMM: read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import recsys

ROOT = Path(recsys.__file__).parent

# In the order in which a batch walks through them; each may import those before it.
ROAD = ["kernels", "sparse", "optim", "modules", "distributed", "inference"]
# Beside the road; each may import what is listed.
BESIDE = {
    "compat": [],
    # parts for the planner, imported where a script asks for one
    "compat/planner": ["compat", "kernels", "modules", "distributed"],
    "datasets": ["sparse"],
    "metrics": [],
}
# Files at the top that every room may import.
TOOLS = {"contact": [], "lazy": [], "streamable": [], "tracing": []}
# Files at the top that look into rooms. The package itself imports nothing when imported.
TOP = {
    "__init__": [],
    "__main__": [],
    "calibrate": ROAD[:-1],
    "doctor": ["kernels"],
    "plan": ["distributed"],
}

ALLOWED = {room: ROAD[: i + 1] for i, room in enumerate(ROAD)}
ALLOWED |= {room: [*others, room] for room, others in BESIDE.items()} | TOP | TOOLS

# What is scripted calls FBGEMM's ops by name: TorchScript must not depend on this package.
CALLS_FBGEMM_OPS = {"kernels", "inference"}

FILES = sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "compat/planner" if parts[:2] == ("compat", "planner") else parts[0].removesuffix(".py")


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                yield from runtime_nodes(other)
            continue
        yield node
        yield from runtime_nodes(node)


def imports_of(path: Path) -> Iterator[str]:
    for node in runtime_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_only_rooms_before_them(path: Path) -> None:
    room = room_of(path)
    rooms = {name.split(".")[1] for name in imports_of(path) if name.startswith("recsys.")}
    assert sorted(rooms - {*ALLOWED[room], *TOOLS}) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_kernels_knows_fbgemm(path: Path) -> None:
    room = room_of(path)
    packages = {name.partition(".")[0] for name in imports_of(path)}
    assert "fbgemm_gpu" not in packages or room == "kernels"
    ops = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops.fbgemm"
    }
    assert not ops or room in CALLS_FBGEMM_OPS


def test_every_room_has_its_place() -> None:
    assert {room_of(path) for path in FILES} == set(ALLOWED)
