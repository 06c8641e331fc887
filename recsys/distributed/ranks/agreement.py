"""Cross-rank consistency check: raises the same error on all ranks on a mismatch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TypeVar

import torch.distributed as dist

from recsys.distributed.ranks.comm import (
    broadcast_object,
    failure_of,
    gather_objects,
    raise_failure,
)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

Facts = Mapping[str, str]
"""Texts that must be the same on all ranks, by name."""

T = TypeVar("T")


def agree(
    group: dist.ProcessGroup,
    stage: str,
    facts: Facts | Exception,
    own: T,
    differs_as: Callable[[str], Exception] = ValueError,
) -> list[T]:
    """Compare the ranks' next actions in one collective; raise on all ranks if they differ.

    If facts differ, two more collectives find the difference.

    Args:
        group: The ranks. Every rank must call it, from any stage.
        stage: Next action, such as "plan the model".
        facts: Facts that must be equal, or the error of this rank.
        own: Further small value to exchange.
        differs_as: Converts the message to an error if ranks differ.

    Returns:
        `own` of each rank.

    Raises:
        Exception: This rank's error, if all ranks have the same; otherwise, on every rank, the
            error of the lowest rank that has one, with the rank's number.
        ValueError: The ranks are at different stages, or have different facts (an error of
            `differs_as`). It names the fact and a rank that differs from rank 0.
    """
    error = facts if isinstance(facts, Exception) else None
    lines = {} if isinstance(facts, Exception) else dict(facts)
    text = "\0".join(part for line in lines.items() for part in line)
    digest = hashlib.sha256(text.encode()).hexdigest()
    report = (stage, failure_of(error), digest, own)
    seen = gather_objects(group, stage, report)
    try:
        if error is not None and len({failure for _, failure, _, _ in seen}) == 1:
            raise error
        for rank, (_, failure, _, _) in enumerate(seen):
            if failure is not None:
                raise_failure(rank, failure, error)
        for rank, (other, _, _, _) in enumerate(seen):
            if other != seen[0][0]:
                raise ValueError(
                    f"All ranks must take the same steps; rank 0 is to {seen[0][0]}, rank {rank} "
                    f"to {other}. Pass the same arguments on every rank."
                )
        if len({digest for _, _, digest, _ in seen}) > 1:
            raise differs_as(_find_difference(group, stage, lines))
    except Exception as shared:
        shared._raised_on_all_ranks = True  # type: ignore[attr-defined]
        raise
    return [value for _, _, _, value in seen]


def is_raised_on_all(error: BaseException) -> bool:
    """Return whether every rank has this error: an error of `agree`, or a lost rank."""
    return getattr(error, "_raised_on_all_ranks", False)


def _find_difference(group: dist.ProcessGroup, stage: str, lines: Facts) -> str:
    first = broadcast_object(group, stage, lines)
    own = _compare_facts(stage, dist.get_rank(group), first, lines)
    found = gather_objects(group, stage, own)
    return next((text for text in found if text is not None), f"Ranks differ: {stage}.")


def _compare_facts(stage: str, rank: int, first: Facts, own: Facts) -> str | None:
    """Return the message for the first difference between two ranks' facts, or None."""
    for name in {**first, **own}:
        if first.get(name) != own.get(name):
            return differs(stage, rank, name, first.get(name, "nothing"), own.get(name, "nothing"))
    for ours, theirs in zip(first, own, strict=True):
        if ours != theirs:
            return differs(stage, rank, "the order", ours, theirs)
    return None


def differs(stage: str, rank: int, name: str, first: str, own: str) -> str:
    """Return the message for a fact that differs from rank 0.

    Args:
        stage: Action of the ranks.
        rank: The rank that differs.
        name: Name of the fact.
        first: The fact on rank 0. Parts separated by "; " are omitted if both ranks have them.
        own: The fact on the rank.
    """
    ours, theirs = first.split("; "), own.split("; ")
    if len(ours) == len(theirs):
        pairs = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
        first, own = ("; ".join(side) for side in zip(*pairs, strict=True))
    else:
        first = "; ".join(part for part in ours if part not in theirs) or "nothing more"
        own = "; ".join(part for part in theirs if part not in ours) or "nothing more"
    return (
        f"All ranks must {stage} from the same arguments; {name} differs: rank 0 has "
        f"{_truncate(first)}, rank {rank} has {_truncate(own)}. Pass the same on every rank."
    )


def raise_if_facts_differ(stage: str, facts: Sequence[Facts]) -> None:
    """Raise ValueError, the same on every rank, unless all ranks have the same facts.

    Args:
        stage: Action of the ranks.
        facts: Exchanged facts of each rank, with the same names.
    """
    for rank, own in enumerate(facts):
        if (text := _compare_facts(stage, rank, facts[0], own)) is not None:
            raise ValueError(text)


def stable(value: object) -> str:
    """Return a text that is the same in every process."""
    return _ADDRESS.sub("", repr(value))


def in_words(settings: object) -> str:
    """Return the fields of a dataclass, and of nested ones, separated by "; ".

    Example:
        >>> from recsys.distributed.types import CacheParams
        >>> in_words(CacheParams(load_factor=0.1)).split("; ")[:2]
        ['algorithm None', 'load_factor 0.1']
    """
    if not is_dataclass(settings):
        return stable(settings)
    parts = []
    for own in fields(settings):
        value = getattr(settings, own.name)
        text = in_words(value)
        shown = value.name if isinstance(value, Enum) else text
        parts.append(text if is_dataclass(value) else f"{own.name} {shown}")
    return "; ".join(parts)


def in_words_by_name(**arguments: object) -> dict[str, str]:
    """Return the texts of arguments by name; see `in_words`."""
    return {name: in_words(value) for name, value in arguments.items()}


def _truncate(text: str, most: int = 400) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
