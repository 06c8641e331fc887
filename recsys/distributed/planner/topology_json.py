"""Topology files: JSON that people can read and edit, checked when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any, TypeVar

from recsys.distributed.placement import file_checks as files
from recsys.distributed.planner.hardware import DEVICES, NUMBERS, Hardware, build_hardware, per_rank
from recsys.distributed.planner.measured import CollectivePoint, LookupPoint

FORMAT = 1

_HINT = "Topology.preset(...).to_json() writes a file that has them all."
_Point = TypeVar("_Point", LookupPoint, CollectivePoint)


def write(
    hardware: Sequence[Hardware],
    local_world_size: int,
    **tables: Sequence[LookupPoint | CollectivePoint],
) -> str:
    """Return the text of a file: one number for all ranks, or a list if ranks differ.

    Args:
        hardware: Hardware of each rank.
        local_world_size: Ranks per node.
        tables: Measurements by the name of their table.
    """
    columns = {name: [getattr(rank, name) for rank in hardware] for name in ("name", *NUMBERS)}
    members = {
        "format": FORMAT,
        "compute_device": hardware[0].compute_device,
        "world_size": len(hardware),
        "local_world_size": local_world_size,
        "hardware": {
            name: values[0] if len(set(values)) == 1 else values for name, values in columns.items()
        },
        **{name: [asdict(point) for point in points] for name, points in tables.items() if points},
    }
    return files.to_json(members, levels=2) + "\n"


def read(text: str, subject: str) -> dict[str, Any]:
    """Return the checked content of a file: the arguments of `Topology.from_hardware`.

    Args:
        text: JSON.
        subject: Name of the text in errors.

    Raises:
        ValueError: The text is not JSON, a key is missing or unknown, a list does not have one
            value for each rank, or a number is out of range.
        TypeError: A value has another type.
    """
    members = files.read_members(
        subject,
        files.parse_json(text, subject),
        {
            "format": partial(files.check_format, known=FORMAT),
            "compute_device": partial(files.choice_of, choices=DEVICES),
            "world_size": partial(files.whole_of, most=files.MOST_RANKS),
            "local_world_size": files.whole_of,
            "hardware": files.object_of,
        },
        {
            "lookup": partial(_points, kind=LookupPoint),
            "collectives": partial(_points, kind=CollectivePoint),
        },
        _HINT,
    )
    world_size, owner = members.pop("world_size"), f"{subject}: hardware"
    # `per_rank` checks the values, since each may be a list
    unchecked = dict.fromkeys(NUMBERS), {"name": None}
    hardware = files.read_members(owner, members["hardware"], *unchecked, _HINT)
    columns = {name: per_rank(owner, name, number, world_size) for name, number in hardware.items()}
    members["hardware"] = build_hardware(members.pop("compute_device"), columns)
    del members["format"]
    return members


def _points(subject: str, rows: object, *, kind: type[_Point]) -> tuple[_Point, ...]:
    # the constructor of a point checks the values
    readers = dict.fromkeys(f.name for f in fields(kind))
    points = []
    for index, row in enumerate(files.list_of(subject, rows)):
        members = files.read_members(f"{subject}[{index}]", row, readers, hint=_HINT)
        try:
            points.append(kind(**members))
        except (TypeError, ValueError) as error:
            # of the same class, since callers catch TypeError and ValueError separately
            raise type(error)(f"{subject}[{index}]: {error}") from None
    return tuple(points)
