"""The bounds of narrow wires are worth something: faults, and coarser wires, exceed them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
from torch import Tensor

from recsys.distributed.ranks.wire import CommType, WireFormat
from tests.conformance import compare as comparison
from tests.conformance.compare import compare
from tests.conformance.matrix import OPTIMIZERS, Cell
from tests.distributed.cases import Case, shard
from tests.ranks import RankPool


def _case(
    wire: str,
    optimizer: str = "SGD",
    strategy: str = "row_wise",
    kind: str = "sum",
    topology: str = "2",
) -> Case:
    return Cell(
        topology=topology,
        kind=kind,
        batches="one size",
        optimizer=optimizer,
        strategy=strategy,
        wire=wire,
    ).case()


def _compare_sharded_as(case: Case, other: Case) -> list[str]:
    with mock.patch.object(comparison, "shard", return_value=shard(other)):
        return compare(case)


def _differ(ranks: RankPool, case: Case, other: Case) -> list[str]:
    return [text for found in ranks(2, _compare_sharded_as, case, other) for text in found]


@pytest.mark.parametrize("strategy", ["row_wise", "table_wise", "column_wise"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_forgotten_loss_scale_exceeds_them(ranks: RankPool, optimizer: str, strategy: str) -> None:
    case = _case("fp16", optimizer, strategy)
    assert not _differ(ranks, case, case)
    assert _differ(ranks, case, replace(case, loss_scale=None))


@pytest.mark.parametrize("kind", ["sum", "weighted mean", "sequence"])
@pytest.mark.parametrize(("wire", "coarser"), [("fp16", "bf16"), ("bf16", "fp8"), ("bf16", "int8")])
def test_coarser_wires_exceed_them(ranks: RankPool, kind: str, wire: str, coarser: str) -> None:
    case = _case(wire, kind=kind)
    found = _differ(ranks, case, replace(case, wire=CommType(coarser)))
    assert any("output 0" in text for text in found)
    assert any("weight:" in text for text in found)


@contextmanager
def _fault(of_decoded: Callable[[Tensor], Tensor]) -> Iterator[None]:
    original = WireFormat.decode

    def decode(self: WireFormat, encoded: Tensor, sizes: list[int], out: Tensor | None) -> Tensor:
        decoded = original(self, encoded, sizes, out)
        return decoded.copy_(of_decoded(decoded))

    with mock.patch.object(WireFormat, "decode", decode):
        yield


def _compare_with_values_moved(case: Case) -> list[str]:
    with _fault(lambda values: values.roll(1)):
        return compare(case)


@pytest.mark.parametrize("wire", ["fp16", "bf16", "fp8", "int8"])
def test_moved_values_exceed_them(ranks: RankPool, wire: str) -> None:
    found = ranks(2, _compare_with_values_moved, _case(wire))
    assert any(found)


def _compare_with_each_way_halved(case: Case) -> list[list[str]]:
    """First without a fault; then with one on each of the ways of a step."""
    ways, found = range(4), [compare(case)]  # two hops forward, two backward
    for faulty in ways:
        way = itertools.cycle(ways)
        with _fault(lambda values, way=way, faulty=faulty: values / (1 + (next(way) == faulty))):
            found.append(compare(case))
    return found


@pytest.mark.parametrize("wire", ["fp16", "bf16", "fp8", "int8"])
def test_halved_values_of_each_of_two_hops_exceed_them(ranks: RankPool, wire: str) -> None:
    # of this seed, whose tables are wide enough for a way's fault to stand out
    case = replace(_case(wire, strategy="grid_shard", topology="2x2"), seed=3)
    right, *wrong = zip(*ranks(4, _compare_with_each_way_halved, case), strict=True)
    assert not any(right)
    assert all(map(any, wrong))
