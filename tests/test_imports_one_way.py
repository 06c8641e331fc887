"""Rooms import only rooms before them, in no circle, and only `kernels` knows FBGEMM."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import recsys
from tests.offenders import check_each
from tests.without_compat import FOLDERS, HAS_COMPAT

ROOT = Path(recsys.__file__).parent

# In the order in which a batch walks through them; each may import those before it.
ROAD = ["base", "kernels", "sparse", "optim", "modules", "distributed", "inference"]
# The rooms of `distributed`, with the other rooms that each may import. Other files there, which
# users name, may import them all; a folder that is not here stands above those files.
INSIDE = {
    "ranks": [],
    "placement": ["ranks"],
    "planner": ["ranks", "placement", "sharded"],
    "stages": ["ranks", "placement"],
    "state": ["ranks", "placement", "stages"],
    "sharded": ["ranks", "placement", "stages", "state"],
    "train_pipeline": ["ranks", "stages", "sharded"],
    "monitoring": ["ranks"],
}
# The rooms of `inference`, likewise.
INSIDE_INFERENCE = {"quant": ["batch_checks"]}
# A planner's default sharders, for `collective_plan(model)` and for files that describe tables.
ABOVE = {
    "planner/planners.py": {"default_sharders"},
    "planner/tables_file.py": {"default_sharders", "embedding", "embeddingbag"},
}
# Beside the road; each may import the listed packages.
BESIDE = {
    "datasets": ["base", "kernels", "sparse"],
    "features": ["base", "kernels", "sparse", "modules", "datasets"],
    "metrics": ["base"],
    "training": ["base", "optim", "distributed", "metrics", "sparse", "modules"],
}
if HAS_COMPAT:  # can be deleted: no other room imports it
    BESIDE |= {
        "compat": [*ROAD, "metrics", "datasets"],
        # parts for the planner, imported where a script asks for one
        "compat/planner": ["compat", "base", "kernels", "modules", "distributed"],
    }
# Public paths of modules of `base`.
PATHS = ["lazy", "step_stages", "streamable"]
# Files at the top that look into rooms. The package itself imports nothing when imported.
TOP = {
    "__init__": ["base"],
    "__main__": [],
    "calibrate": ROAD[:-1],
    "doctor": ["base", "kernels", "host"],
    "fx": ["inference"],
    "host": ["base"],
    "plan": ["distributed"],
    "prepare": ["base", "datasets", "features"],
    "tracing": ["base"],
}

ALLOWED = {room: ROAD[: i + 1] for i, room in enumerate(ROAD)}
# raw columns, imported by packages that have them, and metrics of the gate
ALLOWED["inference"] += ["datasets", "features", "metrics"]
ALLOWED |= {room: [*others, room] for room, others in BESIDE.items()} | TOP
ALLOWED |= {path: ["base"] for path in PATHS}

# Scripted code calls FBGEMM's ops by name: TorchScript must not depend on this package.
CALLS_FBGEMM_OPS = {"kernels", "inference"}

COMPAT = tuple(folder.replace("/", ".") for folder in FOLDERS)
FILES = sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "compat/planner" if parts[:2] == ("compat", "planner") else parts[0].removesuffix(".py")


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except the nodes under `TYPE_CHECKING`."""
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


def test_rooms_import_only_rooms_before_them() -> None:
    wrong = {}
    for path in FILES:
        rooms = {name.split(".")[1] for name in imports_of(path) if name.startswith("recsys.")}
        if rooms := rooms - set(ALLOWED[room_of(path)]):
            wrong[str(path)] = rooms
    assert wrong == {}


@pytest.mark.parametrize(
    ("outer", "inside"), [("distributed", INSIDE), ("inference", INSIDE_INFERENCE)]
)
def test_inner_rooms_import_only_rooms_before_them(
    outer: str, inside: dict[str, list[str]]
) -> None:
    wrong = {}
    for room, allowed in inside.items():
        for path in sorted((ROOT / outer / room).rglob("*.py")):
            found = {
                name.split(".")[2]
                for name in imports_of(path)
                if name.startswith(f"recsys.{outer}.")
            }
            above = ABOVE.get(f"{room}/{path.name}", set())
            if found := found - {room, *allowed, *above}:
                wrong[str(path)] = found
    assert wrong == {}


def test_no_stage_and_no_state_reads_the_environment() -> None:
    """The values of a job's variables are in the layout and the ranks' environment."""
    readers = {"os", "recsys.base.arguments.setting", "recsys.distributed.ranks.node"}
    found = {
        str(path): names
        for room in ("stages", "state", "train_pipeline")
        for path in sorted((ROOT / "distributed" / room).rglob("*.py"))
        if (names := {n for n in imports_of(path) for r in readers if f"{n}.".startswith(f"{r}.")})
    }
    assert found == {}


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {
        ".".join(("recsys", *path.relative_to(ROOT).with_suffix("").parts)): path for path in FILES
    }
    imports = {
        file: {name if name in files else name.rpartition(".")[0] for name in imports_of(path)}
        for file, path in files.items()
        if file.startswith(("recsys.distributed.", "recsys.inference."))
    }
    while ground := [file for file, found in imports.items() if not found & {*imports} - {file}]:
        for file in ground:
            del imports[file]
    assert sorted(imports) == []


def knows_no_fbgemm(path: Path) -> None:
    room = room_of(path)
    packages = {name.partition(".")[0] for name in imports_of(path)}
    assert "fbgemm_gpu" not in packages or room == "kernels"
    ops = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr == "fbgemm"
        and ast.unparse(node) == "torch.ops.fbgemm"
    }
    assert not ops or room in CALLS_FBGEMM_OPS


def test_only_kernels_knows_fbgemm() -> None:
    check_each(knows_no_fbgemm, FILES)


def test_only_its_own_tests_import_compat() -> None:
    """`python -m tests.without_compat` runs the others without it."""
    own = tuple(ROOT.parent / folder for folder in (*FOLDERS, "tests/without_compat.py"))
    found = {
        str(path): names
        for folder in ("tests", "docs", "examples", "benchmarks")
        for path in sorted((ROOT.parent / folder).rglob("*.py"))
        if not any(path.is_relative_to(one) for one in own)
        if (names := [name for name in imports_of(path) if name.startswith(COMPAT)])
    }
    assert found == {}


def test_every_room_has_its_place() -> None:
    assert {room_of(path) for path in FILES} == set(ALLOWED)
