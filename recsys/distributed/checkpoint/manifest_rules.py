"""Rules of a version's manifest, checked when it is read; its CRC is checked before."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from recsys.distributed.placement.file_checks import (
    MOST_ROWS,
    Reader,
    choice_of,
    each,
    list_of,
    members,
    object_of,
    text_of,
    whole_of,
    wrong_type,
)
from recsys.modules.ids.row_log import RecordField, record_bytes

__all__ = ["LOG_FILE", "check_manifest"]

LOG_FILE = "-overflow-"
"""Part of the names of the files of logs."""
_count: Reader = partial(whole_of, least=0, most=MOST_ROWS)
_CRC = partial(whole_of, least=0, most=2**32 - 1)


def check_manifest(content: Mapping[str, Any]) -> None:
    """Check the members of a manifest.

    Raises:
        TypeError: A member has another type.
        ValueError: A member is missing, or has another value.
    """
    members(files=_by_name(each(_tuple(_count, _CRC))), optimizer=each(_SETTINGS))(
        "the manifest", content
    )
    _by_name(text_of)("fingerprints", content.get("fingerprints", {}))
    kind = content.get("kind", "full")
    choice_of("kind", kind, ("full", "delta"))
    if kind == "delta":
        _DELTA("the manifest", content)
    named = set[str]()
    for prefix, logs in object_of("overflow", content.get("overflow", {})).items():
        for i, log in enumerate(list_of(f"overflow.{prefix}", logs, _LOG)):
            first, last = log["rows"]
            if first >= last:
                raise ValueError(
                    f"overflow.{prefix}[{i}].rows must be a range of rows; received {log['rows']}."
                )
            size = 8 + record_bytes([RecordField(*field) for field in log["fields"]])
            sizes = [(name, size * records) for name, records in log["segments"]]
            sizes.append((log["live"], sum(-(-records // 8) for _, records in log["segments"])))
            for name, num_bytes in sizes:
                blocks = [block[0] for block in content["files"].get(name, ())]
                if blocks != [num_bytes]:
                    raise ValueError(
                        f"overflow.{prefix}[{i}] must have a file {name!r} with a block of "
                        f"{num_bytes} bytes; received blocks of {blocks} bytes."
                    )
                if name in named:
                    raise ValueError(f"overflow must have each file once; received {name!r} twice.")
                named.add(name)
    if lost := sorted(name for name in content["files"] if LOG_FILE in name and name not in named):
        raise ValueError(f"overflow must have all files of logs; it lacks {lost}.")


def _by_name(read: Reader) -> Reader:
    """Return a reader of an object whose members have one kind."""

    def read_all(subject: str, value: object) -> dict[str, Any]:
        content = object_of(subject, value)
        return {name: read(f"{subject}.{name}", member) for name, member in content.items()}

    return read_all


def _tuple(*readers: Reader) -> Reader:
    """Return a reader of a list whose members have a kind each."""

    def read(subject: str, value: object) -> tuple[Any, ...]:
        content = list_of(subject, value)
        if len(content) != len(readers):
            wrong_type(subject, f"a list of {len(readers)} values", value)
        return tuple(
            reader(f"{subject}[{i}]", member)
            for i, (reader, member) in enumerate(zip(readers, content, strict=True))
        )

    return read


def _dtype(subject: str, value: object) -> torch.dtype:
    dtype = getattr(torch, text_of(subject, value), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{subject} must be a dtype; received {value!r}.")
    return dtype


_VERSION = members(step=_count, sha256=text_of)
_DELTA = members(
    step=_count,
    previous=_VERSION,
    base=_VERSION,
    rows=_by_name(members(count=_count, values=each(text_of))),
)
_SETTINGS = members(params=each(text_of), optimizer=text_of, settings=object_of)
_LOG = members(
    fields=each(_tuple(text_of, _dtype, _count)),
    rows=_tuple(_count, _count),
    live=text_of,
    segments=each(_tuple(text_of, _count)),
)
