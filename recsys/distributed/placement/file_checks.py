"""Checks of edited files: errors name the position, the received value and the fix."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias, TypeGuard

from recsys.base.arguments import repeated, whole

MOST_RANKS = 1 << 20
"""Most ranks of a job. Files with more are rejected before lists of that size are created."""

MOST_ROWS = (1 << 63) - 1
"""Most rows of a table, and largest count in a file."""


def read_source(source: str | Path, what: str) -> tuple[str, str]:
    """Return a text, and its name in errors.

    Args:
        source: A path, or JSON text, which starts with a brace.
        what: Kind of file, such as "Plan file".

    Raises:
        OSError: The file cannot be read.
    """
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return source, what
    return Path(source).read_text(encoding="utf-8"), f"{what} {source}"


def parse_json(text: str, subject: str) -> object:
    """Return the value of JSON text.

    Raises:
        ValueError: The text is not JSON, an object has a repeated key, or the nesting is deeper or
            a number longer than Python reads.
    """
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(repeated(key for key, _ in pairs))
        return dict(pairs)

    try:
        # without the hook, json takes the last of repeated keys
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
"""Function that checks a part of a file: it takes the name of the part in errors and the part, and
returns the converted value."""

Readers: TypeAlias = Mapping[str, Reader | None]
"""Reader of each member of an object, by key; None for a value that the caller checks."""


def read_members(
    subject: str,
    value: object,
    required: Readers,
    optional: Readers = MappingProxyType({}),
    hint: str = "",
) -> dict[str, Any]:
    """Return the members of an object, converted by their readers, without absent ones.

    Args:
        subject: Name of the object in errors.
        value: The object.
        required: Readers of required keys.
        optional: Readers of optional keys.
        hint: Advice if a key is missing.

    Raises:
        ValueError: A key is unknown or missing, or a reader raises it.
        TypeError: The value is not an object, or a reader raises it.

    Example:
        >>> read_members("Tables file: table 't'", {"rows": 5}, {"rows": whole_of})
        {'rows': 5}
    """
    members, readers = object_of(subject, value), {**required, **optional}
    for key in members:
        if key not in readers:
            raise ValueError(
                f"{subject} has keys among {', '.join(readers)}; received {key!r}. "
                f"{nearest(str(key), readers)}"
            )
    missing = [key for key in required if key not in members]
    if missing:
        raise ValueError(
            f"{subject} must have the keys {', '.join(required)}; received none for "
            f"{', '.join(missing)}.{hint and f' {hint}'}"
        )
    return {
        key: members[key] if read is None else read(f"{subject}: {key}", members[key])
        for key, read in readers.items()
        if key in members
    }


def members(**readers: Reader) -> Callable[[str, object], dict[str, Any]]:
    """Return a function that reads the required members of an object and ignores other members.

    Args:
        readers: Reader of each required member.

    Example:
        >>> members(rows=whole_of)("table 't'", {"rows": 5, "color": "red"})
        {'rows': 5}
    """

    def read(subject: str, value: object) -> dict[str, Any]:
        content = object_of(subject, value)
        return read_members(subject, {k: v for k, v in content.items() if k in readers}, readers)

    return read


def each(read: Reader) -> Reader:
    """Return a reader of a list whose members have one reader."""
    return partial(list_of, each=read)


def check_format(subject: str, value: object, known: int) -> int:
    """Return the format of a file.

    Raises:
        ValueError: It is not the known one.
    """
    if value != known:
        raise ValueError(
            f"{subject} must be {known}; received {value!r}. Files of a later format need a later "
            "version of recsys."
        )
    return known


def object_of(subject: str, value: object) -> Mapping[str, Any]:
    """Return the members of an object.

    Raises:
        TypeError: The value is not an object.
    """
    if not isinstance(value, dict):
        wrong_type(subject, "an object, {...}", value)
    return value


def list_of(subject: str, value: object, each: Reader | None = None) -> list[Any]:
    """Return a list.

    Args:
        subject: Name of the list in errors.
        value: The list.
        each: Reader of a member, as in `read_members`; None to leave members unchanged.

    Raises:
        TypeError: The value is not a list, or a reader raises it.
    """
    if not isinstance(value, list):
        wrong_type(subject, "a list", value)
    return value if each is None else [each(f"{subject}[{i}]", of) for i, of in enumerate(value)]


def flag_of(subject: str, value: object) -> bool:
    """Return a boolean.

    Raises:
        TypeError: The value is neither true nor false.
    """
    if not isinstance(value, bool):
        wrong_type(subject, "true or false", value)
    return value


def text_of(subject: str, value: object) -> str:
    """Return a text.

    Raises:
        TypeError: The value is not a text.
    """
    if not isinstance(value, str):
        wrong_type(subject, "text", value)
    return value


def whole_of(subject: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Check that a value of a JSON or YAML file is an int within limits, and return it.

    Raises:
        ValueError: It is too small or too large.
        TypeError: The value is not a whole number.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        wrong_type(subject, "a whole number", value)  # shows the value as JSON
    return whole(subject, value, least, most)


def choice_of(subject: str, value: object, choices: Sequence[str]) -> str:
    """Return one of the given texts.

    Raises:
        ValueError: The value is another text.
        TypeError: The value is not a text.
    """
    text = text_of(subject, value)
    if text not in choices:
        raise ValueError(
            f"{subject} must be one of {', '.join(choices)}; received {text!r}. "
            f"{nearest(text, choices)}"
        )
    return text


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a sentence that names the known word most similar to a given one.

    Example:
        >>> nearest("row_wize", ["table_wise", "row_wise"])
        "The nearest is 'row_wise'."
    """
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0)
    return f"The nearest is {matches[0]!r}." if matches else ""


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def wrong_type(subject: str, rule: str, value: object) -> NoReturn:
    """Raise TypeError for a value of another type."""
    # YAML has values that JSON lacks, such as dates
    text = json.dumps(value, default=str)
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    raise TypeError(f"{subject} must be {rule}; received {shown}.")


def to_json(value: object, levels: int = 0, indent: str = "") -> str:
    """Return JSON with a line for each member of the outer levels, and for each object in a list.

    Args:
        value: The value.
        levels: Number of levels with a line for each member.
        indent: Indentation of the line with the value.

    Example:
        >>> print(to_json({"a": {"b": [1, 2]}, "c": 3}, levels=1))
        {
          "a": {"b": [1, 2]},
          "c": 3
        }
    """
    is_list = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    if not value or not (is_list or isinstance(value, dict)):
        return json.dumps(value)
    is_split = is_list or levels > 0
    inner = indent + "  " if is_split else indent
    start, end = "[]" if is_list else "{}"
    if isinstance(value, dict):
        members = [f"{json.dumps(k)}: {to_json(v, levels - 1, inner)}" for k, v in value.items()]
    else:
        members = [to_json(member) for member in value]  # type: ignore[attr-defined]
    if not is_split:
        return f"{start}{', '.join(members)}{end}"
    lines = f",\n{inner}".join(members)
    return f"{start}\n{inner}{lines}\n{indent}{end}"
