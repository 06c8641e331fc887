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
    _hold(peer_ranks, kind="sum", batches="one size", topology="2", optimizer=optimizer)


@pytest.mark.parametrize("batches", ["one size", "size per feature"])
@pytest.mark.parametrize("kind", ["weighted mean", "sequence", "sequence, distinct ids"])
def test_lookups_are_alike(peer_ranks: PeerPool, kind: str, batches: str) -> None:
    _hold(peer_ranks, kind=kind, batches=batches, topology="2", optimizer="SGD")


def test_nodes_are_alike(peer_ranks: PeerPool) -> None:
    _hold(peer_ranks, kind="sum", batches="one size", topology="2x2", optimizer="SGD")


def _hold(peer_ranks: PeerPool, **values: str) -> None:
    chosen = [c for c in cells() if all(getattr(c, axis) == v for axis, v in values.items())]
    found = dict(zip(chosen, compare_batch(peer_ranks, chosen), strict=True))
    assert {
        str(cell): outcome
        for cell, outcome in found.items()
        if outcome != EQUAL and not why(outcome, str(cell))
    } == {}
    if values["optimizer"] in ("SGD", "Adagrad", "RowWiseAdagrad"):
        assert EQUAL in found.values()
