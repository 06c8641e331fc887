"""Checks and mends taken out again, one at a time: the fuzzer must find each to be missing."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

Patches = Sequence[AbstractContextManager[Any]]


def _instead(path: str, new: Any) -> AbstractContextManager[Any]:
    """Puts something in the place of a module's member, given as ``module:member``."""
    module, _, member = path.partition(":")
    owner: Any = importlib.import_module(f"recsys.{module}")
    *classes, name = member.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return mock.patch.object(owner, name, new)


def _rewritten(path: str, old: str, new: str) -> AbstractContextManager[Any]:
    """Puts another text in the place of a part of a function's."""
    module, _, member = path.partition(":")
    owner: Any = importlib.import_module(f"recsys.{module}")
    scope = vars(owner)
    *classes, name = member.split(".")
    for part in classes:
        owner = getattr(owner, part)
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert old in source, f"{path} has no {old!r} any more"
    made: dict[str, Any] = {}
    exec(
        compile(f"from __future__ import annotations\n{source.replace(old, new)}", path, "exec"),
        scope,
        made,
    )
    return mock.patch.object(owner, name, made[name])


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A check that finds nothing."""


def _no_bad_ids(values: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.zeros_like(values, dtype=torch.bool)


def _unchecked_parts(features: Any, *args: Any, **kwargs: Any) -> Any:
    return features.parts()


def _as_given(subject: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


def _iterated(owner: str, configs: Any, kind: type) -> Any:
    for _ in configs:  # a generator then has nothing left
        pass
    return configs


def _alone(env: Any, what: str, work: Callable[[], Any]) -> list[Any]:
    """Do work without sharing its errors with other ranks."""
    result = [work()] * env.world_size
    if env.world_size > 1:
        torch.distributed.all_gather_object(result, result[0], group=env.process_group)
    return result


def _do_not_compare(group: Any, stage: str, facts: Any, own: Any, *args: Any) -> list[Any]:
    if isinstance(facts, Exception):
        raise facts
    return [own] * group.size()


def _without_a_first(self: Any, batch: Any, *, has_batch: bool, error: Exception | None) -> Any:
    if error is not None:
        raise error
    if not has_batch:
        raise ValueError("EvenBatches needs at least one batch")
    return batch


UNDONE: dict[str, Callable[[], Patches]] = {
    "lengths are checked": lambda: [_instead("sparse.validate:check_lengths", _nothing)],
    "inverse indices are checked": lambda: [
        _instead("sparse.validate:check_inverse_contents", _nothing)
    ],
    "features are looked at": lambda: [
        _instead("distributed.stages.input_dist:check_features", _unchecked_parts),
        _instead("modules.tables.table_lookups:check_features", _nothing),
    ],
    "ids are checked": lambda: [_instead("modules.tables.batch_checker:find_bad_ids", _no_bad_ids)],
    "ranks agree on what they build": lambda: [
        _instead("distributed.ranks.build_transaction:agree", _do_not_compare)
    ],
    "narrow tables are laid out": lambda: [
        _rewritten(
            "distributed.stages.column_gather:PooledRows.pack",
            "reshape(-1)",
            "view(-1)",
        )
    ],
    "numbers of configs are whole": lambda: [
        _instead("modules.embedding_configs:whole", _as_given)
    ],
    "feature names are a list": lambda: [
        _instead(
            "modules.embedding_configs:names", lambda subject, value, *args, **kwargs: list(value)
        )
    ],
    "tables may be a generator": lambda: [
        _instead("modules.embedding_bag_collection:check_tables", _iterated),
        _instead("modules.embedding_collection:check_tables", _iterated),
    ],
    "tied weights are refused": lambda: [
        _instead("distributed.shard:check_untied", _nothing),
        _instead("distributed.sharded.collection:check_untied", _nothing),
    ],
    "rates are checked": lambda: [
        _instead("optim.fused:finite", lambda subject, value, **kwargs: value)
    ],
    "a scaled loss is refused": lambda: [_instead("optim.grad_scaler:check_scaled_loss", _nothing)],
    "ranks without data take part": lambda: [
        _instead("distributed.train_pipeline.even_batches:EvenBatches._first", _without_a_first)
    ],
    "saving fails on all": lambda: [_instead("distributed.checkpoint.save:on_every_rank", _alone)],
}
"""The patches that remove a check, by its name."""
