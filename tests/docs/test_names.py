"""Names that pages mention exist where the page states."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_pages import ROOT, TEXTS
from tests.without_compat import expected

_PATH = r"recsys(?:\.\w+)+"
_LIST = r"(?:`\w+`(?:,? (?:and|or|with) |, ))*`\w+`"
_MEMBERS = re.compile(rf"`({_PATH})`(?: has|, such as) ({_LIST})")
_SIBLINGS = re.compile(rf"`({_PATH})\.\w+`(?:, or|,| or| and) ({_LIST})(?!`| of | in | from )")
_BEFORE = re.compile(rf"({_LIST}),? (?:of|in|from) `({_PATH})`")
_IMPORT = re.compile(rf"from ({_PATH}|recsys) import (?:\(([^)]+)\)|(\w+(?:, \w+)*))")


def names_of(text: str) -> Iterator[str]:
    """Yield the dotted names in a page: written out, imported, and listed beside a module."""
    yield from re.findall(rf"(?<![\w./-]){_PATH}", text)
    for module, many, few in _IMPORT.findall(text):
        yield from (f"{module}.{name}" for name in re.findall(r"(\w+)(?: as \w+)?", many or few))
    prose = " ".join(re.sub(r"```.*?```", "", text, flags=re.S).split())
    for module, listed in [
        *_MEMBERS.findall(prose),
        *_SIBLINGS.findall(prose),
        *((module, listed) for listed, module in _BEFORE.findall(prose)),
    ]:
        yield from (f"{module}.{name}" for name in re.findall(r"`(\w+)`", listed))
    for block in re.findall(r"^[ ]*```python\n(.*?)^[ ]*```$", text, re.S | re.M):
        yield from _uses(ast.parse(textwrap.dedent(block)))


def _uses(block: ast.Module) -> Iterator[str]:
    """Yield the attributes that a block reads from the modules that it imports."""
    modules = {}
    for node in ast.walk(block):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("recsys"):
            paths = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            modules |= {name: path for name, path in paths.items() if _is_module(path)}
        elif isinstance(node, ast.Import):
            modules |= {a.asname: a.name for a in node.names if a.asname and _is_module(a.name)}
    for node in ast.walk(block):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in modules:
                yield f"{modules[name]}.{attribute}"


def _is_module(path: str) -> bool:
    try:
        return path.startswith("recsys") and importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:  # the parent is a class
        return False


@functools.cache
def exists(path: str) -> bool:
    """Return whether a module has this path, or a module, class or function its last name."""
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        owner, _, name = path.rpartition(".")
        return exists(owner) and hasattr(_resolved(owner), name)
    return True


def _resolved(path: str) -> object:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        owner, _, name = path.rpartition(".")
        return getattr(_resolved(owner), name)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_exist(page: Path) -> None:
    names = expected(names_of(page.read_text()))
    assert {name for name in names if not exists(name)} == set()


def test_many_names_are_read() -> None:
    found = [name for page in TEXTS for name in names_of(page.read_text())]
    assert len(set(found)) > 150
    assert {
        "recsys.modules.ctr.DCNV2",  # a list after its module
        "recsys.modules.ctr.PLE",
        "recsys.modules.dlrm.DLRM",  # a list before its module
        "recsys.datasets.csv",  # beside `recsys.datasets.parquet`
    } <= set(found)


@pytest.mark.parametrize(
    "text",
    [
        "`recsys.modules.Nothing`",
        "`recsys.modules.ctr` has `DCNV2`, and `MultiTask` with `Nothing` or\n`PLE`.",
        "`recsys.modules.ctr`, such as `Nothing`",
        "`DCNV2` and `Nothing` of `recsys.modules.ctr`",
        "`recsys.datasets.parquet`, `nothing` and `csv` read",
        "run `from recsys.modules.ctr import DCNV2, Nothing`",
        "```\nfrom recsys import (\n    KeyedTensor,\n    Nothing,\n)\n```",
        "```python\nfrom recsys import datasets as d\nd.nothing()\n```",
        "```python\nimport recsys.modules.dlrm as m\nm.Nothing()\n```",
    ],
)
def test_a_wrong_name_is_found(text: str) -> None:
    wrong = {name.rpartition(".")[2] for name in names_of(text) if not exists(name)}
    assert {name.lower() for name in wrong} == {"nothing"}
