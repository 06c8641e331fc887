"""Runs the code of a TorchRec document, once with its names and once with ours, and prints a table.

``python -m tests.compat.spec FILE...`` takes documents as text: blocks between lines of three
backquotes, or, where there are none, the paragraphs that are Python. Blocks of one document share
their names, as in a notebook. Indentation that a browser's copy lost is put back, CUDA becomes the
CPU, and names that a document uses without making them are supplied. Shell lines, output and
paragraphs that are cut off are left out.

Exit code 0 if every statement ran under both sets of names.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import linecache
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recsys.compat.table import HOMES

ROOT = Path(__file__).parents[2]

SUPPLIED = {
    "torch": "import torch",
    "torchrec": "import torchrec",
    "dist": "import torch.distributed as dist",
    "device": "device = torch.device('cpu')",
    "pg": "pg = dist.GroupMember.WORLD",
    "sharder": "sharder = torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder()",
    "ebc": "ebc = torchrec.EmbeddingBagCollection(device=torch.device('meta'), tables=[torchrec."
    "EmbeddingBagConfig(name=f'{f}_table', embedding_dim=64, num_embeddings=4096, "
    "feature_names=[f]) for f in ('product', 'user')])",
    "args": "import argparse; args = argparse.Namespace(learning_rate=0.1)",
    "params": "params = model.parameters()",
    "epochs": "epochs = 1",
}
"""Statements that make a name which a document uses and does not make."""


class Outcome(NamedTuple):
    """The result of one block under one set of names."""

    statements: int
    failures: list[str]

    def __str__(self) -> str:
        if not self.failures:
            return "ok"
        return f"{len(self.failures)} of {self.statements} fail: {self.failures[0]}"


# -- reading ---------------------------------------------------------------------------------------


def blocks_of(text: str) -> list[str]:
    """Returns the blocks of a document that are Python, as they can be run."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    parts = fenced or re.split(r"\n\s*\n", re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE))
    found = []
    for part in parts:
        repaired = (part, indented(part), _with_a_body(part), _closed(part))
        code = next((code for code in map(_parsed, repaired) if code is not None), None)
        if code is not None and _does_something(code, strict=not fenced):
            found.append(ast.unparse(code))
    return found


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError:
        return None


def _with_a_body(text: str) -> str:
    """A block that ends with the head of a loop, whose body is a comment."""
    return f"{text.rstrip()}\n       pass"


def _closed(part: str) -> str:
    """A call whose last brackets are cut off."""
    if not part.rstrip().endswith(","):
        return part
    return part + ")" * (part.count("(") - part.count(")"))


def _does_something(code: ast.Module, *, strict: bool) -> bool:
    """Return False for output or a sentence that is valid Python; strict: also for one word."""
    kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.ClassDef, ast.For)
    if any(isinstance(statement, kinds) for statement in code.body):
        return True
    reads = [s.value for s in code.body if isinstance(s, ast.Expr)]
    if strict or len(reads) != len(code.body) or not reads:
        return False
    return all(isinstance(value, ast.Name | ast.Attribute) for value in reads)


def indented(text: str) -> str:
    """Put back the indentation of Python that has lost all of it.

    A loop's body is its first line and the lines that read the loop's names; a function's body ends
    with ``return`` or where another one begins.

    Example:
        >>> print(indented("for x in y:\\nprint(x)\\nz = 1"))
        for x in y:
            print(x)
        z = 1
    """
    lines: list[str] = []
    suites: list[tuple[str, set[str], int]] = []  # kind, names that it sets, lines so far
    for line in _logical_lines(text):
        if line.startswith("#"):
            lines.append("    " * len(suites) + line)
            continue
        is_method = re.match(r"(async )?def \w+\(\s*(self|cls)\b", line) is not None
        while suites:
            kind, names, count = suites[-1]
            ends = {
                "class": not is_method and count > 0,
                "def": line.startswith(("def ", "class ", "@")),
                "for": count > 0 and not names & set(re.findall(r"\w+", line)),
            }[kind]
            if not ends:
                break
            suites.pop()
        lines += ["    " * len(suites) + part for part in line.split("\n")]
        suites = [(kind, names, count + 1) for kind, names, count in suites]
        if line.startswith(("return", "raise")) and suites and suites[-1][0] == "def":
            suites.pop()
        head = re.match(r"(class|def|for)\b(.*?)(\bin\b|$)", line.replace("\n", " "))
        if line.endswith(":") and head is not None:
            suites.append((head[1], set(re.findall(r"\w+", head[2])), 0))
    return "\n".join(lines)


def _logical_lines(text: str) -> Iterator[str]:
    """Yield lines; lines within brackets are joined as one."""
    pending: list[str] = []
    for line in text.split("\n"):
        pending.append(line)
        bare = re.sub(r"\"[^\"]*\"|'[^']*'|#.*", "", "\n".join(pending))
        if sum(map(bare.count, "([{")) <= sum(map(bare.count, ")]}")):
            yield "\n".join(pending).strip()
            pending = []
    if pending:
        yield "\n".join(pending).strip()


# -- running ---------------------------------------------------------------------------------------


class _OurNames(ast.NodeTransformer):
    """Follows docs/migrating.md: imports every name from its home here."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if (node.module or "").partition(".")[0] != "torchrec":
            return node
        assert node.module is not None
        statements = []
        for alias in node.names:
            home = HOMES.get(node.module, {}).get(alias.name)
            module, name = home or (node.module.replace("torchrec", "recsys", 1), alias.name)
            renamed = ast.alias(name, alias.asname or alias.name)
            statements.append(ast.ImportFrom(module, [renamed], 0))
        return statements

    def visit_Import(self, node: ast.Import) -> Any:
        for alias in node.names:
            alias.name = alias.name.replace("torchrec", "recsys", 1)
        return node

    def visit_Name(self, node: ast.Name) -> Any:
        node.id = "recsys" if node.id == "torchrec" else node.id
        return node


def on_cpu(code: str) -> str:
    """Returns code with the CPU in place of CUDA."""
    code = re.sub(r"(['\"])cuda(:\d+)?\1", r"\1cpu\1", code)
    return code.replace(".cuda()", ".cpu()").replace("'nccl'", "'gloo'")


def run_blocks(blocks: Sequence[str], *, ours: bool) -> list[Outcome]:
    """Runs the blocks of one document in this process, statement by statement."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [_run_block(block, names, ours=ours) for block in blocks]


def _run_block(block: str, names: dict[str, Any], *, ours: bool) -> Outcome:
    statements = ast.parse(on_cpu(block)).body
    failures = []
    for statement in statements:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                _run(statement, names, ours=ours)
        except Exception as error:
            line = str(error).strip().split("\n")[0]
            failures.append(f"{type(error).__name__}: {line}")
        if "MASTER_PORT" in ast.unparse(statement):
            os.environ["MASTER_PORT"] = _free_port()
    return Outcome(len(statements), failures)


def _run(statement: ast.stmt, names: dict[str, Any], *, ours: bool) -> None:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            _supply(node.id, names, ours=ours)
    tree = ast.Module([statement], [])
    if ours:
        tree = _OurNames().visit(tree)
    source = ast.unparse(tree)
    file = f"<block {len(linecache.cache)}>"  # so that inspect.getsource finds classes
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)


def _supply(name: str, names: dict[str, Any], *, ours: bool) -> None:
    """Makes a name that the document did not make, if it is known."""
    if name in names or name in dir(__builtins__):
        return
    known = next((module for module, homes in HOMES.items() if name in homes), None)
    text = SUPPLIED.get(name)
    if text is None and known is not None:
        text = f"from {known} import {name}"
    if text is not None:
        for statement in ast.parse(text).body:
            _run(statement, names, ours=ours)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _work(arguments: argparse.Namespace) -> None:
    """Runs the documents in this process; prints their outcomes as JSON."""
    import torch.distributed as dist

    if arguments.names == "torchrec":
        from recsys.compat import torchrec

        torchrec.install()
    [path] = arguments.files
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    blocks = blocks_of(path.read_text())
    if not any("init_process_group" in block for block in blocks):
        os.environ.update(environment, MASTER_PORT=_free_port())
        dist.init_process_group("gloo")
    outcomes = run_blocks(blocks, ours=arguments.names == "recsys")
    print(json.dumps(outcomes))
    if dist.is_initialized():
        dist.destroy_process_group()


def outcomes_of(path: Path) -> list[tuple[str, Outcome, Outcome]]:
    """Run a document twice, each in a process of its own.

    Returns:
        Per block its first line, and its outcomes under TorchRec's names and under ours.
    """
    found = []
    for names in ("torchrec", "recsys"):
        command = [sys.executable, "-m", "tests.compat.spec", "--names", names, str(path)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
        )
        if done.returncode:
            raise RuntimeError(f"{path} ended its process: {done.stderr[-2000:]}")
        found.append([Outcome(*outcome) for outcome in json.loads(done.stdout.split("\n")[-2])])
    firsts = [block.split("\n")[0][:60] for block in blocks_of(path.read_text())]
    return list(zip(firsts, *found, strict=True))


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat.spec", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--names", choices=("torchrec", "recsys"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.names:
        _work(arguments)
        return 0
    all_ok = True
    for path in arguments.files:
        print(f"{path.name}\n")
        for number, (first, theirs, ours) in enumerate(outcomes_of(path.resolve()), 1):
            print(f"  {number:2}  {first}\n      torchrec: {theirs}\n      recsys:   {ours}")
            all_ok &= not (theirs.failures or ours.failures)
        print()
    return 0 if all_ok else 1


if __name__ == "__main__":
    sys.exit(main())
