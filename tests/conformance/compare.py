"""One case against the unsharded model: outputs, keys, weights, gradients, states, names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.ranks.wire import CommType
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.distributed.state.table_shards import TableShards
from recsys.distributed.types import ShardingType
from recsys.optim import PartialRowWiseAdam, RowWiseAdagrad
from recsys.sparse import KeyedJaggedTensor
from tests.conformance.bounds import Bounds, bounds_of, hops_of
from tests.conformance.matrix import UNIT
from tests.distributed.cases import Case, concat_batches, shard

STEPS = range(3)
CLOSE = 1e-5
_WHOLE_COLUMNS = {ShardingType.TABLE_WISE}
_WHOLE_ROWS = {*_WHOLE_COLUMNS, ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE}


@dataclass(frozen=True, slots=True)
class Run:
    """The results of training on one process."""

    keys: list[str]
    weights: list[dict[str, Tensor]]
    """The tables before each step."""
    outputs: list[list[Tensor]]
    """Each step's outputs, split by rank."""
    upstream: list[Tensor]
    """The gradient of each step's output, of all ranks joined."""
    gradients: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    state_dict: dict[str, Tensor]


@lru_cache(maxsize=8)
def _batches(placeless: Case, step: int) -> list[KeyedJaggedTensor]:
    return placeless.batches(step)


def upstream_of(case: Case, step: int, rank: int, output: Tensor) -> Tensor:
    """The gradient of a rank's output: of either sign, from one to two units."""
    generator = torch.Generator().manual_seed(case.seed * 1000 + step * 10 + rank)
    size = 1 + torch.rand(output.shape, generator=generator)
    return UNIT * size * torch.rand(output.shape, generator=generator).sub(0.5).sign()


def train_step(
    model: nn.Module,
    batch: KeyedJaggedTensor,
    gradient: Callable[[Tensor], Tensor],
    dense_scale: float = 1.0,
) -> Tensor:
    """Trains for a step under a loss whose gradient is given; returns the output."""
    bare = getattr(model, "module", model)
    values, logits = model(batch)
    bare.over.zero_grad()
    given = gradient(values.detach())
    ((values * given).sum() + dense_scale * logits.sum()).backward()
    with torch.no_grad():
        for parameter in bare.over.parameters():
            parameter -= 0.1 * parameter.grad
    return values.detach().clone()


@lru_cache(maxsize=2)
def _unsharded(case: Case) -> Run:
    model = case.model()
    weights, outputs, upstream = [], [], []

    def gradient(output: Tensor) -> Tensor:
        """Return the gradient of the mean over ranks of their losses."""
        outputs.append([part.clone() for part in case.parts(output, step)])
        own = [upstream_of(case, step, rank, part) for rank, part in enumerate(outputs[-1])]
        upstream.append(case.join(own, step) * (1 / case.world_size))
        return upstream[-1]

    for step in STEPS:
        weights.append({n: w.detach().clone() for n, w in model.ebc.table_weights().items()})
        train_step(model, concat_batches(_batches(case, step)), gradient, 1 / case.world_size)
    return Run(
        keys=model.keys,
        weights=weights,
        outputs=outputs,
        upstream=upstream,
        gradients={n: w.grad for n, w in model.ebc.table_weights().items() if w.grad is not None},
        states=model.ebc.optimizer_states(),
        state_dict=dict(model.state_dict()),
    )


@lru_cache(maxsize=16)
def _bounds(case: Case, wire: CommType, hops: int) -> Bounds:
    run = _unsharded(case)
    found = bounds_of(replace(case, wire=wire), run.weights, run.upstream, hops)
    parts = [case.parts(output, step)[dist.get_rank()] for step, output in enumerate(found.outputs)]
    return replace(found, outputs=parts)


def _placeless(case: Case) -> Case:
    """Return the case without the settings of sharding."""
    return replace(case, types=(), node_size=None, wire=CommType.FP32, loss_scale=None)


def is_exact(case: Case) -> bool:
    """Return True if sharding promises equal bits: sums keep their order.

    Samples that share a bag add up their gradients before these are divided by the number of ranks,
    the unsharded model after; that is the same for powers of two.
    """
    row_wise = case.optimizer in (RowWiseAdagrad, PartialRowWiseAdam)
    kept = _WHOLE_COLUMNS if row_wise else _WHOLE_ROWS
    shares_bags = case.pooled and case.variable_batch and case.world_size == 3
    is_moved_only = not case.use_index_dedup and not shares_bags
    return set(case.types) <= kept and case.wire is CommType.FP32 and is_moved_only


def _local_parts(value: Tensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    if isinstance(value, ShardedTable):
        for offsets, part in value.local_shards():
            yield tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True)), part
    else:
        yield (), value


class Findings:
    """Collects differences; all ranks finish their exchanges before any raises an error."""

    def __init__(self, *, exact: bool) -> None:
        self.found: list[str] = []
        self._exact = exact

    def same(self, what: str, received: object, expected: object) -> None:
        if received != expected:
            self.found.append(f"{what}: {received}, unsharded {expected}")

    def close(
        self, what: str, received: Tensor, expected: Tensor, bound: Tensor | None = None
    ) -> None:
        """Holds parts of a whole, with the bound of a narrow wire if there is one."""
        self.same(f"shape of {what}", tuple(received.shape), tuple(expected.shape))
        if received.shape != expected.shape or not expected.numel():
            return
        allowed = 0.0 if self._exact else CLOSE * float(expected.abs().max())
        for place, part in _local_parts(received):
            whole = expected[place]
            error = (part.detach() - whole).abs()
            limit = allowed if bound is None else allowed + bound[place]
            # so that NaN fails, too
            if part.numel() and not bool((error <= limit).all()):
                self.found.append(f"{what}: off by {float(error.max()):.3g}")


def compare(case: Case) -> list[str]:
    """Train a case on this rank with the others; return the differences from the unsharded model.

    Every rank must call it.
    """
    rank = dist.get_rank()
    placeless = _placeless(case)
    expected = _unsharded(placeless)
    bounds = None
    travels = case.world_size > 1 and set(case.types) != {ShardingType.DATA_PARALLEL}
    if case.wire is not CommType.FP32 and travels:
        bounds = _bounds(placeless, case.wire, hops_of(case))
    model = shard(case)
    found = Findings(exact=is_exact(case))
    for step in STEPS:
        batch = _batches(placeless, step)[rank]
        output = train_step(model, batch, partial(upstream_of, case, step, rank))
        limit = None if bounds is None else bounds.outputs[step]
        found.close(f"output {step}", output, expected.outputs[step][rank], limit)
    found.same("keys", model.module.keys, expected.keys)
    state = model.state_dict()
    prefix = f"ebc.{model.module.ebc.tables_name}."
    found.same("state dict", list(state), list(expected.state_dict))
    for table, states in expected.states.items():
        name = f"{prefix}{table}.weight"
        limit = None if bounds is None else bounds.tables[table]
        found.close(name, state[name], expected.state_dict[name], limit)
        received = model.fused_optimizer.state_dict()["state"].get(name, {})
        found.same(f"states of {name}", sorted(received), sorted(states))
        for key in states.keys() & received.keys():
            limit = None if bounds is None else bounds.states[table][key]
            found.close(f"{key} of {name}", received[key], states[key], limit)
    _compare_gradients(model, expected, bounds, found)
    dense = Findings(exact=False)
    limit = None if bounds is None else bounds.dense.expand(3, -1)
    dense.close("over.weight", state["over.weight"], expected.state_dict["over.weight"], limit)
    dense.close("over.bias", state["over.bias"], expected.state_dict["over.bias"])
    return [f"rank {rank}: {text}" for text in found.found + dense.found]


def _compare_gradients(
    model: nn.Module, expected: Run, bounds: Bounds | None, found: Findings
) -> None:
    """Compare gradients of tables without an optimizer."""
    for path, table in model.module.ebc.named_modules():
        if not isinstance(table, TableShards) or not expected.gradients:
            continue
        name = path.rpartition(".")[2]
        for piece in table.shards:
            rect, place = piece.rect, ()
            if table.table.rects:
                place = slice(rect.row_start, rect.row_end), slice(rect.col_start, rect.col_end)
            whole = expected.gradients[name]
            limit = None if bounds is None else bounds.gradients[name][place]
            gradient = piece.parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(piece.parameter)
            found.close(f"gradient of {name}", gradient, whole[place], limit)


def compare_all(cases: list[Case]) -> list[list[str]]:
    """:func:`compare` for each of many cases of the same number of ranks."""
    return [compare(case) for case in cases]
