"""The checkpoint matrix in TorchRec, through torch.distributed.checkpoint, as its user would.

It is compared with itself: loaded values must equal the saved ones, and three more steps must equal
three steps of the run that never stopped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from recsys.distributed.types import ShardingType
from tests.conformance.checkpoints import (
    AFTER,
    BEFORE,
    Move,
    Place,
    SameSamples,
)
from tests.conformance.runner import singly_if_failed
from tests.parity.peer import (
    ParityCase,
    PeerPool,
    Slices,
    parts_of,
    peer_mood,
    shard_peer,
)
from tests.parity.training import described, last_line, train_peer
from tests.ranks import RankError

Parts = dict[str, list[tuple[Slices, Tensor]]]
TIMEOUT_S = 120.0
CANNOT_RUN = "cannot run"


class _PeerCase(ParityCase, SameSamples):
    """Tables and owners that the peer can place, samples that do not depend on the ranks."""


def _train(case: SameSamples, model: nn.Module, dense: Any, steps: range) -> list[Tensor]:
    return train_peer(case, model, dense, steps, case.upstream, float(case.world_size))


def _held(model: nn.Module, optimizer: Any) -> Parts:
    """Return this rank's parts of weights and optimizer state."""
    values = dict(model.state_dict())
    for name, states in optimizer.state_dict()["state"].items():
        for key, value in states.items():
            values[f"{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return {name: [(p, t.clone()) for p, t in parts_of(v)] for name, v in values.items()}


def save_from(place: Place, optimizer: str, path: str) -> str:
    """Train, save and train on; write the results beside the checkpoint."""
    import torch.distributed.checkpoint as dcp

    case = place.case(optimizer, _PeerCase)
    try:
        with peer_mood():
            model, optimizers, dense = shard_peer(case, crc32(str(place).encode()))
            _train(case, model, dense, BEFORE)
            halfway = _held(model, optimizers)
            state = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
            dcp.save(state, checkpoint_id=path)
            outputs = _train(case, model, dense, AFTER)
    except (Exception, CheckpointException) as error:
        return _text(CANNOT_RUN, error)
    run = {"halfway": halfway, "end": _held(model, optimizers), "outputs": outputs}
    torch.save(run, f"{path}-{dist.get_rank()}.pt")
    return "saved"


def load_into(place: Place, optimizer: str, path: str) -> str:
    """Loads and trains on; returns ``equal``, ``differs``, ``raises`` or ``cannot run``."""
    import torch.distributed.checkpoint as dcp

    case = place.case(optimizer, _PeerCase)
    with peer_mood():
        try:
            model, optimizers, dense = shard_peer(case, crc32(str(place).encode()) + 1)
        except Exception as error:
            return _text(CANNOT_RUN, error)
        try:
            state = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
            with torch.no_grad():
                for value in state["model"].values():
                    for _, part in parts_of(value):
                        part.fill_(7.0)
            dcp.load(state, checkpoint_id=path)
            model.load_state_dict(state["model"])
            optimizers.load_state_dict(state["optimizer"])
            halfway = _held(model, optimizers)
        except (Exception, CheckpointException) as error:
            return _text("raises", error)
        try:
            outputs = _train(case, model, dense, AFTER)
        except Exception as error:
            return _text(CANNOT_RUN, error)
    ranks = sorted(Path(path).parent.glob(f"{Path(path).name}-*.pt"))
    runs = [torch.load(file, weights_only=False) for file in ranks]
    for step, output in zip(AFTER, outputs, strict=True):
        whole = torch.cat([run["outputs"][step - AFTER.start] for run in runs])
        if not _near(output, case.parts(whole, step)[dist.get_rank()]):
            return f"differs: output {step}"
    return _difference(halfway, [run["halfway"] for run in runs]) or _difference(
        _held(model, optimizers), [run["end"] for run in runs]
    )


def _difference(received: Parts, expected: list[Parts]) -> str:
    names = {name for held in expected for name in held}
    if received.keys() - names:
        return f"differs: new {sorted(received.keys() - names)}"
    for name, parts in received.items():
        pieces = [piece for held in expected for piece in held.get(name, [])]
        for place, part in parts:
            if not _near(part, _whole(pieces)[place]):
                return f"differs: {name}"
    return ""


def _whole(pieces: list[tuple[Slices, Tensor]]) -> Tensor:
    if pieces[0][0] == ():
        return pieces[0][1]
    size = [max(place[dim].stop for place, _ in pieces) for dim in range(len(pieces[0][0]))]
    whole = torch.full(size, torch.nan)
    for place, part in pieces:
        whole[place] = part
    return whole


def _near(received: Tensor, expected: Tensor) -> bool:
    if received.shape != expected.shape:
        return False
    allowed = 1e-5 * float(expected.abs().max()) if expected.numel() else 0.0
    return bool(((received - expected).abs() <= allowed).all())


def _text(outcome: str, error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # of torch.distributed.checkpoint, by rank
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{outcome}: {described(error)}"


def load_into_all(places: Sequence[Place], optimizer: str, path: str) -> list[str]:
    """:func:`load_into` for many plans of the same number of ranks."""
    return [load_into(place, optimizer, path) or "equal" for place in places]


def try_moves(pool: PeerPool, moves: list[Move]) -> list[str]:
    """Makes moves from one checkpoint; returns the outcome of each.

    What cannot run on one rank is not tried on several, where some would wait for the one that
    raised.
    """
    optimizer, saved = moves[0].optimizer, moves[0].saved
    found = {m.loaded: _on_one_rank(pool, m.loaded.strategy, optimizer) for m in moves}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint"
        failed = _on_one_rank(pool, saved.strategy, optimizer) or _save(
            pool, saved, optimizer, path
        )
        if failed:
            return [failed] * len(moves)
        for world_size in sorted({place.world_size for place, known in found.items() if not known}):
            own = [p for p, known in found.items() if not known and p.world_size == world_size]
            found.update(zip(own, _load(pool, own, optimizer, path), strict=True))
        return [found[move.loaded] for move in moves]


_known: dict[tuple[ShardingType, str], str] = {}


def _on_one_rank(pool: PeerPool, strategy: ShardingType, optimizer: str) -> str:
    """Return the reason why a strategy cannot run on one rank; empty if it can."""
    if (strategy, optimizer) not in _known:
        with tempfile.TemporaryDirectory() as folder:
            place = Place(strategy=strategy, world_size=1)
            _known[strategy, optimizer] = _save(pool, place, optimizer, f"{folder}/checkpoint")
    return _known[strategy, optimizer]


def _save(pool: PeerPool, place: Place, optimizer: str, path: str) -> str:
    """Returns why it failed, if it did."""
    try:
        by_rank = pool(place.world_size, save_from, place, optimizer, path, timeout=TIMEOUT_S)
    except RankError as error:
        return f"{CANNOT_RUN}: {last_line(error)}"
    return next((text for text in by_rank if text != "saved"), "")


def _load(pool: PeerPool, own: list[Place], optimizer: str, path: str) -> list[str]:
    def work(places: Sequence[Place]) -> list[str]:
        size = places[0].world_size
        by_rank = pool(size, load_into_all, places, optimizer, path, timeout=TIMEOUT_S)
        return [
            next((text for text in found if text != "equal"), "equal")
            for found in zip(*by_rank, strict=True)
        ]

    return singly_if_failed(work, own, lambda error: f"raises: {last_line(error)}")
