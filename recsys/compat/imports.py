"""Translates TorchRec imports of scripts: `python -m recsys.compat.imports train.py ...`.

For each import it prints file, line and the equivalent recsys imports. The exit status is 1 if a
name has no counterpart.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from recsys.compat.table import HOMES, home_of, reason_of


def imports_here(source: str) -> Iterator[tuple[int, list[str]]]:
    r"""Yield the line of each TorchRec import and the equivalent recsys imports.

    A name without a counterpart becomes a comment, with the reason if there is one. An import of a
    whole module becomes a comment that asks to import its names.

    Args:
        source: Python code.

    Raises:
        SyntaxError: The code is not Python.

    Example:
        >>> script = "from torchrec.models.dlrm import DLRM, DLRM_DCN as Model"
        >>> for line, statements in imports_here(script):
        ...     print(line, *statements, sep="\n")
        1
        from recsys.modules.dlrm import DLRM
        from recsys.modules.dlrm_variants import DLRM_DCN as Model
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and _is_theirs(node.module or "") and not node.level:
            yield node.lineno, [_statement(node.module or "", alias) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if _is_theirs(alias.name)]
            if names:
                yield node.lineno, [f"# {name}: import its names one by one" for name in names]


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] == "torchrec"


def _statement(module: str, alias: ast.alias) -> str:
    home = home_of(module, alias.name)
    dotted = f"{module}.{alias.name}"
    if home is None and dotted in HOMES:
        return f"# {dotted}: import its names one by one"
    if home is None:
        return f"# {dotted}: no counterpart. {reason_of(dotted) or ''}".rstrip()
    name = alias.asname or alias.name
    return f"from {home.module} import {home.name}" + (f" as {name}" * (name != home.name))


def main(files: list[str]) -> int:
    """Print the translated imports of files, and return the exit status."""
    if not files:
        raise SystemExit("usage: python -m recsys.compat.imports SCRIPT ...")
    is_whole = True
    for file in files:
        for line, statements in imports_here(Path(file).read_text()):
            print(f"{file}:{line}", *statements, sep="\n  ")
            is_whole &= not any(": no counterpart" in statement for statement in statements)
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
