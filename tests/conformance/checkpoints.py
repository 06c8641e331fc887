"""Checkpoints between any two plans: a model saved under one plan trains on under another.

Runs on all numbers of ranks see the same samples, so that all are compared with one unsharded run
that never stopped: after loading, and after three more steps.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.types import ShardingType
from recsys.optim import Adam, RowWiseAdagrad
from recsys.sparse import KeyedJaggedTensor
from tests.conformance.compare import Findings, train_step
from tests.conformance.matrix import UNIT
from tests.distributed.cases import FEATURES, Case, concat_batches, shard
from tests.ranks import RankPool

BEFORE, AFTER = range(3), range(3, 6)
WORLD_SIZES = (1, 2, 3, 4)
OPTIMIZERS = {"RowWiseAdagrad": RowWiseAdagrad, "Adam": Adam}
_SAMPLES = 12


class SameSamples(Case):
    """A case whose samples and loss do not depend on the number of ranks."""

    is_weighted = False

    def batches(self, step: int) -> list[KeyedJaggedTensor]:
        generator = torch.Generator().manual_seed(self.seed * 91 + step)
        rows = {
            f: min([c.num_embeddings for c in self.configs() if f in c.feature_names] + [30])
            for f in FEATURES
        }
        lengths = torch.randint(0, 4, (len(FEATURES), _SAMPLES), generator=generator)
        ids = [
            torch.randint(0, rows[f], (int(n.sum()),), generator=generator).split(n.tolist())
            for f, n in zip(FEATURES, lengths, strict=True)
        ]
        batches = []
        for samples in torch.arange(_SAMPLES).tensor_split(self.world_size):
            own = slice(int(samples[0]), int(samples[-1]) + 1)
            values = torch.cat([piece for of_feature in ids for piece in of_feature[own]])
            lengths_FB = lengths[:, own].flatten()
            batches.append(KeyedJaggedTensor(list(FEATURES), values, lengths=lengths_FB))
        return batches

    def upstream(self, step: int, rank: int | None, output: Tensor) -> Tensor:
        """The gradient of the output; a mean over ranks must not depend on how many there are."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + step)
        size = (_SAMPLES, output.shape[1])
        whole = UNIT * (0.5 + torch.rand(size, generator=generator))
        whole *= torch.rand(size, generator=generator).sub(0.5).sign()
        return whole if rank is None else self.parts(whole, step)[rank] * self.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A plan: the strategy of all tables, and the number of ranks (four are two nodes)."""

    strategy: ShardingType
    world_size: int

    def case(self, optimizer: str, kind: type[SameSamples] = SameSamples) -> SameSamples:
        """The model, plan and batches, of the kind of case given."""
        return kind(
            17,
            self.world_size,
            types=(self.strategy,),
            node_size=2 if self.world_size == 4 else None,
            optimizer=OPTIMIZERS[optimizer],
            hyperparameters=(("lr", 0.1), ("eps", 4 * UNIT)),
            feeds_back=False,
        )

    def __str__(self) -> str:
        return f"{self.strategy.value} on {self.world_size}"


def places() -> list[Place]:
    """All plans of the matrix."""
    return [
        Place(strategy=strategy, world_size=world_size)
        for strategy in ShardingType
        for world_size in WORLD_SIZES
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """From the plan that saves to the one that loads."""

    optimizer: str
    saved: Place
    loaded: Place

    def __str__(self) -> str:
        return f"{self.optimizer}: {self.saved} -> {self.loaded}"


def moves() -> list[Move]:
    """The whole matrix, the loads of one checkpoint in a row."""
    return [
        Move(optimizer=optimizer, saved=saved, loaded=loaded)
        for optimizer in OPTIMIZERS
        for saved in places()
        for loaded in places()
    ]


def moves_by_checkpoint() -> list[list[Move]]:
    """The same, in batches that load one checkpoint."""
    grouped = itertools.groupby(moves(), lambda m: (m.optimizer, m.saved))
    return [list(group) for _, group in grouped]


def cover() -> list[Move]:
    """Few moves: every two strategies, and every two numbers of ranks, in either direction.

    One checkpoint per strategy, loaded by all.
    """
    strategies = list(ShardingType)
    return [
        Move(
            optimizer=list(OPTIMIZERS)[i % 2],
            saved=Place(strategy=saved, world_size=WORLD_SIZES[(i + 1) % 4]),
            loaded=Place(strategy=loaded, world_size=WORLD_SIZES[(i + j) % 4]),
        )
        for i, saved in enumerate(strategies)
        for j, loaded in enumerate(strategies)
    ]


@dataclass(frozen=True, slots=True)
class _Reference:
    """The unsharded run: after both stretches its state, and outputs of the second."""

    outputs: list[list[Tensor]]
    halfway: dict[str, Tensor]
    end: dict[str, Tensor]


def _unsharded(optimizer: str, case: SameSamples) -> _Reference:
    outputs, halfway, end = _run_unsharded(optimizer)
    parts = [case.parts(out, step) for out, step in zip(outputs, AFTER, strict=True)]
    return _Reference(parts, halfway, end)


@lru_cache(maxsize=4)
def _run_unsharded(optimizer: str) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    case = Place(strategy=ShardingType.TABLE_WISE, world_size=1).case(optimizer)
    model = case.model()

    def state() -> dict[str, Tensor]:
        found = {name: value.clone() for name, value in model.state_dict().items()}
        for table, states in model.ebc.optimizer_states().items():
            for key, value in states.items():
                found[f"ebc.embedding_bags.{table}.weight/{key}"] = value.clone()
        return found

    def train(steps: range) -> list[Tensor]:
        return [
            train_step(
                model, concat_batches(case.batches(step)), partial(case.upstream, step, None)
            )
            for step in steps
        ]

    train(BEFORE)
    halfway = state()
    return train(AFTER), halfway, state()


def save_from(place: Place, optimizer: str, path: str) -> None:
    """Trains for three steps and saves. Every rank calls it."""
    case = place.case(optimizer)
    model = shard(case, case.plan(crc32(str(place).encode())))
    _train(case, model, BEFORE)
    save_checkpoint(path, model, model.fused_optimizer)


def _train(case: SameSamples, model: torch.nn.Module, steps: range) -> list[Tensor]:
    rank = dist.get_rank()
    scale = float(case.world_size)
    return [
        train_step(model, case.batches(step)[rank], _upstream(case, step, rank), scale)
        for step in steps
    ]


def _upstream(case: SameSamples, step: int, rank: int) -> Callable[[Tensor], Tensor]:
    return partial(case.upstream, step, rank)


def load_into(place: Place, optimizer: str, path: str) -> list[str]:
    """Load and train; return the differences from the run that never stopped."""
    case = place.case(optimizer)
    expected = _unsharded(optimizer, case)
    model = shard(case, case.plan(crc32(str(place).encode()) + 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)  # shows each value that the load leaves unset
    load_checkpoint(path, model, model.fused_optimizer)
    found = Findings(exact=False)

    def hold(when: str, state: dict[str, Tensor]) -> None:
        received = dict(model.state_dict())
        for name, states in model.fused_optimizer.state_dict()["state"].items():
            received |= {f"{name}/{key}": value for key, value in states.items()}
        found.same(f"names {when}", sorted(received), sorted(state))
        for name in received.keys() & state.keys():
            found.close(f"{name} {when}", received[name], state[name])

    hold("after loading", expected.halfway)
    outputs = _train(case, model, AFTER)
    for step, output, parts in zip(AFTER, outputs, expected.outputs, strict=True):
        found.close(f"output {step}", output, parts[dist.get_rank()])
    hold("at the end", expected.end)
    return [f"rank {dist.get_rank()}: {text}" for text in found.found]


def load_into_all(places: list[Place], optimizer: str, path: str) -> list[list[str]]:
    """:func:`load_into` for many plans of the same number of ranks."""
    return [load_into(place, optimizer, path) for place in places]


def try_moves(pool: RankPool, moves: Sequence[Move], timeout: float = 200.0) -> list[list[str]]:
    """Make moves from one checkpoint; return the differences of each, of all ranks."""
    optimizer, saved = moves[0].optimizer, moves[0].saved
    found: dict[Place, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint"
        pool(saved.world_size, save_from, saved, optimizer, path, timeout=timeout)
        for world_size in WORLD_SIZES:
            own = [move.loaded for move in moves if move.loaded.world_size == world_size]
            if not own:
                continue
            by_rank = pool(world_size, load_into_all, own, optimizer, path, timeout=timeout)
            for place, *problems in zip(own, *by_rank, strict=True):
                found[place] = [text for of_rank in problems for text in of_rank]
    return [found[move.loaded] for move in moves]
