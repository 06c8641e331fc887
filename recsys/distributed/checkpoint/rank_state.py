"""State of each rank in a checkpoint: data positions, random generators."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch

from recsys.base.arguments import wrong_type
from recsys.base.checked import checked
from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.checkpoint.safe_pickle import check_plain
from recsys.distributed.ranks.env import ShardingEnv


@runtime_checkable
class Stateful(Protocol):
    """An object that can save its state and continue from it.

    An object that also has `load_state_dicts(states)`, which takes the state of each saved rank,
    can continue with another number of ranks.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state."""


@final
class RandomState:
    """Random generators of a process: torch on CPU and GPU, NumPy and Python.

    With another number of ranks than saved, each rank keeps its own generators.

    Example:
        >>> state = RandomState()
        >>> saved = state.state_dict()
        >>> first = torch.rand(3)
        >>> state.load_state_dict(saved)
        >>> torch.equal(torch.rand(3), first)
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states."""
        kind, keys, *rest = np.random.get_state()  # users' code may draw from it
        states: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
            "python": random.getstate(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    @checked
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the states of the generators."""
        missing = [name for name in ("torch", "numpy", "python") if name not in state_dict]
        if missing:
            raise ValueError(
                "RandomState.load_state_dict: state_dict must be the result of state_dict(); "
                f"received one without {missing}, with {list(state_dict)}."
            )
        torch.set_rng_state(state_dict["torch"])
        kind, keys, *rest = state_dict["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        random.setstate(_tuples(state_dict["python"]))
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Do nothing: generators of other ranks are not usable."""


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def check_progress(parts: object) -> None:
    """Check that progress is a dict of objects with a state, or None.

    Raises:
        TypeError: It has another type, or an object has no state.
    """
    if parts is not None and not isinstance(parts, Mapping):
        wrong_type("progress", "a dict of objects with state_dict and load_state_dict", parts)
    for name, part in (parts or {}).items():
        if not isinstance(part, Stateful):
            raise TypeError(
                f"progress[{name!r}] must have state_dict and load_state_dict; received a "
                f"{type(part).__qualname__}."
            )


def progress_of(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the states of this rank's objects, checked to be plain data.

    Raises:
        CheckpointError: A state is not plain data.
    """
    states = {name: part.state_dict() for name, part in parts.items()}
    for name, state in states.items():
        check_plain(f"progress[{name!r}]", state)
    return states


def rank_key(rank: int) -> str:
    """Return the name of a rank's progress in a checkpoint."""
    return f"rank-{rank}"


def load_progress(
    subject: str,
    parts: Mapping[str, Stateful],
    saved: Mapping[str, dict[str, Any]],
    num_saved: int,
    env: ShardingEnv,
) -> None:
    """Load the saved states into this rank's objects.

    Args:
        subject: Name of the checkpoint in errors.
        parts: Objects by name.
        saved: States by `rank_key`: of this rank, or of all saved ranks if their number differs.
        num_saved: Number of saved ranks.
        env: The current ranks.

    Raises:
        CheckpointError: An object was not saved, or cannot continue with another number of ranks.
    """
    for name, part in parts.items():
        if not saved or any(name not in of_rank for of_rank in saved.values()):
            raise CheckpointError(
                f"{subject} has no progress {name!r}. Leave it out of progress=, or pass "
                "allow_partial=True to continue without."
            )
        if num_saved == env.world_size:
            part.load_state_dict(saved[rank_key(env.rank)][name])
            continue
        load = getattr(part, "load_state_dicts", None)
        if load is None:
            raise CheckpointError(
                f"{subject} has the progress {name!r} of {num_saved} ranks; received "
                f"{env.world_size} ranks, and a {type(part).__qualname__} without "
                "load_state_dicts(states). Leave it out of progress=, or define this method."
            )
        load([saved[rank_key(rank)][name] for rank in range(num_saved)])
