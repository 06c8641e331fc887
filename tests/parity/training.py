"""The same model, plan, weights and batches in TorchRec and in ours, trained for five steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.conformance.compare import train_step, upstream_of
from tests.conformance.matrix import Cell
from tests.conformance.matrix import cells as all_cells
from tests.distributed.cases import Case, shard, whole_state
from tests.parity.peer import ParityCase, parts_of, peer_batch, peer_mood, shard_peer
from tests.ranks import RankError

STEPS = range(5)
CLOSE = 1e-5

EQUAL = "equal"


def cells() -> list[Cell]:
    """Every strategy, kind, batch and optimizer on two ranks; every topology for one of them."""
    chosen = []
    for cell in all_cells():
        plain = cell.kind == "sum" and cell.batches == "one size"
        everywhere = plain and cell.optimizer in ("SGD", "RowWiseAdagrad")
        peer_has = cell.wire == "fp32" and cell.strategy != "mixed" and cell.optimizer != "none"
        if peer_has and (cell.topology == "2" or everywhere):
            chosen.append(cell)
    return chosen


def parity_case(cell: Cell) -> ParityCase:
    """The cell's case, on tables that both can place."""
    case = cell.case()
    return ParityCase(**{field.name: getattr(case, field.name) for field in fields(case)})


def described(error: BaseException) -> str:
    """Its class and first line, without the numbers of this case."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', 'N', lines[0])[:110] if lines else ''}"


def last_line(error: RankError) -> str:
    """Return the last line of a rank's error."""
    return str(error).strip().splitlines()[-1][:200]


def train_peer(
    case: Case,
    model: nn.Module,
    dense: Any,
    steps: range,
    upstream: Callable[[int, int, Tensor], Tensor],
    dense_scale: float = 1.0,
) -> list[Tensor]:
    """Trains what :func:`shard_peer` returns, by the gradient of each step and rank's output."""
    rank, outputs = dist.get_rank(), []
    for step in steps:
        if dense is not None:
            dense.zero_grad()
        batch = peer_batch(case.batches(step)[rank])
        outputs.append(train_step(model, batch, partial(upstream, step, rank), dense_scale))
        if dense is not None:
            dense.step()
    return outputs


def compare_with_peer(cell: Cell) -> str:
    """Returns ``equal``, ``differs: ...`` or the peer's exception; every rank calls it."""
    case = parity_case(cell)
    rank = dist.get_rank()
    try:
        with peer_mood():
            peer, _, dense = shard_peer(case)
            theirs = train_peer(case, peer, dense, STEPS, partial(upstream_of, case))
            their_state = peer.state_dict()
    except Exception as error:
        return f"raises: {described(error)}"
    model = shard(case)
    ours = [
        train_step(model, case.batches(step)[rank], partial(upstream_of, case, step, rank))
        for step in STEPS
    ]
    our_state = whole_state(model)
    if sorted(our_state) != sorted(their_state):
        return f"differs: names {sorted(our_state)}, the peer {sorted(their_state)}"
    for one, other in zip(ours, theirs, strict=True):
        if one.shape != other.shape:
            return "differs: shape of the output"
        if not torch.allclose(one, other, rtol=CLOSE, atol=CLOSE):
            return "differs: output"
    for name, value in their_state.items():
        for place, part in parts_of(value):
            if not torch.allclose(our_state[name][place], part, rtol=CLOSE, atol=CLOSE):
                return f"differs: {name}"
    return EQUAL


def outcome_of(by_rank: list[str]) -> str:
    """Return the worst outcome of ranks; a lost connection only follows another rank's error."""

    def severity(found: str) -> int:
        return 0 if found == EQUAL else 1 if "gloo/transport" in found else 2

    return max(by_rank, key=severity)
