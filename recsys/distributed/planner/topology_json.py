"""Topology files: JSON that people can read and edit, checked when it is read."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn, TypeGuard, TypeVar, final

from recsys.distributed.planner.hardware import (
    NUMBERS,
    Hardware,
    build_hardware,
    check_device,
    per_rank,
)
from recsys.distributed.planner.measured import CollectivePoint, LookupPoint

FORMAT = 1

_REQUIRED = ("format", "compute_device", "world_size", "local_world_size", "hardware")
_TABLES = ("lookup", "collectives")
_Point = TypeVar("_Point", LookupPoint, CollectivePoint)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What a topology file says.

    Args:
        local_world_size: ranks per node.
        hardware: of each rank.
        lookup: measured lookups, if any.
        collectives: measured collectives, if any.
    """

    local_world_size: int
    hardware: tuple[Hardware, ...]
    lookup: tuple[LookupPoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()


def write(contents: Contents) -> str:
    """Returns the text of a file: one number for all ranks, or a list where ranks differ."""
    ranks = contents.hardware
    columns = {name: [getattr(rank, name) for rank in ranks] for name in ("name", *NUMBERS)}
    hardware = {
        name: json.dumps(values[0] if len(set(values)) == 1 else values)
        for name, values in columns.items()
    }
    members = {
        "format": str(FORMAT),
        "compute_device": json.dumps(ranks[0].compute_device),
        "world_size": str(len(ranks)),
        "local_world_size": str(contents.local_world_size),
        "hardware": _braces([f"{json.dumps(k)}: {v}" for k, v in hardware.items()], "{}", "  "),
    }
    for name, points in (("lookup", contents.lookup), ("collectives", contents.collectives)):
        if points:
            rows = [json.dumps({f.name: getattr(p, f.name) for f in fields(p)}) for p in points]
            members[name] = _braces(rows, "[]", "  ")
    return _braces([f"{json.dumps(k)}: {v}" for k, v in members.items()], "{}", "") + "\n"


def _braces(lines: Sequence[str], pair: str, indent: str) -> str:
    body = ",\n".join(f"{indent}  {line}" for line in lines)
    return f"{pair[0]}\n{body}\n{indent}{pair[1]}"


def read(text: str, subject: str) -> Contents:
    """Returns what a file says, once it is checked.

    Args:
        text: JSON.
        subject: what the text is, for errors.

    Raises:
        ValueError: if the text is no JSON, a key is missing or unknown, a list has not one value
            per rank, or a number is out of range.
        TypeError: if a value has the wrong type.
    """
    try:
        data: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{subject} must be JSON; received text with {error}.") from None
    members = _members(subject, data, _REQUIRED, _TABLES)
    if members["format"] != FORMAT:
        raise ValueError(
            f"{subject}: format must be {FORMAT}; received {members['format']!r}. Files of a later "
            "format need a later version of recsys."
        )
    device = members["compute_device"]
    if not isinstance(device, str):
        _wrong_type(f"{subject}: compute_device", "text", device)
    check_device(f"{subject}: Topology", device)
    world_size = _count(f"{subject}: world_size", members["world_size"])
    owner = f"{subject}: hardware"
    given = _members(owner, members["hardware"], NUMBERS, ("name",))
    columns = {}
    for name in NUMBERS:
        value = given[name]
        if not isinstance(value, list) and not _is_number(value):
            _wrong_type(f"{owner}.{name}", "a number or a list of one per rank", value)
        columns[name] = per_rank(owner, name, value, world_size)
    return Contents(
        local_world_size=_count(f"{subject}: local_world_size", members["local_world_size"]),
        hardware=build_hardware(device, _names(owner, given.get("name", ""), world_size), columns),
        lookup=_points(subject, "lookup", members.get("lookup", []), LookupPoint),
        collectives=_points(
            subject, "collectives", members.get("collectives", []), CollectivePoint
        ),
    )


def _members(
    subject: str, value: object, required: Sequence[str], optional: Sequence[str] = ()
) -> Mapping[str, Any]:  # Any: what is built from the values checks them
    if not isinstance(value, dict):
        _wrong_type(subject, "an object, {...}", value)
    known = (*required, *optional)
    for key in value:
        if key not in known:
            [nearest] = difflib.get_close_matches(key, known, n=1, cutoff=0)
            raise ValueError(
                f"{subject} has keys among {', '.join(known)}; received {key!r}. The nearest is "
                f"{nearest!r}."
            )
    missing = [key for key in required if key not in value]
    if missing:
        raise ValueError(
            f"{subject} must have the keys {', '.join(required)}; received none for "
            f"{', '.join(missing)}. Topology.preset(...).to_json() writes a file that has them all."
        )
    return value


def _names(owner: str, value: object, world_size: int) -> list[str]:
    names: list[Any] = value if isinstance(value, list) else [value] * world_size
    if not all(isinstance(name, str) for name in names):
        _wrong_type(f"{owner}.name", "text or a list of one text per rank", value)
    if len(names) != world_size:
        raise ValueError(
            f"{owner}.name must be one text, or one for each of the {world_size} ranks; received "
            f"{len(names)} texts."
        )
    return names


def _points(subject: str, table: str, rows: object, kind: type[_Point]) -> tuple[_Point, ...]:
    if not isinstance(rows, list):
        _wrong_type(f"{subject}: {table}", "a list", rows)
    names = [f.name for f in fields(kind)]
    points = []
    for index, row in enumerate(rows):
        members = _members(f"{subject}: {table}[{index}]", row, names)
        try:
            points.append(kind(**members))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{subject}: {table}[{index}]: {error}") from None
    return tuple(points)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(subject: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        _wrong_type(subject, "a whole number", value)
    if value < 1:
        raise ValueError(f"{subject} must be positive; received {value}.")
    return value


def _wrong_type(subject: str, rule: str, value: object) -> NoReturn:
    text = json.dumps(value)
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    raise TypeError(f"{subject} must be {rule}; received {shown}.")
