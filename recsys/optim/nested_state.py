"""Nested optimizer state: tensors and numbers in dictionaries, lists and tuples.

Most optimizers have one flat dictionary per parameter; some nest them, such as Shampoo with one
dictionary per block. Leaves are named by their paths. State dicts stand for modules in a state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from recsys.base.arguments import MissingKeyError, wrong_type

__all__ = [
    "check_same_keys",
    "check_state",
    "copy_into",
    "live_state",
    "loaded_state",
    "reset_steps",
]

_Path: TypeAlias = tuple[object, ...]


def live_state(state: Any) -> Any:
    """Copy the containers of a state, but not its tensors.

    Example:
        >>> state = {"block": {"left": torch.ones(1)}}
        >>> live = live_state(state)
        >>> live["block"] is state["block"], live["block"]["left"] is state["block"]["left"]
        (False, True)
    """
    if isinstance(state, Mapping):
        return {key: live_state(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return _sequence_like(state, map(live_state, state))
    return live_state(state.state_dict()) if _has_state(state) else state


def loaded_state(state_dict: object) -> Mapping[str, Any]:
    """Return the states in a state dict of an optimizer.

    Raises:
        TypeError: If `state_dict` is not a state dict.
    """
    state = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    if not isinstance(state, Mapping):
        received = type(state_dict).__qualname__
        if isinstance(state_dict, Mapping):
            received = f"one with the keys {sorted(map(str, state_dict))}"
        raise TypeError(
            "load_state_dict of an optimizer takes a dict with the key 'state', as state_dict() "
            f"returns it; received {received}."
        )
    return state


def check_same_keys(what: str, own: Mapping[Any, Any], loaded: Mapping[Any, Any]) -> None:
    """Check that a loaded state has the same names as the optimizer.

    Args:
        what: Kind of the names, for messages.
        own: Values of the optimizer, by name or path.
        loaded: Loaded values.

    Raises:
        KeyError: If names are missing or unexpected.
    """
    missing, unexpected = (
        sorted(map(_shown, names))
        for names in (own.keys() - loaded.keys(), loaded.keys() - own.keys())
    )
    if missing or unexpected:
        raise MissingKeyError(
            f"The loaded optimizer state must have the same {what} as the optimizer; "
            f"missing: {missing}, unexpected: {unexpected}."
        )


def check_state(name: str, own: object, loaded: object) -> None:
    """Check that a loaded state has the same leaves, of the same shapes, as the optimizer's.

    Args:
        name: Name of the parameter.
        own: State of the parameter in the optimizer.
        loaded: Loaded state of the parameter.

    Raises:
        KeyError: If leaves are missing or unexpected, with their paths.
        TypeError: If a leaf must be a tensor and cannot be converted to one.
        ValueError: If the shape of a tensor differs.
    """
    own_leaves, loaded_leaves = dict(_leaves(own)), dict(_leaves(loaded))
    check_same_keys(f"states of parameter {name!r}", own_leaves, loaded_leaves)
    for path, value in own_leaves.items():
        if not isinstance(value, Tensor):
            continue
        subject = f"State {_shown(path)!r} of parameter {name!r}"
        shape = _to_tensor(subject, loaded_leaves[path]).shape
        if value.shape != shape:
            raise ValueError(
                f"{subject} has shape {tuple(value.shape)}; the loaded one has {tuple(shape)}."
            )


def copy_into(own: Any, loaded: Any) -> Any:
    """Copy a loaded state into the state of an optimizer, in place; call `check_state` first.

    Args:
        own: State of the optimizer. Its tensors, dictionaries and lists stay the same objects.
        loaded: Loaded state with the same leaves. Values are copied.

    Returns:
        `own`, or a new value if `own` is immutable.
    """
    if isinstance(own, Tensor):
        return own.copy_(_to_tensor("State", loaded))
    if _has_state(own):
        own.load_state_dict(loaded)
        return own
    if isinstance(own, tuple):
        return _sequence_like(own, map(copy_into, own, loaded))
    if isinstance(own, Mapping | list):
        keys = list(own) if isinstance(own, Mapping) else range(len(own))
        for key in keys:
            kept = copy_into(own[key], loaded[key])
            if kept is not own[key]:
                own[key] = kept  # type: ignore[index]  # an immutable state is an error
        return own
    return loaded.detach().clone() if isinstance(loaded, Tensor) else copy.deepcopy(loaded)


def reset_steps(state: Any) -> None:
    """Set all step counters, values named `step`, to 0 in place."""
    if isinstance(state, Mapping):
        step = state.get("step")
        if isinstance(step, Tensor):
            step.zero_()
        elif isinstance(step, int):
            state["step"] = 0  # type: ignore[index]  # as above
        parts = list(state.values())
    else:
        parts = list(state) if isinstance(state, list | tuple) else []
    for part in parts:
        reset_steps(part)


def _has_state(value: Any) -> bool:
    """Return whether a value has a state dict, as modules."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _leaves(state: object, path: _Path = ()) -> Iterator[tuple[_Path, object]]:
    if isinstance(state, Mapping | list | tuple) and not state and path:
        yield (*path, "(empty)"), state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(state, list | tuple):
        for place, value in enumerate(state):
            yield from _leaves(value, (*path, place))
    else:
        yield path, state


def _shown(name: object) -> str:
    return ".".join(map(str, name)) if isinstance(name, tuple) else str(name)


def _sequence_like(given: Any, parts: Any) -> Any:
    """Return a list, tuple or named tuple with other items."""
    build: Callable[..., Any] = type(given)
    return build(*parts) if hasattr(given, "_fields") else build(parts)


def _to_tensor(subject: str, value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        wrong_type(subject, "a tensor", value)
