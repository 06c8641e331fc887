"""Full texts of the errors and warnings in `recsys/`, as `tests/messages.txt` lists them.

`python -m tests.messages` writes the list again. Tests match the variable parts of a message only:
a table, a number, an argument. A better sentence then changes the list and no test, and a review
reads the change of the list.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import recsys

SOURCE = Path(recsys.__file__).parent
LIST = Path(__file__).with_name("messages.txt")
_HEAD = "# Written by `python -m tests.messages`. {} stands for a value.\n"


def messages() -> list[str]:
    """Return "file: text" of each message, sorted by file, in the order of the source."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        texts = dict.fromkeys(_texts(ast.parse(path.read_text())))
        found += [f"{name}: {text}" for text in texts]
    return found


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in {"warn", "warning"}:
            call = node
        else:
            continue
        for argument in call.args[:1]:
            text = _text(argument)
            if " " in text:
                yield " ".join(text.split())


def _text(node: ast.AST) -> str:
    """Return the text of a string expression, with {} for values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def listed(found: list[str]) -> str:
    """Return the content of the list."""
    return _HEAD + "".join(f"{line}\n" for line in found)


if __name__ == "__main__":
    LIST.write_text(listed(messages()))
