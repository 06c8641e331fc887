"""Cross-rank consistency checks and errors: raises the same error on all ranks."""

from __future__ import annotations

import builtins
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import NoReturn, TypeAlias, TypeVar

import torch.distributed as dist

from recsys.base.arguments import MissingKeyError
from recsys.base.contact import LostContactError
from recsys.distributed.ranks.comm import broadcast_object, gather_objects, set_context
from recsys.distributed.ranks.env import ShardingEnv

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
    difference = _compare_facts(stage, dist.get_rank(group), first, lines)
    differences = gather_objects(group, stage, difference)
    return next((text for text in differences if text is not None), f"Ranks differ: {stage}.")


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
    for rank, rank_facts in enumerate(facts):
        if (text := _compare_facts(stage, rank, facts[0], rank_facts)) is not None:
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
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        text = in_words(value)
        shown = value.name if isinstance(value, Enum) else text
        parts.append(text if is_dataclass(value) else f"{setting.name} {shown}")
    return "; ".join(parts)


def in_words_by_name(**arguments: object) -> dict[str, str]:
    """Return the texts of arguments by name; see `in_words`."""
    return {name: in_words(value) for name, value in arguments.items()}


def _truncate(text: str, most: int = 400) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


# -- errors of one rank, raised on all ranks -------------------------------------------------------


def raise_together(env: ShardingEnv, what: str, error: Exception | None) -> None:
    """Raise the same error on every rank if any rank has one.

    Every rank must call it. The error of the lowest failing rank is raised; its message starts with
    that rank's number.

    Args:
        env: The ranks.
        what: Action in messages, such as "load a state dict".
        error: This rank's error, or None.
    """
    if isinstance(error, LostContactError):
        raise error
    for rank, failure in enumerate(gather_objects(env.process_group, what, failure_of(error))):
        if failure is not None:
            raise_failure(rank, failure, error)


_caller_handles_errors: ContextVar[bool] = ContextVar("caller_handles_errors", default=False)


def caller_handles_errors() -> AbstractContextManager[None]:
    """Disable error propagation in `run_on_all_ranks`; the caller handles it."""
    return set_context(_caller_handles_errors, True)


def run_on_all_ranks(env: ShardingEnv, what: str, work: Callable[[], T]) -> T:
    """Call a function on every rank, and raise an error of one rank on all ranks.

    Args:
        env: The ranks; each must call it.
        what: Action in messages, such as "load a state dict".
        work: The function.
    """
    if env.world_size == 1 or _caller_handles_errors.get():
        return work()
    result, error = None, None
    try:
        result = work()
    except Exception as raised:  # any error: the other ranks would continue otherwise
        error = raised
    raise_together(env, what, error)
    return result  # type: ignore[return-value]  # no error: it is one


Failure: TypeAlias = tuple[str, str]
"""An error in an exchange: the name of its type, and its message."""


def failure_of(error: Exception | None) -> Failure | None:
    """Return an error in the form that is sent to other ranks."""
    if error is None:
        return None
    known = (kind for kind in type(error).__mro__ if _kind_of(kind.__name__) is kind)
    return next(known).__name__, text_of(error)


def raise_failure(rank: int, failure: Failure, cause: Exception | None) -> NoReturn:
    """Raise a rank's error, with the rank's number at its start.

    Args:
        rank: The failed rank.
        failure: Its error.
        cause: This rank's own error, or None.
    """
    name, text = failure
    text = f"On rank {rank}: {text}"
    kind = _kind_of(name)
    try:
        error = (MissingKeyError if kind is KeyError else kind)(text)
    except TypeError:  # a type with further arguments
        error = RuntimeError(text)
    error._of_rank = rank  # type: ignore[attr-defined]  # a watchdog shows the traceback of this rank
    raise error from cause


def _kind_of(name: str) -> type[Exception]:
    """Return the error type of this name, from Python or derived from its ValueError."""
    ours = {kind.__name__: kind for kind in ValueError.__subclasses__()}
    kind = getattr(builtins, name, ours.get(name))
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError


def text_of(error: Exception) -> str:
    """Return the message of an error, or the name of its type if it has none."""
    if isinstance(error, KeyError) and error.args:  # str() would quote it
        return str(error.args[0])
    return str(error) or type(error).__name__
