"""TorchRec's names that we share: ``python -m tests.compat.facts`` writes torchrec_names.txt.

It needs TorchRec (``make peers``). A line is of one name, and words follow it:

- ``(a,b=1)``: the arguments of a class or function; ``...`` is a default whose text differs between
  processes.
- ``.method(a,b=1)``: a method. ``+name``: another public member of a class, or of an enumeration.
- A minus before an argument or a member: we do not have it. A line that begins with a minus is of
  a name that public scripts import and we do not have; it is written by hand.

Names stay in the file if the table loses them, so a test fails until the line is removed by hand.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recsys.compat.table import HOMES

FILE = Path(__file__).with_name("torchrec_names.txt")

BASES = (torch.nn.Module, torch.optim.Optimizer, Exception, dict, str, unittest.TestCase)
# What these have is PyTorch's or Python's, and differs between their releases.
COMMON = {name for base in BASES for name in dir(base)}

STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


class Word(NamedTuple):
    """A word of a line: of a class or function itself (no name), or of a member."""

    name: str
    arguments: dict[str, str | None] | None
    """Defaults by argument, None if it has none; None as a whole if it is not a function."""
    not_ours: frozenset[str]
    """Arguments that we do not take; the name itself, if we do not have the member."""


def text_of(default: object) -> str:
    """A default as it prints in every process; `...` if it does not."""
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    if default is None or isinstance(default, bool | int | float | str):
        return repr(default).replace(" ", "_").replace(",", "_")
    return "..."


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """The arguments of a call; none if they are not known or it cannot be called."""
    if inspect.isclass(function) and function.__init__ is not object.__init__:
        function = function.__init__  # the class's own signature may be its metaclass's
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in parameters if p.name != "self"]


def arguments_of(function: Any) -> dict[str, str | None]:
    """The arguments of a function, each with its default; None for one that must be given."""
    return {
        f"{STARS.get(p.kind, '')}{p.name}": None if p.default is p.empty else text_of(p.default)
        for p in parameters_of(function)
    }


def members_of(kind: type) -> list[str]:
    """Return the public members of a class, without the members of all classes of its sort."""
    if issubclass(kind, enum.Enum):
        return [member.name for member in kind]
    fields = getattr(kind, "__dataclass_fields__", {})
    own = {
        name
        for base in kind.__mro__
        if base.__module__.startswith("torchrec")
        for name in vars(base)
    }
    names = {*dir(kind), *fields} - (COMMON - own)
    return sorted(name for name in names if not name.startswith("_"))


def words_of(theirs: Any) -> Iterator[Word]:
    """Yields the words of the line of a class or function; nothing for another value."""
    is_enum = inspect.isclass(theirs) and issubclass(theirs, enum.Enum)
    if (inspect.isclass(theirs) or inspect.isroutine(theirs)) and not is_enum:
        yield Word("", arguments_of(theirs), frozenset())
    for name in members_of(theirs) if inspect.isclass(theirs) else ():
        member = getattr(theirs, name, None)
        is_method = inspect.isroutine(member) and not is_enum
        yield Word(name, arguments_of(member) if is_method else None, frozenset())


def line_of(dotted: str, words: Iterator[Word]) -> str:
    """Return the line of a name."""
    return " ".join([dotted, *map(text_of_word, words)])


def text_of_word(word: Word) -> str:
    """Return a word as it is written."""
    if word.name in word.not_ours:
        return f"-{word.name}"
    if word.arguments is None:
        return f"+{word.name}"
    arguments = (
        f"{'-' * (name in word.not_ours)}{name}{'' if default is None else f'={default}'}"
        for name, default in word.arguments.items()
    )
    return f"{'.' * bool(word.name)}{word.name}({','.join(arguments)})"


def read_line(line: str) -> tuple[str, list[Word]]:
    """Return the name of a line, and its words."""
    dotted, *texts = line.split(" ")
    return dotted, [_read_word(text) for text in texts]


def _read_word(text: str) -> Word:
    if text[0] in "+-":
        return Word(text[1:], None, frozenset([text[1:]] if text[0] == "-" else []))
    name, _, inside = text.removeprefix(".").removesuffix(")").partition("(")
    pairs = [argument.partition("=") for argument in inside.split(",") if argument]
    return Word(
        name,
        {key.removeprefix("-"): default if equals else None for key, equals, default in pairs},
        frozenset(key[1:] for key, _, _ in pairs if key.startswith("-")),
    )


def read_lines(start: str = "torchrec.") -> list[str]:
    """Return the lines of shared names; with "-", the lines of names that we do not have."""
    return [line for line in FILE.read_text().splitlines() if line.startswith(start)]


def marked(word: Word, ours: Any) -> Word:
    """A word with the marks of what our object does not have."""
    there = {*dir(ours), *getattr(ours, "__dataclass_fields__", {})}
    if word.name and word.name not in there:
        return Word(word.name, None, frozenset([word.name]))
    if word.arguments is None:
        return Word(word.name, None, frozenset())
    function = getattr(ours, word.name, None) if word.name else ours
    taken = arguments_of(function)
    return word._replace(not_ours=frozenset(word.arguments.keys() - taken.keys()))


def ours_of(dotted: str) -> Any:
    """Return our object of a name; KeyError if the table does not have it."""
    module, _, name = dotted.rpartition(".")
    home = HOMES[module][name]
    return getattr(importlib.import_module(home.module), home.name)


def main() -> int:
    """Asks TorchRec."""
    warnings.simplefilter("ignore")
    importlib.import_module("torchrec")  # without it, every line would go
    lines = ["# Written by python -m tests.compat.facts, which says how to read it."]
    shared = {f"{module}.{name}" for module, names in HOMES.items() for name in names}
    for dotted in sorted(shared | {read_line(line)[0] for line in read_lines()}):
        module, _, name = dotted.rpartition(".")
        try:
            theirs = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            print(f"{dotted}: {error}", file=sys.stderr)
            continue
        words = words_of(theirs)
        if dotted in shared:
            ours = ours_of(dotted)
            words = (marked(word, ours) for word in words)
        lines.append(line_of(dotted, words))
    lines += [line for line in read_lines("-") if line[1:] not in shared]
    FILE.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
