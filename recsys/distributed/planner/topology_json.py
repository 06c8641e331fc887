"""Topology files: JSON that people can read and edit, checked when it is read."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, TypeVar, final

from recsys.distributed.placement.file_checks import (
    MOST_RANKS,
    bracket,
    is_number,
    list_of,
    members_of,
    parse_json,
    text_of,
    whole_of,
    wrong_type,
)
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
_HINT = "Topology.preset(...).to_json() writes a file that has them all."
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
        "hardware": bracket([f"{json.dumps(k)}: {v}" for k, v in hardware.items()], "{}", "  "),
    }
    for name, points in (("lookup", contents.lookup), ("collectives", contents.collectives)):
        if points:
            rows = [json.dumps({f.name: getattr(p, f.name) for f in fields(p)}) for p in points]
            members[name] = bracket(rows, "[]", "  ")
    return bracket([f"{json.dumps(k)}: {v}" for k, v in members.items()], "{}") + "\n"


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
    members = members_of(subject, parse_json(text, subject), _REQUIRED, _TABLES, _HINT)
    if members["format"] != FORMAT:
        raise ValueError(
            f"{subject}: format must be {FORMAT}; received {members['format']!r}. Files of a later "
            "format need a later version of recsys."
        )
    device = text_of(f"{subject}: compute_device", members["compute_device"])
    check_device(f"{subject}: Topology", device)
    world_size = whole_of(f"{subject}: world_size", members["world_size"], most=MOST_RANKS)
    owner = f"{subject}: hardware"
    given = members_of(owner, members["hardware"], NUMBERS, ("name",), _HINT)
    columns = {}
    for name in NUMBERS:
        value = given[name]
        if not isinstance(value, list) and not is_number(value):
            wrong_type(f"{owner}.{name}", "a number or a list of one per rank", value)
        columns[name] = per_rank(owner, name, value, world_size)
    return Contents(
        local_world_size=whole_of(f"{subject}: local_world_size", members["local_world_size"]),
        hardware=build_hardware(device, _names(owner, given.get("name", ""), world_size), columns),
        lookup=_points(subject, "lookup", members.get("lookup", []), LookupPoint),
        collectives=_points(
            subject, "collectives", members.get("collectives", []), CollectivePoint
        ),
    )


def _names(owner: str, value: object, world_size: int) -> list[str]:
    names: list[Any] = value if isinstance(value, list) else [value] * world_size
    if not all(isinstance(name, str) for name in names):
        wrong_type(f"{owner}.name", "text or a list of one text per rank", value)
    if len(names) != world_size:
        raise ValueError(
            f"{owner}.name must be one text, or one for each of the {world_size} ranks; received "
            f"{len(names)} texts."
        )
    return names


def _points(subject: str, table: str, rows: object, kind: type[_Point]) -> tuple[_Point, ...]:
    names = [f.name for f in fields(kind)]
    points = []
    for index, row in enumerate(list_of(f"{subject}: {table}", rows)):
        members = members_of(f"{subject}: {table}[{index}]", row, names, hint=_HINT)
        try:
            points.append(kind(**members))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{subject}: {table}[{index}]: {error}") from None
    return tuple(points)
