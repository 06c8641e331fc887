"""Rules of a manifest, checked when a package is written and when it is read.

The C++ core has the same rules (`json.cpp`, `manifest.cpp` and `columns.cpp` in
`recsys/inference/cpp`; docs/serving_rules.md). Unknown keys are allowed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Final

from recsys.distributed.placement.file_checks import (
    MOST_ROWS,
    Reader,
    choice_of,
    each,
    flag_of,
    is_number,
    list_of,
    members,
    object_of,
    parse_json,
    text_of,
    whole_of,
    wrong_type,
)
from recsys.inference.packages.mapping import ALIGNMENT
from recsys.kernels.hashed.index import LINE

__all__ = ["FORMAT", "manifest_text", "parse_manifest", "read_table"]

FORMAT: Final = 1
_MOST_LEVELS: Final = 64
_DTYPES = "bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"
_IDS = "int32", "int64"
_PARTS = "hour", "weekday", "day", "month"


def parse_manifest(text: str) -> dict[str, Any]:
    """Return the manifest of a text.

    Raises:
        TypeError: A member has another type.
        ValueError: The text is not JSON, a member is missing or has another value, or the members
            do not match each other.
    """
    content = object_of("the manifest", parse_json(text, "the manifest"))
    _check_values("the manifest", content, 0)
    if content.get("format") != FORMAT:
        raise ValueError(
            f"its format is {content.get('format')!r}; this release reads format {FORMAT}. Write "
            "the package again with this release, or use a later one."
        )
    manifest = members(**_MANIFEST)("the manifest", content)
    for check in (_check_buffers, _check_indexes, _check_programs, _check_vocabularies):
        check(manifest)
    return dict(content)


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest that is written.

    Raises:
        ValueError: It has a value that servers do not read.
    """
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    try:
        parse_manifest(text)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The package's manifest must have values that servers read; {error}"
        ) from None
    return text


def read_table(subject: str, value: object, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return some members of a table's entry; errors as of `parse_manifest`."""
    table = members(**{key: _TABLE[key] for key in keys})(subject, value)
    _check_regions(table)
    return table


def _check_values(subject: str, value: object, level: int) -> None:
    """Check that other JSON parsers read the same values."""
    if level > _MOST_LEVELS:
        raise ValueError(f"{subject} must have {_MOST_LEVELS} levels at most; received more.")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{subject} must have valid Unicode; received {value!r}.") from None
    elif is_number(value):
        try:
            is_finite = math.isfinite(float(value))
        except OverflowError:
            is_finite = False
        if not is_finite:
            raise ValueError(
                f"{subject} must be a finite number in the range of float64; received "
                f"{str(value)[:40]}."
            )
    elif isinstance(value, dict):
        for key, member in value.items():
            _check_values(f"a key of {subject}", key, level)
            _check_values(key if level == 0 else f"{subject}.{key}", member, level + 1)
    elif isinstance(value, list):
        for i, member in enumerate(value):
            _check_values(f"{subject}[{i}]", member, level + 1)


# -- members ---------------------------------------------------------------------------------------


def _optional(read: Reader) -> Reader:
    return lambda subject, value: None if value is None else read(subject, value)


def _one_of(*choices: str) -> Reader:
    return partial(choice_of, choices=choices)


_integer: Reader = partial(whole_of, least=-MOST_ROWS - 1, most=MOST_ROWS)
_count: Reader = partial(whole_of, least=0, most=MOST_ROWS)
_positive: Reader = partial(whole_of, least=1, most=MOST_ROWS)
_size: Reader = partial(whole_of, least=1, most=1 << 24)
_dtype = _one_of(*_DTYPES)
_dtype_of_ids = _one_of(*_IDS)


def _number(subject: str, value: object) -> float:
    if not is_number(value):
        wrong_type(subject, "a number", value)
    return value


def _shape(subject: str, value: object) -> list[int]:
    shape: list[int] = list_of(subject, value, _integer)
    if shape[:1] != [-1] or any(size < 0 for size in shape[1:]):
        raise ValueError(
            f"{subject} must begin with -1, and other sizes must not be negative; received {shape}."
        )
    return shape


def _input(subject: str, value: object) -> dict[str, Any]:
    named = members(name=text_of, kind=_one_of("dense", "jagged"))(subject, value)
    if named["kind"] == "dense":
        rest = members(dtype=_dtype, shape=_shape, default=_optional(_number))
    else:
        rest = members(
            dtype=_dtype_of_ids,
            lengths_dtype=_dtype_of_ids,
            weighted=flag_of,
            features=each(_FEATURE),
        )
    return named | rest(subject, value)


def _output(subject: str, value: object) -> dict[str, Any]:
    readers = {"name": text_of, "kind": _one_of("rows", "jagged"), "dtype": _dtype, "shape": _shape}
    output = members(**readers)(subject, value)
    if output["kind"] == "jagged":
        output |= members(lengths_dtype=_dtype, weights_dtype=_optional(_dtype))(subject, value)
    vocabulary = object_of(subject, value).get("vocabulary")
    return {**output, "vocabulary": _optional(text_of)(f"{subject}: vocabulary", vocabulary)}


def _offset(subject: str, value: object) -> int:
    offset: int = whole_of(subject, value, 0, MOST_ROWS)
    if offset % ALIGNMENT:
        raise ValueError(f"{subject} must be a multiple of {ALIGNMENT}; received {offset}.")
    return offset


def _column(subject: str, value: object) -> dict[str, Any]:
    flag_of(f"{subject}: optional", object_of(subject, value).get("optional", False))
    kinds = "categorical", "hashed", "ids", "numeric", "buckets", "vector", "time"
    named = members(name=text_of, kind=_one_of(*kinds), dtype=text_of)(subject, value)
    kind = named["kind"]
    if kind == "time":
        part = members(part=_one_of(*_PARTS), tensor=text_of)
        return named | members(per_second=_positive, parts=each(part))(subject, value)
    if kind == "vector":
        return named | members(is_list=flag_of, dim=_size)(subject, value)
    if kind in ("numeric", "buckets"):
        return named | _number_column(subject, value, kind == "buckets")
    readers = {
        "type": text_of,
        "is_list": flag_of,
        "tensor": text_of,
        "weights": _optional(text_of),
        "rows": _optional(_positive),
    }
    if kind == "categorical":
        readers["table"] = text_of
    separator = object_of(subject, value).get("separator")
    separator = _optional(text_of)(f"{subject}: separator", separator)
    column = named | members(**readers)(subject, value)
    if separator is not None and not (separator and column["is_list"]):
        raise ValueError(
            f"{subject} must have lists and a separator that is not empty; received {separator!r}."
        )
    return column


def _number_column(subject: str, value: object, has_buckets: bool) -> dict[str, Any]:
    readers = dict.fromkeys(("missing", "low", "high"), _optional(_number))
    readers |= {"log1p": flag_of, "standardize": flag_of, "mean": _number, "deviation": _number}
    if has_buckets:
        readers |= {"tensor": text_of, "edges": each(_number)}
    column = members(**readers)(subject, value)
    if (column["low"] is None) != (column["high"] is None):
        raise ValueError(
            f"{subject} must have two limits or none; received low={column['low']} and "
            f"high={column['high']}."
        )
    if column["deviation"] <= 0:
        raise ValueError(f"{subject}: deviation must be positive; received {column['deviation']}.")
    edges = column.get("edges", [])
    if edges != sorted(edges):
        raise ValueError(f"{subject}: edges must rise; received {edges[:10]}.")
    return column


def _files(subject: str, value: object) -> dict[str, Any]:
    files = {}
    for name, file in object_of(subject, value).items():
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or name.endswith("/") or ".." in parts:
            raise ValueError(f"{subject}: {name!r} must be a path inside the version.")
        files[name] = members(bytes=_count, sha256=text_of)(f"{subject}: {name!r}", file)
    return files


_FEATURE = members(name=text_of, tensor=text_of, rows=_optional(_integer), index=_optional(text_of))
_TABLE: dict[str, Reader] = {
    "name": text_of,
    "rows": _count,
    "dim": _integer,
    "dtype": _one_of("int8", "int4", "int2", "float16", "float32"),
    "row_bytes": _positive,
    "file": text_of,
    "features": each(text_of),
    "index": _optional(
        members(ids=text_of, digests=text_of, regions=_integer, seed=_integer, unknown=text_of)
    ),
    "buffer": text_of,
    "offset": _offset,
}
_MANIFEST: dict[str, Reader] = {
    "recsys": text_of,
    "torch": text_of,
    "fbgemm": text_of,
    "machine": text_of,
    "instruction_set": text_of,
    "programs": each(members(kind=text_of, file=text_of, device=text_of, constants=each(text_of))),
    "inputs": each(_input),
    "outputs": each(_output),
    "tables": each(members(**_TABLE)),
    "buffers": each(members(name=text_of, bytes=_count)),
    "files": _files,
    "limits": members(max_rows=_integer),
    "columns": each(_column),
}


# -- members together ------------------------------------------------------------------------------


def _check_buffers(manifest: Mapping[str, Any]) -> None:
    """Check that tables are whole files, and do not overlap in their buffer."""
    buffers = {buffer["name"]: buffer["bytes"] for buffer in manifest["buffers"]}
    ends: dict[str, tuple[int, str]] = {}
    for table in sorted(manifest["tables"], key=lambda table: table["offset"]):
        name, buffer, size = table["name"], table["buffer"], table["rows"] * table["row_bytes"]
        if table["offset"] + size > buffers.get(buffer, -1):
            raise ValueError(
                f"table {name!r} must be in a buffer; received {size} bytes from byte "
                f"{table['offset']} of {buffer!r}, which has {buffers.get(buffer, 'no')} bytes."
            )
        _check_file(manifest, f"table {name!r}", table["file"], size)
        end, other = ends.get(buffer, (0, ""))
        if table["offset"] < end:
            raise ValueError(f"tables must not overlap; received {other!r} and {name!r} that do.")
        if size:
            ends[buffer] = table["offset"] + size, name
    for name, count in Counter(table["name"] for table in manifest["tables"]).items():
        if count > 1:
            raise ValueError(f"tables must have names of their own; received several {name!r}.")


def _check_file(manifest: Mapping[str, Any], subject: str, file: str, size: int) -> None:
    file_bytes = manifest["files"].get(file, {}).get("bytes")
    if file_bytes != size:
        received = "no such file" if file_bytes is None else f"{file_bytes} bytes"
        raise ValueError(
            f"{subject} must have a file of {size} bytes; received {received} for {file!r}."
        )


def _check_regions(table: Mapping[str, Any]) -> None:
    """Check that an index, if there is one, has regions of whole lines."""
    if table["index"] is None:
        return
    regions, rows = table["index"]["regions"], table["rows"]
    is_power = 0 < regions <= 1 << 14 and regions & (regions - 1) == 0
    if not is_power or not 0 < rows < 1 << 37 or rows % (regions * LINE):
        raise ValueError(
            f"table {table['name']!r} must have regions of whole lines of {LINE} rows; "
            f"received {regions} regions of {rows} rows."
        )


def _check_indexes(manifest: Mapping[str, Any]) -> None:
    """Check that indexes are whole files of whole lines, and that features name them."""
    hashed = [table for table in manifest["tables"] if table["index"] is not None]
    for table in hashed:
        index, rows = table["index"], table["rows"]
        _check_regions(table)
        for part, size in (("ids", 8 * rows), ("digests", rows)):
            _check_file(manifest, f"the index of table {table['name']!r}", index[part], size)
    names = {table["name"] for table in hashed}
    for entry in manifest["inputs"]:
        for feature in entry.get("features", ()):
            index = feature["index"]
            if index is not None and (index not in names or entry["dtype"] != "int64"):
                raise ValueError(
                    f"feature {feature['name']!r} must have int64 ids and name a table with an "
                    f"index; received {entry['dtype']} and {index!r}."
                )


def _check_programs(manifest: Mapping[str, Any]) -> None:
    """Check that programs have files, and that TorchScript, which has no rows, gets all buffers."""
    buffers = [buffer["name"] for buffer in manifest["buffers"]]
    for program in manifest["programs"]:
        if program["file"] not in manifest["files"]:
            raise ValueError(f"files must have the program {program['file']!r}; received none.")
        constants = program["constants"]
        if program["kind"] == "torchscript" and sorted(constants) != sorted(buffers):
            raise ValueError(
                f"constants of the program torchscript must be the buffers {buffers}; received "
                f"{constants}."
            )


def _check_vocabularies(manifest: Mapping[str, Any]) -> None:
    """Check that one output at most has rows of a vocabulary, which a column has."""
    known = [column["table"] for column in manifest["columns"] if column["kind"] == "categorical"]
    outputs = [output for output in manifest["outputs"] if output["vocabulary"] is not None]
    for output in outputs:
        has_rows = output["kind"] == "rows" and output["dtype"] in _IDS
        if output["vocabulary"] not in known or not has_rows or len(outputs) > 1:
            raise ValueError(
                f"output {output['name']!r} must have rows of a vocabulary of {known}, as the only "
                f"output; received {output['dtype']} of {output['vocabulary']!r} in {len(outputs)} "
                "outputs."
            )
