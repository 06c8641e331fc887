"""Find prose that breaks the rules of plain English which a program can check.

Usage: `python -m tests.docs.english PATH [PATH ...]`. In Python files it reads docstrings, comments
and the texts of errors and warnings; in Markdown files everything except code. The rules are in
CONTRIBUTING.md ("Words").
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_WORDS = 35

#: First words of a docstring that name neither a thing nor an action.
_OPENINGS = re.compile(
    r"(What|Where|Whether|How|Which|Who|Whose|Why|That|Of|By|As|Into|Those|There|It|Being|Nothing"
    r"|Nobody)\b"
)

#: Expressions to avoid, as regular expressions for whole words, and the advice.
ADVICE = {
    r"tells?|told|telling": "pass, report, provide",
    r"says?|said|saying": "state, contain, record",
    r"hears?|heard": "receive",
    r"complain(?:s|ed|ts?)?": "report, raise, error",
    r"lest": "so that ... not",
    r"whoever|whatever|wherever": "any, all, even if",
    r"nobody": "no rank, no caller",
    r"anew": "again",
    r"alike": "identical, the same",
    r"equally many": "the same number of",
    r"but for": "except",
    r"as there": "name the class",
    r"those of|that of|those that|those which": "repeat the noun",
    r"of which": "start a new sentence",
    r"(?<!there )(?:is|are) (?-i:none|no(?= (?!longer)))": "is not a, there is no",
    r"travel(?:s|led)?": "is sent",
    r"lies? (?:in|on|at|end)": "is stored, starts at",
    r"take(?:s|n)? apart|took apart": "split",
    r"put in order": "sort",
    r"goes on|go on": "continue",
    r"so is it|be it|is to be": "rewrite",
    r"what (?:it|they|there|is|was|are|were|a|an|the|has|have|comes|came|goes|went|waits|must|any"
    r"|each|all)": "name the object",
}
_AVOID = re.compile("|".join(rf"(?P<w{n}>\b(?:{words})\b)" for n, words in enumerate(ADVICE)), re.I)
_DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|pragma|mypy|ruff)")
_LOGGING = ("warn", "warning", "info", "error")


def findings_of_file(path: Path) -> list[str]:
    """Return "path:line: kind: finding" for each finding in a Python or Markdown file."""
    source = path.read_text()
    prose = _prose_of_python(source) if path.suffix == ".py" else _prose_of_markdown(source)
    return [
        f"{path}:{line}: {kind}: {finding}"
        for line, kind, text in prose
        for finding in findings_of_text(text, kind)
    ]


def findings_of_text(text: str, kind: str = "page") -> Iterator[str]:
    """Yield the findings of one docstring, comment, message or paragraph."""
    text = re.sub(r"^\s*>>>.*?(?:\n\s*\n|\Z)", "\n\n", text, flags=re.S | re.M)  # doctests
    text = re.sub(r"```.*?(```|\Z)", " ", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.S)
    text = re.sub(r"`[^`]*`", "`x`", text)
    text = re.sub(r'"[^"\n]*"', '"x"', text)
    text = re.sub(r"\]\([^)\s]*\)", "]", text)  # addresses of links
    if kind == "docstring" and (opening := _OPENINGS.match(text.lstrip())):
        yield f"opens with {opening.group()!r}: name the thing or the action"
    for sentence in _sentences(text):
        shown = " ".join(sentence.split())
        num_words = len(re.findall(r"[A-Za-z`'\"][\w`'\"-]*", sentence))
        if num_words > MAX_WORDS:
            yield f"{num_words} words in a sentence: {shown[:60]} ..."
        for match in _AVOID.finditer(shown):
            advice = list(ADVICE.values())[int(str(match.lastgroup)[1:])]
            yield f"{match.group().strip()!r} (better: {advice}): {shown[:100]}"


def _sentences(text: str) -> Iterator[str]:
    """Yield sentences; list items, table cells, headings and arguments count as sentences."""
    blocks = r"\n\s*\n|\n\s*(?=[-*#|]|\d+\.)|\n\s*(?=\w+(?: \([^)]*\))?:\s)|\|"
    for block in re.split(blocks, text):
        yield from re.split(r"(?<=[.!?:;])\s+", block)


def _prose_of_python(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, kind, text) of docstrings, attribute docs, comments and messages."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, "docstring", text
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _messages(node.exc)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _LOGGING:
            yield from _messages(node)
    yield from _comments(source)


def _comments(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield comments; consecutive lines without code are one comment."""
    lines: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        has_code = bool(token.line[: token.start[1]].strip())
        if lines and (has_code or token.start[0] != last + 1):
            yield last - len(lines) + 1, "comment", "\n".join(lines)
            lines = []
        last = token.start[0]
        lines.append(token.string.lstrip("#: "))
    if lines:
        yield last - len(lines) + 1, "comment", "\n".join(lines)


def _messages(call: ast.Call) -> Iterator[tuple[int, str, str]]:
    """Yield the texts among a call's arguments; inserted values become "X"."""
    for argument in call.args:
        match argument:
            case ast.Constant(value=str(text)):
                yield argument.lineno, "message", text
            case ast.JoinedStr(values=values):
                parts = [str(v.value) if isinstance(v, ast.Constant) else "X" for v in values]
                yield argument.lineno, "message", "".join(parts)


def _prose_of_markdown(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, "page", paragraph) outside code blocks."""
    is_code, paragraph, start = False, [], 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        if is_code or is_fence or not line.strip():
            if paragraph:
                yield start, "page", "\n".join(paragraph)
            paragraph = []
        else:
            start = start if paragraph else number
            paragraph.append(line)


def files_below(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the Python and Markdown files at and below paths, in order."""
    for path in paths:
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (file for file in found if file.suffix in (".py", ".md"))


def main(arguments: Sequence[str]) -> int:
    """Print the findings below the paths; return 1 if there are any."""
    findings = [
        f for file in files_below(list(map(Path, arguments))) for f in findings_of_file(file)
    ]
    print(*findings, sep="\n", end="\n" if findings else "")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
