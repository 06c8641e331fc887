"""Faults of a case, the functions that make them, and the expected errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardMetadata,
)
from recsys.sparse import KeyedJaggedTensor
from tests.fuzz.cases import Case, draw

Stage = Literal["batch", "configs", "plan", "model", "rates", "save", "data", "scaler"]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        `stage`: of the case, at which the fault is made.
        `make`: the function that makes it: changes its argument, or returns another one.
        `says`: a pattern of the error; None: there is no error, and the result must be right.
        `on_all`: True if the fault is on every rank, not on one.
        `wanted`: settings that the case must have.
    """

    stage: Stage
    make: Callable[..., Any]
    says: str | None
    on_all: bool = False
    wanted: dict[str, object] = field(default_factory=dict)


def _rebuilt(kjt: KeyedJaggedTensor, **changes: Any) -> KeyedJaggedTensor:
    """Return the same batch except for `changes`; lengths take the place of offsets."""
    variable = kjt.variable_stride_per_key()
    parts: dict[str, Any] = {
        "keys": kjt.keys(),
        "values": kjt.values(),
        "weights": kjt.weights_or_none(),
        "lengths": None if "offsets" in changes else kjt.lengths(),
        "stride_per_key": kjt.stride_per_key() if variable else None,
        "inverse_indices": kjt.inverse_indices_or_none(),
    }
    return KeyedJaggedTensor(**(parts | changes))


def _negative_length(kjt: KeyedJaggedTensor) -> object:
    lengths = kjt.lengths().clone()
    lengths[0] += 1 + lengths[1]
    lengths[1] = -1
    return _rebuilt(kjt, lengths=lengths)


def _decreasing_offsets(kjt: KeyedJaggedTensor) -> object:
    offsets = kjt.offsets().clone()
    offsets[1] = 900_000
    return _rebuilt(kjt, offsets=offsets)


def _with_id(bad: int) -> Callable[[KeyedJaggedTensor], object]:
    def make(kjt: KeyedJaggedTensor) -> object:
        lengths = torch.zeros_like(kjt.lengths())
        at = 0
        for key, stride in zip(kjt.keys(), kjt.stride_per_key(), strict=True):
            lengths[at] = 0 if key == "unread" else 1
            at += stride
        values = torch.full((int(lengths.sum()),), bad, dtype=kjt.values().dtype)
        weights = kjt.weights_or_none()
        return _rebuilt(
            kjt,
            values=values,
            lengths=lengths,
            weights=None if weights is None else torch.ones(values.numel()),
        )

    return make


def _without_first(kjt: KeyedJaggedTensor) -> object:
    return KeyedJaggedTensor(
        ["other"], kjt.values()[:1], lengths=torch.tensor([min(1, kjt.values().numel())])
    )


def _with_inverse(bad: int) -> Callable[[KeyedJaggedTensor], object]:
    def make(kjt: KeyedJaggedTensor) -> object:
        keys, rows = kjt.inverse_indices()
        rows = torch.full((len(keys), rows.shape[1] + 1), 0, dtype=torch.int64)
        rows[0, -1] = bad
        return _rebuilt(kjt, inverse_indices=(keys, rows))

    return make


def _first(**changes: Any) -> Callable[[list[dict[str, Any]]], Any]:
    def make(configs: list[dict[str, Any]]) -> Any:
        configs[0].update(changes)
        return configs

    return make


def _by_name(configs: list[dict[str, Any]]) -> Any:
    for config in configs:
        if "pooling" in config:
            config["pooling"] = config["pooling"].name.lower()
    return configs


def _other_shape(configs: list[dict[str, Any]]) -> Any:
    configs[0]["num_embeddings"] += 50
    return configs


def _without_a_table(plan: EmbeddingModuleShardingPlan) -> None:
    del plan[next(iter(plan))]


def _elsewhere(plan: EmbeddingModuleShardingPlan) -> None:
    name = next(iter(plan))
    kind = "data_parallel" if plan[name].sharding_type != "data_parallel" else "table_wise"
    plan[name] = ParameterSharding(kind, "dense", [0], None)
    if kind == "table_wise":
        plan[name] = _sharded([[0, 0]], [[1, 1]], [0])


def _sharded(offsets: list[Any], sizes: list[Any], ranks: Any) -> ParameterSharding:
    shards = [
        ShardMetadata(shard_offsets=o, shard_sizes=s, placement="rank:0/cpu")
        for o, s in zip(offsets, sizes, strict=True)
    ]
    return ParameterSharding("table_wise", "fused", ranks, EnumerableShardingSpec(shards))


def _of_first(**given: Any) -> Callable[[EmbeddingModuleShardingPlan], None]:
    def make(plan: EmbeddingModuleShardingPlan) -> None:
        plan[next(iter(plan))] = _sharded(**given)

    return make


def _tie(model: nn.Module, tables: nn.Module) -> None:
    table = next(iter(tables.values()))  # type: ignore[operator]
    model.tied = nn.Linear(1, 1, bias=False)
    model.tied.weight = table.weight  # type: ignore[union-attr, assignment]


def _rate(value: float) -> Callable[[list[dict[str, Any]]], None]:
    def make(groups: list[dict[str, Any]]) -> None:
        for group in groups:
            group["lr"] = value

    return make


def _nothing(*_: Any) -> None:
    """The stage itself is the fault."""


def _generator(configs: list[Any]) -> Any:
    return (config for config in configs)


_SEVERAL = {"world": 2, "variable": False}
_ONE_TYPE = r"(TypeError|ValueError): "
FAULTS: dict[str, Fault] = {
    "negative length": Fault(
        "batch", _negative_length, "lengths must not be negative", wanted={"variable": False}
    ),
    "offsets outside": Fault(
        "batch", _decreasing_offsets, "offsets must not decrease", wanted={"variable": False}
    ),
    "wrong sum": Fault(
        "batch",
        lambda kjt: _rebuilt(kjt, lengths=kjt.lengths() + 1),
        "must add up to at most the number of values",
    ),
    "large id": Fault(
        "batch",
        _with_id(10_000),
        r"IndexError: .*Id 10000 at position \d+ of feature .* must be ",
    ),
    "negative id": Fault(
        "batch",
        _with_id(-1),
        r"IndexError: .*Id -1 at position \d+ of feature .* must be ",
    ),
    "float ids": Fault(
        "batch",
        lambda kjt: _rebuilt(kjt, values=kjt.values().float()),
        "TypeError: .*must be int32 or int64",
    ),
    "ids of two dims": Fault(
        "batch",
        lambda kjt: _rebuilt(kjt, values=kjt.values().unsqueeze(1)),
        "ValueError: .*must have one dim",
    ),
    "a missing feature": Fault(
        "batch",
        _without_first,
        "KeyError: .*lacks the features",
        wanted={"weighted": False, "variable": False},
    ),
    "a tensor for features": Fault(
        "batch",
        lambda kjt: kjt.values(),
        "TypeError: .*takes a KeyedJaggedTensor; received a tensor",
    ),
    "None for features": Fault(
        "batch", _nothing, "TypeError: .*takes a KeyedJaggedTensor; received None"
    ),
    "weights of two dims": Fault(
        "batch",
        lambda kjt: _rebuilt(kjt, weights=torch.ones(kjt.values().numel(), 2)),
        "weights must have one dim",
        wanted={"sequence": False, "weighted": True},
    ),
    "no weights": Fault(
        "batch",
        lambda kjt: _rebuilt(kjt, weights=None),
        "needs one weight per id",
        wanted={"sequence": False, "weighted": True},
    ),
    "large inverse index": Fault(
        "batch",
        _with_inverse(99),
        "inverse_indices of feature .* received 99",
        wanted={"sequence": False, "variable": True},
    ),
    "negative inverse index": Fault(
        "batch",
        _with_inverse(-1),
        "inverse_indices of feature .* received -1",
        wanted={"sequence": False, "variable": True},
    ),
    "tables by a generator": Fault("configs", _generator, None, on_all=True),
    "pooling by name": Fault("configs", _by_name, None, on_all=True, wanted={"sequence": False}),
    "features in one text": Fault(
        "configs", _first(feature_names="film"), _ONE_TYPE + ".*feature_names", on_all=True
    ),
    "rows of 10.5": Fault(
        "configs", _first(num_embeddings=10.5), _ONE_TYPE + ".*num_embeddings", on_all=True
    ),
    "rows in text": Fault(
        "configs", _first(num_embeddings="10"), _ONE_TYPE + ".*num_embeddings", on_all=True
    ),
    "dim of True": Fault(
        "configs", _first(embedding_dim=True), _ONE_TYPE + ".*embedding_dim", on_all=True
    ),
    "a range of NaN": Fault(
        "configs",
        _first(weight_init_min=float("nan")),
        "ValueError: .*weight_init_min",
        on_all=True,
    ),
    "init_fn of 3": Fault("configs", _first(init_fn=3), "TypeError: .*init_fn", on_all=True),
    "other rows on one rank": Fault(
        "configs", _other_shape, "ValueError: .*[Rr]ank", wanted=_SEVERAL
    ),
    "a plan without a table": Fault(
        "plan", _without_a_table, "ValueError: .*(lacks|miss|no sharding)", wanted=_SEVERAL
    ),
    "another plan on one rank": Fault("plan", _elsewhere, "ValueError: .*[Rr]ank", wanted=_SEVERAL),
    "a rank of -1": Fault(
        "plan", _of_first(offsets=[[0, 0]], sizes=[[1, 1]], ranks=[-1]), "ValueError: ", on_all=True
    ),
    "ranks in text": Fault(
        "plan", _of_first(offsets=[[0, 0]], sizes=[[1, 1]], ranks="0"), _ONE_TYPE, on_all=True
    ),
    "shards of one dim": Fault(
        "plan", _of_first(offsets=[[0]], sizes=[[1]], ranks=[0]), _ONE_TYPE, on_all=True
    ),
    "negative sizes": Fault(
        "plan",
        _of_first(offsets=[[0, 0]], sizes=[[-1, -1]], ranks=[0]),
        "ValueError: ",
        on_all=True,
    ),
    "shards that leave rows out": Fault(
        "plan",
        _of_first(offsets=[[0, 0]], sizes=[[100, 100]], ranks=[0]),
        "ValueError: ",
        on_all=True,
    ),
    "a tied weight": Fault("model", _tie, "ValueError: .*tied", on_all=True),
    "a rate of NaN": Fault("rates", _rate(float("nan")), "ValueError: .*(rate|lr)", on_all=True),
    "a rate of -1": Fault("rates", _rate(-1.0), "ValueError: .*(rate|lr)", on_all=True),
    "a scaled loss": Fault(
        "scaler", _nothing, "GradScaler", on_all=True, wanted={"deferred": False}
    ),
    "no batch on one rank": Fault("data", _nothing, None, wanted={**_SEVERAL, "sequence": False}),
    "extra that cannot be saved": Fault(
        "save", lambda extra: extra.update(x=_nothing), "Error: .*(extra|'x')", wanted=_SEVERAL
    ),
}


def make_case(seed: int, fault: str | None) -> Case:
    """Draws a case that the fault can be made in."""
    wanted = {} if fault is None else FAULTS[fault].wanted
    stage = None if fault is None else FAULTS[fault].stage
    while True:
        case = draw(seed, fault, **wanted)
        bags = [sum(map(len, b.bags.values())) for b in case.steps[-1]]
        # a fault of a batch needs bags to be in
        if stage != "batch" or bags[case.bad_rank] > 1:
            return case
        seed += 1_000_000
