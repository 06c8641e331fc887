"""Ours and TorchRec agree wherever TorchRec can run, but for differences that are explained."""

from __future__ import annotations

import pytest

from tests.conformance.matrix import OPTIMIZERS
from tests.conformance.report import why
from tests.parity.__main__ import compare_batch
from tests.parity.peer import PeerPool
from tests.parity.training import EQUAL, cells


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "none"])
def test_strategies_train_alike(peer_ranks: PeerPool, optimizer: str) -> None:
    found = _hold(peer_ranks, kind="sum", batches="one size", topology="2", optimizer=optimizer)
    assert found.count(EQUAL) >= {"SGD": 7, "Adagrad": 7, "RowWiseAdagrad": 5}.get(optimizer, 0)


@pytest.mark.parametrize("batches", ["one size", "size per feature"])
@pytest.mark.parametrize("kind", ["weighted mean", "sequence", "sequence, distinct ids"])
def test_lookups_are_alike(peer_ranks: PeerPool, kind: str, batches: str) -> None:
    _hold(peer_ranks, kind=kind, batches=batches, topology="2", optimizer="SGD")


def test_nodes_are_alike(peer_ranks: PeerPool) -> None:
    _hold(peer_ranks, kind="sum", batches="one size", topology="2x2", optimizer="SGD")


def _hold(peer_ranks: PeerPool, **values: str) -> list[str]:
    chosen = [c for c in cells() if all(getattr(c, axis) == v for axis, v in values.items())]
    found = compare_batch(peer_ranks, chosen)
    assert {
        str(cell): outcome
        for cell, outcome in zip(chosen, found, strict=True)
        if outcome != EQUAL and not why(outcome, str(cell))
    } == {}
    return found
