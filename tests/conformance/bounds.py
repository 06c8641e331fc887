"""Bounds on the errors of a narrow wire in the tables, the outputs and the optimizer's state.

A value x that is sent arrives with an error of at most ``relative |x| + of_largest m``. There m is
the largest magnitude that is sent with it (the table in ``recsys/distributed/ranks/wire.py``). A
sample, or a row, receives a sum of such values with known weights, so its error is at most the same
sum over the bounds: a second collection computes it, with bounds in place of weights. The loss is
linear, so that the gradients of later steps do not depend on the errors of earlier ones.

An optimizer turns an error E of a row's gradients into one of its weights. SGD multiplies it by the
learning rate. The others step by ``lr n / (d + eps)``. There n is a mean of the gradients so far,
or the last one. The divisor d is a root of a sum or mean of their squares: a norm, which moves by
at most C, the sum of E over the steps. Then

    |step error| <= lr (|n's error| + |n| / (d + eps) |d's error|) / eps

and ``|n| / (d + eps)`` is at most 1.01 for elementwise optimizers (Cauchy-Schwarz over three
steps). For row-wise ones d is a mean over the row: there ``|n| |d's error| / (d + eps)`` is at most
1.01 times the length of the row of C.

All bounds hold up to rounding in fp32, for which the comparison allows 1e-5 of the largest value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recsys.distributed.ranks.wire import CommType
from recsys.distributed.types import ShardingType
from recsys.modules.embedding_configs import PoolingType
from recsys.optim import PartialRowWiseAdam, RowWiseAdagrad
from recsys.sparse import KeyedJaggedTensor
from tests.conformance.matrix import UNIT
from tests.distributed.cases import Case, Model, concat_batches, samples_of

# rows that are split within a node are added up there, also rows of a row-wise table
_TWO_HOPS = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


@dataclass(frozen=True, kw_only=True, slots=True)
class WireError:
    """The most that one value loses on its way."""

    relative: float
    of_largest: float

    def after(self, hops: int) -> WireError:
        """The most that it loses on several ways, one after the other."""
        return WireError(
            relative=(1 + self.relative) ** hops - 1,
            of_largest=self.of_largest * hops * 1.02 * (1 + self.relative),
        )


_FORWARD = {
    CommType.FP16: WireError(relative=2**-11, of_largest=2**-24),
    CommType.BF16: WireError(relative=2**-8, of_largest=0),
    CommType.FP8: WireError(relative=2**-4, of_largest=2**-18),
    CommType.INT8: WireError(relative=0, of_largest=1 / 254),
}
_BACKWARD = _FORWARD | {
    # 2^-25 over the loss scale of 2^12, in gradients of up to 2^-19
    CommType.FP16: WireError(relative=2**-11, of_largest=2**-18),
    CommType.FP8: WireError(relative=2**-3, of_largest=2**-32),
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Errors allowed: of outputs by step; of the rest by table, at the end."""

    outputs: list[Tensor]
    tables: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    gradients: dict[str, Tensor]
    dense: Tensor
    """A bound for each row of the dense layer."""


def hops_of(case: Case) -> int:
    """Return the largest number of roundings of a value between its table and its sample."""
    crosses = case.node_size is not None and 1 < case.node_size < case.world_size
    return 2 if crosses and any(kind in _TWO_HOPS for kind in case.types) else 1


def bounds_of(
    case: Case, weights: list[dict[str, Tensor]], upstream: list[Tensor], hops: int
) -> Bounds:
    """The bounds of a run.

    Args:
        case: the run, with its wire.
        weights: the unsharded tables before each step.
        upstream: the gradient of each step's output, of all ranks together.
        hops: :func:`hops_of` the case.
    """
    forward, backward = _FORWARD[case.wire].after(hops), _BACKWARD[case.wire].after(hops)
    lr, eps = (dict(case.hyperparameters).get(name, 0.0) for name in ("lr", "eps"))
    pool, add_up = _Pool(case, case.pooling), _Pool(case, PoolingType.SUM)
    off = {name: torch.zeros_like(table) for name, table in weights[0].items()}
    sums, squares = dict(off), dict(off)
    outputs, dense = [], torch.zeros(upstream[0].shape[1])
    for step, gradient in enumerate(upstream):
        batch = concat_batches(case.batches(step))
        magnitude = {name: table.abs() + off[name] for name, table in weights[step].items()}
        largest = float(add_up(magnitude, batch).max()) if gradient.numel() else 0.0
        parts = case.world_size
        error = pool({n: off[n] + forward.relative * m for n, m in magnitude.items()}, batch)
        outputs.append(error + forward.of_largest * parts * largest)
        dense += 0.1 * outputs[-1].sum(0) / case.world_size
        signed = pool.backward(batch, gradient)
        absolute = pool.backward(batch, gradient.abs())
        counted = add_up.backward(batch, torch.full_like(gradient, 1 / case.world_size))
        largest = 2 * UNIT * _shared_by(case, step)
        for name in off:
            lost = backward.relative * absolute[name]
            lost = lost + backward.of_largest * largest * counted[name]
            sums[name] = sums[name] + lost
            squares[name] = squares[name] + 2 * signed[name].abs() * lost + lost * lost
            off[name] = off[name] + lr * _step_error(case, lost, sums[name], eps)
    return Bounds(outputs, off, {n: _states(case, sums[n], squares[n]) for n in off}, sums, dense)


def _step_error(case: Case, lost: Tensor, sums: Tensor, eps: float) -> Tensor:
    if not eps:
        return lost
    if case.optimizer in (RowWiseAdagrad, PartialRowWiseAdam):
        return (sums + 1.01 * sums.norm(dim=1, keepdim=True)) / eps
    return 2.01 * sums / eps


def _states(case: Case, sums: Tensor, squares: Tensor) -> dict[str, Tensor]:
    """Return bounds by state name; means of gradients and squares have weights of at most 1."""
    if case.optimizer in (RowWiseAdagrad, PartialRowWiseAdam):
        squares = squares.mean(1)
    return {
        "sum": squares,
        "exp_avg": 0.1 * sums,
        "exp_avg_sq": 0.0011 * squares,
        "step": torch.zeros(()),
    }


def _shared_by(case: Case, step: int) -> int:
    """Return the largest number of gradients that are added up before the exchange."""
    batches = case.batches(step)
    if case.pooled and case.variable_batch:
        return max(samples_of(batch) for batch in batches)
    if case.use_index_dedup:
        found = [jagged.values() for batch in batches for jagged in batch.to_dict().values()]
        return max((int(ids.long().bincount().max()) for ids in found if ids.numel()), default=1)
    return 1


class _Pool:
    """The sums that a collection takes, of any tables and gradients."""

    def __init__(self, case: Case, pooling: PoolingType | None) -> None:
        self._model = Model(replace(case, pooling=pooling))
        self._tables = self._model.ebc.table_weights()

    def __call__(self, tables: dict[str, Tensor], batch: KeyedJaggedTensor) -> Tensor:
        with torch.no_grad():
            for name, values in tables.items():
                self._tables[name].copy_(values)
            return self._model(batch)[0]

    def backward(self, batch: KeyedJaggedTensor, gradient: Tensor) -> dict[str, Tensor]:
        output, _ = self._model(batch)
        found = torch.autograd.grad(output, list(self._tables.values()), gradient)
        return dict(zip(self._tables, found, strict=True))
