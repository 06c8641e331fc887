"""Settings of an optimizer's parameter groups, such as learning rates and decay, by parameter.

The parameters of a group differ between ranks and plans; the settings of a parameter do not. So a
checkpoint contains the optimizer and the settings of each parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.optim.keyed import KeyedOptimizer

# Settings that do not change the result: a load keeps the values of the live optimizer.
_OWN = {"foreach", "fused", "capturable", "differentiable", "update_mode", "row_state"}

Settings = list[dict[str, Any]]
"""`{"params": [...], "optimizer": kind, "settings": {...}}` for parameters with equal settings."""

Updates = list[tuple[dict[str, Any], dict[str, Any]]]
"""Live parameter groups, and the saved settings of each."""


def settings_of(optimizer: KeyedOptimizer, wholes: Mapping[str, str]) -> Settings:
    """Return the settings of this rank's parameters.

    Args:
        optimizer: All optimizers of the model.
        wholes: Checkpoint name of each of its parameters.

    Raises:
        CheckpointError: A setting is not a plain value.
    """
    kinds = {wholes[name]: kind for name, kind in optimizer.optimizer_kinds().items()}
    groups: Settings = []
    for group, names in _groups(optimizer, wholes):
        settings = {
            key: _plain(names, key, value)
            for key, value in group.items()
            if key not in _OWN and key != "params"
        }
        for kind in sorted({kinds[name] for name in names}):
            kind_names = sorted({name for name in names if kinds[name] == kind})
            groups.append({"params": kind_names, "optimizer": kind, "settings": settings})
    return groups


def _groups(
    optimizer: KeyedOptimizer, wholes: Mapping[str, str]
) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the parameter groups, and the checkpoint names of their parameters."""
    names = {id(param): wholes[name] for name, param in optimizer.params.items()}
    return [
        (group, [names[id(param)] for param in group["params"]]) for group in optimizer.param_groups
    ]


def _plain(names: Sequence[str], key: str, value: object) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"Setting {key!r} of the optimizer of {names[:3]} must be a number, text, or a list of "
            f"such to be saved; received a {type(value).__qualname__}. Remove it from param_groups."
        ) from error


def merge(of_ranks: Iterable[Settings]) -> Settings:
    """Return the settings of all ranks.

    Raises:
        CheckpointError: Ranks have different settings for a parameter.
    """
    merged: dict[str, set[str]] = {}
    first: dict[str, tuple[int, str]] = {}
    for rank, settings in enumerate(of_ranks):
        for entry in settings:
            text = json.dumps({**entry, "params": None}, sort_keys=True)
            for name in entry["params"]:
                other, before = first.setdefault(name, (rank, text))
                if before != text:
                    raise CheckpointError(
                        f"The optimizer settings of {name!r} must be the same on all ranks; "
                        f"received {before} on rank {other} and {text} on rank {rank}."
                    )
            merged.setdefault(text, set()).update(entry["params"])
    return [{**json.loads(text), "params": sorted(names)} for text, names in sorted(merged.items())]


def check_settings(
    source: str,
    optimizer: KeyedOptimizer,
    wholes: Mapping[str, str],
    saved: Settings,
    *,
    allow_partial: bool,
    keep: bool,
) -> Updates:
    """Return the updates of the optimizer's groups for `load_settings`, checked.

    Args:
        source: The checkpoint, for errors.
        optimizer: The optimizer to load.
        wholes: Checkpoint name of each of its parameters.
        saved: Settings in the checkpoint.
        allow_partial: Whether the checkpoint may lack parameters.
        keep: Whether the optimizer keeps its own settings.

    Raises:
        CheckpointError: The checkpoint lacks a parameter, or was saved by an optimizer of another
            kind or with a setting that cannot be changed, or the parameters of one group were saved
            with different settings.
    """
    entries = {name: entry for entry in saved for name in entry["params"]}
    missing = sorted({*wholes.values()} - entries.keys())
    if missing and not allow_partial:
        raise CheckpointError(
            f"{source} lacks the optimizer of {len(missing)} parameters: {missing[:10]}. Pass "
            "allow_partial=True to keep the current settings."
        )
    for name, kind in optimizer.optimizer_kinds().items():
        entry = entries.get(wholes[name], {"optimizer": kind})
        if entry["optimizer"] != kind:
            raise CheckpointError(
                f"{source} holds the state of {entry['optimizer']} for {wholes[name]!r}; this "
                f"optimizer is {kind}, for which that state has another meaning. Load without the "
                "optimizer, or attach the one that was saved."
            )
    updates: Updates = []
    for group, names in () if keep else _groups(optimizer, wholes):
        saved_settings = _saved_for(source, names, entries)
        for key in getattr(group, "fixed", ()):
            value = _plain(names, key, group[key])
            if key not in _OWN and key in saved_settings and saved_settings[key] != value:
                raise CheckpointError(
                    f"{source} has {key}={saved_settings[key]} for {names[:3]}; here it is "
                    f"{value}, and is a part of the tables' update, which cannot be changed. "
                    "Attach the optimizer with the saved one, or pass keep_settings=True to train "
                    "on with this one."
                )
        for key in saved_settings.keys() & group.keys() - _OWN:
            value = group[key]
            if isinstance(value, int | float | Tensor) and not isinstance(
                saved_settings[key], int | float
            ):
                raise CheckpointError(
                    f"{source} must have a number for {key} of {names[:3]}, as here; received "
                    f"{saved_settings[key]!r}. Load an earlier version, or pass keep_settings=True."
                )
        updates.append((group, saved_settings))
    return updates


def _saved_for(
    source: str, names: Sequence[str], entries: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the saved settings of all parameters of a group; empty if there are none."""
    saved = [(name, entries[name]["settings"]) for name in names if name in entries]
    for name, settings in saved:
        first, expected = saved[0]
        if settings != expected:
            raise CheckpointError(
                f"{source} has {settings} for {name!r} and {expected} for {first!r}, which are in "
                "one parameter group here. Use separate groups, or pass keep_settings=True."
            )
    return saved[0][1] if saved else {}


def load_settings(updates: Updates) -> None:
    """Set saved settings in the groups of an optimizer that have them."""
    for group, settings in updates:
        for key in settings.keys() - _OWN - set(getattr(group, "fixed", ())):
            # schedulers add initial_lr to a group when they start, and need it to continue
            if key in group or key == "initial_lr":
                group[key] = _convert_like(group.get(key), settings[key])


def _convert_like(own: object, value: Any) -> Any:
    """Return a value with the type of the value it replaces."""
    if isinstance(own, Tensor):
        return torch.full_like(own, value)
    return tuple(value) if isinstance(own, tuple) else value
