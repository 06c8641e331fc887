"""Checks of what people write into files: errors name the place, what is there, and the fix."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias, TypeGuard

from recsys.kernels.arguments import repeated, whole

MOST_RANKS = 1 << 20
"""Of a job. Files that name more are refused before lists of so many are made."""

MOST_ROWS = (1 << 63) - 1
"""Of a table, and so of anything that is counted in a file."""


def read_source(source: str | Path, what: str) -> tuple[str, str]:
    """Return a text, and how errors call it.

    Args:
        source: a path, or JSON itself, which starts with a brace.
        what: such as "Plan file".

    Raises:
        OSError: if the file cannot be read.
    """
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return source, what
    return Path(source).read_text(encoding="utf-8"), f"{what} {source}"


def parse_json(text: str, subject: str) -> object:
    """Return what JSON says.

    Raises:
        ValueError: if the text is no JSON, an object has a key twice, or it is nested deeper or
            has longer numbers than Python reads.
    """
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(repeated(key for key, _ in pairs))
        return dict(pairs)

    try:
        value: object = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ValueError(f"{subject} must be JSON; received text with {error}.") from None
    except RecursionError:
        raise ValueError(
            f"{subject} must be JSON of a few levels; received brackets nested too deep to read."
        ) from None
    except ValueError:  # from int(): numbers of more digits than Python reads
        raise ValueError(
            f"{subject} must have numbers of usual size; received one with thousands of digits."
        ) from None
    if twice:
        raise ValueError(f"{subject} must name each key once; received {twice[0]!r} twice.")
    return value


Reader: TypeAlias = Callable[[str, object], object]
"""Checks a part of a file: takes how errors call it, and the part; returns what it means."""

Readers: TypeAlias = Mapping[str, Reader]
"""By key, what reads a member of an object."""


def members_of(
    subject: str,
    value: object,
    required: Sequence[str] = (),
    optional: Sequence[str] = (),
    hint: str = "",
) -> Mapping[str, Any]:  # Any: what is built from the values checks them
    """Return an object's members, all of which are known.

    Args:
        subject: how errors call the object.
        value: what should be one.
        required: keys that must be there.
        optional: keys that may be.
        hint: how to come by the missing ones.

    Raises:
        ValueError: if a key is unknown or missing.
        TypeError: if it is no object.
    """
    members = object_of(subject, value)
    known = (*required, *optional)
    for key in members:
        if key not in known:
            raise ValueError(
                f"{subject} has keys among {', '.join(known)}; received {key!r}. "
                f"{nearest(str(key), known)}"
            )
    missing = [key for key in required if key not in members]
    if missing:
        raise ValueError(
            f"{subject} must have the keys {', '.join(required)}; received none for "
            f"{', '.join(missing)}.{hint and f' {hint}'}"
        )
    return members


def read_members(
    subject: str,
    value: object,
    required: Readers,
    optional: Readers = MappingProxyType({}),
    hint: str = "",
) -> dict[str, Any]:
    """Return what an object says, each member as its reader has it; absent ones are left out.

    Args:
        subject: how errors call the object.
        value: what should be one.
        required: a reader for each key that must be there: it takes how errors call the member, and
            the member, and returns what it means.
        optional: likewise for keys that may be.
        hint: how to come by the missing ones.

    Raises:
        ValueError: if a key is unknown or missing, or a reader says so.
        TypeError: if it is no object, or a reader says so.

    Example:
        >>> read_members("Tables file: table 't'", {"rows": 5}, {"rows": whole_of})
        {'rows': 5}
    """
    members = members_of(subject, value, [*required], [*optional], hint)
    readers = {**required, **optional}
    return {
        key: read(f"{subject}: {key}", members[key])
        for key, read in readers.items()
        if key in members
    }


def check_format(subject: str, value: object, known: int) -> int:
    """Return the format of a file.

    Raises:
        ValueError: if it is not the one that is known.
    """
    if value != known:
        raise ValueError(
            f"{subject} must be {known}; received {value!r}. Files of a later format need a later "
            "version of recsys."
        )
    return known


def object_of(subject: str, value: object) -> Mapping[str, Any]:
    """Return an object's members.

    Raises:
        TypeError: if it is no object.
    """
    if not isinstance(value, dict):
        wrong_type(subject, "an object, {...}", value)
    return value


def list_of(subject: str, value: object, each: Reader | None = None) -> list[Any]:
    """Return a list.

    Args:
        subject: how errors call it.
        value: what should be one.
        each: reads a member, as in `read_members`; they are returned as they are if None.

    Raises:
        TypeError: if it is none, or a reader says so.
    """
    if not isinstance(value, list):
        wrong_type(subject, "a list", value)
    return value if each is None else [each(f"{subject}[{i}]", of) for i, of in enumerate(value)]


def flag_of(subject: str, value: object) -> bool:
    """Return whether something holds.

    Raises:
        TypeError: if it is neither true nor false.
    """
    if not isinstance(value, bool):
        wrong_type(subject, "true or false", value)
    return value


def text_of(subject: str, value: object) -> str:
    """Return a text.

    Raises:
        TypeError: if it is none.
    """
    if not isinstance(value, str):
        wrong_type(subject, "text", value)
    return value


def whole_of(subject: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return a whole number that is large enough, and not too large.

    Raises:
        ValueError: if it is too small or too large.
        TypeError: if it is no whole number.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        wrong_type(subject, "a whole number", value)  # says what the file has, as JSON
    return whole(subject, value, least, most)


def choice_of(subject: str, value: object, choices: Sequence[str]) -> str:
    """Return one of some texts.

    Raises:
        ValueError: if it is another text.
        TypeError: if it is no text.
    """
    text = text_of(subject, value)
    if text not in choices:
        raise ValueError(
            f"{subject} must be one of {', '.join(choices)}; received {text!r}. "
            f"{nearest(text, choices)}"
        )
    return text


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a sentence about the known word that is most like another.

    Example:
        >>> nearest("row_wize", ["table_wise", "row_wise"])
        "The nearest is 'row_wise'."
    """
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0)
    return f"The nearest is {found[0]!r}." if found else ""


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def wrong_type(subject: str, rule: str, value: object) -> NoReturn:
    """Raise TypeError: a value is not what it must be."""
    text = json.dumps(value, default=str)
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    raise TypeError(f"{subject} must be {rule}; received {shown}.")


def bracket(lines: Sequence[str], pair: str, indent: str = "") -> str:
    """Return the JSON of an object ("{}") or a list ("[]") with a line for each member."""
    body = ",\n".join(f"{indent}  {line}" for line in lines)
    return f"{pair[0]}\n{body}\n{indent}{pair[1]}" if lines else pair
