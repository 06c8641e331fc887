"""Faults of one place: a line of Python with another operator, constant, condition or result."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Add, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
}  # fmt: skip


class Fault(NamedTuple):
    """A change of one place of a file."""

    line: int
    statement: int
    """First line of the statement."""
    kind: str
    before: str
    after: str
    source: str
    """The whole file with the change."""


def faults_of(source: str) -> list[Fault]:
    """Return the faults of a file, a few for each statement.

    Annotations, imports, docstrings and messages of errors are left as they are.

    Args:
        source: Text of a file.
    """
    return list(_faults(ast.parse(source), source))


def _faults(tree: ast.AST, source: str) -> Iterator[Fault]:
    statement = 1
    for node in _nodes(tree):
        statement = node.lineno if isinstance(node, ast.stmt) else statement
        for kind, place, changed in _changes(node):
            before = ast.get_source_segment(source, place)
            assert before is not None
            after = ast.unparse(changed)
            after = f"({after})" if isinstance(place, ast.expr) else after
            yield Fault(
                place.lineno, statement, kind, before, after, _replaced(source, place, after)
            )


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but annotations, imports, decorators and raised errors."""
    if isinstance(tree, ast.Import | ast.ImportFrom | ast.Raise | ast.JoinedStr | ast.Assert):
        return
    if isinstance(tree, ast.keyword) and tree.arg == "strict":  # of zip: an assertion
        return
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _nodes(part)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.AST]]:
    """Yield kinds, places in a node and their replacements."""
    if not isinstance(node, ast.expr | ast.stmt):
        return
    changed = copy.deepcopy(node)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            yield "condition", node.test, ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(changed, ast.Compare) and type(changed.ops[0]) in _COMPARE:
        changed.ops[0] = _COMPARE[type(changed.ops[0])]()
        yield "comparison", node, changed
    elif isinstance(changed, ast.BinOp | ast.AugAssign) and type(changed.op) in _ARITHMETIC:
        changed.op = _ARITHMETIC[type(changed.op)]()
        yield "arithmetic", node, changed
    elif isinstance(changed, ast.BoolOp):
        changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
        yield "and, or", node, changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node, node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", node, ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", node, ast.Constant(node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "result", node, ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", node, ast.Pass()


def _replaced(source: str, node: ast.expr | ast.stmt, after: str) -> str:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = source.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    data = source.encode()
    return (data[:start] + after.encode() + data[end:]).decode()


def draw(files: dict[str, str], count: int, seed: int) -> list[tuple[str, Fault]]:
    """Draw faults: each line of code that has one is as likely as another, and is drawn once.

    Args:
        files: Texts of the files of the library, by path.
        count: Number of faults.
        seed: The seed.

    Returns:
        Paths and faults.
    """
    rng = Random(seed)
    by_line: dict[tuple[str, int], list[Fault]] = {}
    for path, source in sorted(files.items()):
        for fault in faults_of(source):
            by_line.setdefault((path, fault.line), []).append(fault)
    drawn = rng.sample(sorted(by_line), count)
    return [(path, rng.choice(by_line[path, line])) for path, line in drawn]
