"""Ours and TorchRec agree in all cases that TorchRec can run, except for explained differences.

Each test gives the number of strategies, of seven, that must be equal: an explanation alone does
not pass.
"""

from __future__ import annotations

import pytest

from tests.conformance.matrix import matching
from tests.conformance.report import why
from tests.parity.__main__ import compare_batch
from tests.parity.peer import PeerPool
from tests.parity.training import EQUAL, cells


@pytest.mark.parametrize(
    ("optimizer", "equal"), [("SGD", 7), ("Adagrad", 7), ("RowWiseAdagrad", 5)]
)
def test_strategies_train_alike(peer_ranks: PeerPool, optimizer: str, equal: int) -> None:
    found = _hold(peer_ranks, kind="sum", batches="one size", topology="2", optimizer=optimizer)
    assert found.count(EQUAL) >= equal


@pytest.mark.parametrize(
    ("kind", "batches", "equal"),
    [
        ("mean", "one size", 6),
        ("weighted sum", "one size", 7),
        ("sequence", "one size", 3),
        ("weighted sum", "size per feature", 3),
    ],
)
def test_lookups_are_alike(peer_ranks: PeerPool, kind: str, batches: str, equal: int) -> None:
    found = _hold(peer_ranks, kind=kind, batches=batches, topology="2", optimizer="SGD")
    assert found.count(EQUAL) >= equal


def test_nodes_are_alike(peer_ranks: PeerPool) -> None:
    found = _hold(peer_ranks, kind="sum", batches="one size", topology="2x2", optimizer="SGD")
    assert found.count(EQUAL) >= 7


def _hold(peer_ranks: PeerPool, **values: str) -> list[str]:
    chosen = matching(cells(), values)
    found = compare_batch(peer_ranks, chosen)
    assert {
        str(cell): outcome
        for cell, outcome in zip(chosen, found, strict=True)
        if outcome != EQUAL and not why(outcome, str(cell))
    } == {}
    return found
