"""Fitted specs as files: JSON beside one Arrow file per vocabulary."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from recsys import features
from recsys.features.columns import KINDS, Column
from recsys.features.fit import Fitted
from recsys.features.profiles import Profile
from recsys.features.vocabulary import Vocabulary

__all__ = ["NAME", "describe", "from_bytes", "load_folder", "restore", "save_folder", "to_bytes"]

NAME: Final = "features.json"
_FORMAT: Final = 2
_FILES: Final = re.compile(r"features\.json|vocabulary-[0-9]+\.arrow")


def describe(columns: Sequence[Column], fitted: Fitted) -> dict[str, Any]:
    """Return a spec without the values of its vocabularies, as JSON has it.

    Args:
        columns: The columns.
        fitted: Their state.
    """
    return {
        "format": _FORMAT,
        "columns": [
            {"kind": type(column).__name__, **dataclasses.asdict(column)} for column in columns
        ],
        "num_rows": fitted.num_rows,
        "means": fitted.means,
        "deviations": fitted.deviations,
        "edges": {name: edges.tolist() for name, edges in fitted.edges.items()},
        "kinds": fitted.kinds,
        "profiles": {name: profile._asdict() for name, profile in fitted.profiles.items()},
        "digests": list(fitted.digests),
        **({"converted": [*fitted.converted]} if fitted.converted else {}),
        "vocabularies": {
            name: {"kind": vocabulary.kind, "size": len(vocabulary.values)}
            for name, vocabulary in fitted.vocabularies.items()
        },
    }


def restore(
    found: Mapping[str, Any], vocabularies: Mapping[str, Vocabulary], place: object
) -> tuple[list[Column], Fitted]:
    """Rebuild columns and their fitted state from the description in a saved spec.

    Args:
        found: The result of `describe`.
        vocabularies: The vocabulary of each table.
        place: Where the description is, for messages.

    Raises:
        ValueError: The description is of another version, or damaged.
    """
    _check_format(found, place)
    columns: list[Column] = []
    try:
        for entry in found["columns"]:
            fields: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in entry.items()
                if name != "kind"
            }
            columns.append(_kind_of(entry["kind"], place)(**fields))
        fitted = Fitted(
            found["num_rows"],
            dict(vocabularies),
            dict(found["means"]),
            dict(found["deviations"]),
            {name: np.array(edges, np.float64) for name, edges in found["edges"].items()},
            dict(found["kinds"]),
            # specs of an older recsys have neither
            {name: Profile(**profile) for name, profile in found.get("profiles", {}).items()},
            tuple(found.get("digests", ())),
            tuple(found.get("converted", ())),
        )
        for column in columns:
            column.check_fitted(fitted)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{place} is damaged: {error!r}. Save the spec again.") from error
    return columns, fitted


def _check_format(found: Mapping[str, Any], place: object) -> None:
    if found.get("format") != _FORMAT:
        raise ValueError(
            f"{place} must have format {_FORMAT}; received {found.get('format')}. Another version "
            "of recsys wrote it: fit and save the spec again, or use that version."
        )


def _kind_of(name: str, place: object) -> type[Column]:
    """Return a kind of column. The kinds of this package are imported on first use."""
    if name in features.__all__:
        getattr(features, name)
    if name not in KINDS:
        raise ValueError(
            f"{place} must have kinds of columns that are imported; received {name!r}. Import the "
            "module that defines it."
        )
    return KINDS[name]


def save_folder(folder: Path, columns: Sequence[Column], fitted: Fitted) -> None:
    """Write a spec into a new folder.

    Args:
        folder: The folder. An older spec in it is replaced once the new one is complete.
        columns: The columns.
        fitted: Their state.

    Raises:
        FileExistsError: The folder has other files.
    """
    if folder.exists() and (not folder.is_dir() or not _has_spec(folder)):
        raise FileExistsError(
            f"{folder} must be a new folder, or one with a spec; it has other files."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}-{secrets.token_hex(8)}")
    part.mkdir()
    try:
        description = describe(columns, fitted)
        for number, (name, vocabulary) in enumerate(fitted.vocabularies.items()):
            file = f"vocabulary-{number}.arrow"
            data = to_bytes(vocabulary)
            (part / file).write_bytes(data)
            description["vocabularies"][name] |= {
                "file": file,
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        description["sha256"] = _checksum(description)
        (part / NAME).write_text(json.dumps(description, indent=1, allow_nan=False) + "\n")
        if folder.exists():
            old = part.with_name(part.name + "-old")
            os.rename(folder, old)
            os.rename(part, folder)
            shutil.rmtree(old)
        else:
            os.rename(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def load_folder(folder: Path) -> tuple[list[Column], Fitted]:
    """Read a spec that `save_folder` wrote.

    Raises:
        FileNotFoundError: The folder has no spec, or a file of it is missing.
        ValueError: A file is damaged, or of another version.
    """
    path = folder / NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} must be a folder that FeatureSpec.save wrote.")
    try:
        description = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Save the spec again.") from error
    if not isinstance(description, dict):
        raise ValueError(f"{path} is damaged: it has no description. Save the spec again.")
    _check_format(description, path)
    if description.get("sha256") != _checksum(description):
        raise ValueError(f"{path} is damaged: it differs from its checksum. Save the spec again.")
    vocabularies = {}
    for name, vocabulary in description.get("vocabularies", {}).items():
        data = (folder / vocabulary["file"]).read_bytes()
        if hashlib.sha256(data).hexdigest() != vocabulary["sha256"]:
            raise ValueError(
                f"{folder / vocabulary['file']} is damaged: it differs from its checksum. Save the "
                "spec again."
            )
        vocabularies[name] = from_bytes(data)
    return restore(description, vocabularies, path)


def to_bytes(vocabulary: Vocabulary) -> bytes:
    """Return a vocabulary as an Arrow file."""
    columns = {"value": vocabulary.values}
    if vocabulary.ages.any():
        columns["age"] = pa.array(vocabulary.ages)
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_bytes(data: bytes) -> Vocabulary:
    """Return the vocabulary of an Arrow file."""
    table = pa.ipc.open_file(data).read_all()
    ages = table["age"].to_numpy() if "age" in table.column_names else None
    return Vocabulary(table["value"].combine_chunks(), ages)


def _has_spec(folder: Path) -> bool:
    """Return whether a folder has a spec, or nothing: no other files, which would be lost."""
    return all(_FILES.fullmatch(path.name) and path.is_file() for path in folder.iterdir())


def _checksum(found: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in found.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
