"""Whether all ranks are about to do the same; if not, the same error on every rank."""

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
"""What has to be the same on all ranks, in words, by its name."""

T = TypeVar("T")


def agree(
    group: dist.ProcessGroup,
    stage: str,
    facts: Facts | Exception,
    own: T,
    differs_as: Callable[[str], Exception] = ValueError,
) -> list[T]:
    """Exchange what ranks are about to do, in one collective; raise on all if they do not agree.

    Where facts differ, two more collectives find out which.

    Args:
        group: the ranks. Every rank must call it, from whatever stage it is at.
        stage: what comes next, such as "plan the model".
        facts: what has to agree, or why this rank cannot go on.
        own: what else the ranks tell each other; small.
        differs_as: makes the error, of its message, where ranks differ.

    Returns:
        `own` of each rank.

    Raises:
        Exception: this rank's error, if all ranks have the same; else, on every rank alike, the
            error of the lowest rank that has one, led by its number.
        ValueError: if the ranks are at different stages; or what `differs_as` makes, if their
            facts differ. It names a rank that differs from rank 0, and in what.
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
    """Return whether every rank has this error: of `agree`, or that a rank is lost."""
    return getattr(error, "_raised_on_all_ranks", False)


def _find_difference(group: dist.ProcessGroup, stage: str, lines: Facts) -> str:
    first, rank = broadcast_object(group, stage, lines), dist.get_rank(group)
    differing = [name for name in {**first, **lines} if first.get(name) != lines.get(name)]
    own = None
    if differing:
        name = differing[0]
        own = differs(stage, rank, name, first.get(name, "nothing"), lines.get(name, "nothing"))
    elif list(first) != list(lines):
        ours, theirs = next(p for p in zip(first, lines, strict=True) if p[0] != p[1])
        own = differs(stage, rank, "the order", ours, theirs)
    found = gather_objects(group, stage, own)
    return next((text for text in found if text is not None), f"Ranks differ: {stage}.")


def differs(stage: str, rank: int, name: str, first: str, own: str) -> str:
    """Return what is wrong where a fact of a rank is not that of rank 0.

    Args:
        stage: what the ranks are to do.
        rank: which differs.
        name: of the fact.
        first: the fact on rank 0; parts set off by "; " are left out where both have them.
        own: the fact on the rank.
    """
    ours, theirs = first.split("; "), own.split("; ")
    if len(ours) == len(theirs):
        pairs = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
        first, own = ("; ".join(side) for side in zip(*pairs, strict=True))
    else:
        first = "; ".join(part for part in ours if part not in theirs) or "nothing more"
        own = "; ".join(part for part in theirs if part not in ours) or "nothing more"
    return (
        f"All ranks must {stage} from the same arguments; {name} differs: rank 0 has {_cut(first)}"
        f", rank {rank} has {_cut(own)}. Pass the same on every rank."
    )


def raise_if_facts_differ(stage: str, facts: Sequence[Facts]) -> None:
    """Raise ValueError, on every rank alike, unless all ranks have the same facts.

    Args:
        stage: what the ranks are to do.
        facts: of each rank, with the same names; all ranks have exchanged them.
    """
    for rank, own in enumerate(facts):
        for name, value in own.items():
            if value != facts[0][name]:
                raise ValueError(differs(stage, rank, name, facts[0][name], value))


def stable(value: object) -> str:
    """Return what prints the same in every process."""
    return _ADDRESS.sub("", repr(value))


def in_words(settings: object) -> str:
    """Return the fields of a dataclass, and of those in it, set off by "; ".

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
    """Return arguments in words, by their names; see `in_words`."""
    return {name: in_words(value) for name, value in arguments.items()}


def _cut(text: str, most: int = 400) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
