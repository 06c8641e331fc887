"""Tables with hashed ids beside tables of row numbers, and beside TorchRec's MCH where installed.

    python -m benchmarks.hashed [--only step] [--out benchmarks/results/hashed-cpu.json]

26 tables of 100,000 x 64, batch 1,024, ids by Zipf's law with exponent 1.05 over a million ids a
table. A step is: build the features, look up, backward with row-wise Adagrad. Contenders take turns
in one process with one thread; a ratio is one of thread CPU time, its median and its extremes over
pairs of turns. Two ranks are compared by wall clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import ranks
from recsys.distributed.changed_rows import ChangedRows
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from recsys.distributed.types import ShardingPlan
from recsys.kernels.hashed.index import IdIndex, geometry, map_ids
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.hashed_ids import HashedIds
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrec.modules.mc_modules import (
            DistanceLFU_EvictionPolicy,
            MCHManagedCollisionModule,
        )
        from torchrec.sparse.jagged_tensor import JaggedTensor as PeerJaggedTensor
except ImportError:
    MCHManagedCollisionModule = None

RESULTS = Path(__file__).parent / "results"
TABLES, ROWS, DIM, BATCH = 26, 100_000, 64, 1024
NUM_IDS, EXPONENT = 1_000_000, 1.05
NAMES = [f"f{i}" for i in range(TABLES)]


class Stream:
    """Batches of ids of all tables by Zipf's law; the ids of a table are any 64-bit numbers."""

    def __init__(self, seed: int) -> None:
        weights = torch.arange(1, NUM_IDS + 1, dtype=torch.float64) ** -EXPONENT
        self._cumulated = weights.cumsum(0) / weights.sum()
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, ids_per_bag: int) -> Tensor:
        """Return `[TABLES, BATCH * ids_per_bag]` ids."""
        size = TABLES, BATCH * ids_per_bag
        drawn = torch.rand(size, dtype=torch.float64, generator=self._generator)
        numbers = torch.searchsorted(self._cumulated, drawn).clamp_(max=NUM_IDS - 1)
        return scattered(numbers + NUM_IDS * torch.arange(TABLES)[:, None])


def scattered(numbers: Tensor) -> Tensor:
    """Return distinct 64-bit ids for numbers."""
    return (numbers * 0x5851F42D4C957F2D) ^ 0x14057B7EF767814F


def collection(ids: HashedIds | None, tables: int = TABLES, device: str = "cpu") -> Any:
    """Return tables with row-wise Adagrad in backward."""
    configs = [
        EmbeddingBagConfig(
            geometry(ROWS)[0], DIM, f"t{i}", feature_names=[NAMES[i]], ids=ids, init_fn=None
        )
        for i in range(tables)
    ]
    ebc = EmbeddingBagCollection(tables=configs, device=torch.device(device))
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.01})
    return ebc


def features_of(ids: Tensor) -> KeyedJaggedTensor:
    """Return bags of one length."""
    lengths = torch.full((len(ids) * BATCH,), ids.shape[1] // BATCH)
    return KeyedJaggedTensor(NAMES[: len(ids)], ids.reshape(-1), lengths=lengths)


def step(model: Any, ids: Tensor, gradient: Tensor) -> None:
    """Train on a batch."""
    model(features_of(ids)).values().backward(gradient)


def indexes_of(model: Any) -> list[IdIndex]:
    return [bag.index.index for bag in model.embedding_bags.values()]


class Pairs(NamedTuple):
    """Milliseconds of both contenders, turn by turn."""

    ours: list[float]
    other: list[float]

    def summary(self) -> dict[str, Any]:
        ratios = [a / b for a, b in zip(self.ours, self.other, strict=True)]
        return {
            "ratio": round(statistics.median(ratios), 3),
            "of_totals": round(sum(self.ours) / sum(self.other), 3),
            "extremes": [round(min(ratios), 3), round(max(ratios), 3)],
            "ms": round(statistics.median(self.ours), 3),
            "other_ms": round(statistics.median(self.other), 3),
        }


def take_turns(
    ours: Callable[[], object],
    other: Callable[[], object],
    pairs: int,
    clock: Callable[[], float] = time.thread_time,
) -> Pairs:
    """Time both in turns, each first in every second pair."""
    found = Pairs([], [])
    for pair in range(pairs + 2):
        times = {}
        for name in ("ours", "other") if pair % 2 else ("other", "ours"):
            run = ours if name == "ours" else other
            began = clock()
            run()
            times[name] = (clock() - began) * 1e3
        if pair >= 2:
            found.ours.append(times["ours"])
            found.other.append(times["other"])
    return found


# -- training steps --------------------------------------------------------------------------------


def fill(model: Any, stream: Stream, limit: int = 60) -> None:
    """Look up batches in training until almost no row is free."""
    for _ in range(limit):
        model(features_of(stream.batch(32)))
        used = [int((index.last_used > 0).sum()) / len(index.ids) for index in indexes_of(model)]
        if min(used) > 0.995:
            return


def known_batch(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return a batch whose unknown ids are replaced by known ones, and the rows of its ids."""
    found, rows = [], []
    for index, of_table in zip(indexes_of(model), ids, strict=True):
        row = map_ids([index], of_table, [len(of_table)], 1 << 30, 0, is_training=False).rows
        is_known = (index.ids[row] == of_table) & (index.last_used[row] > 0)
        residents = index.last_used.nonzero().flatten()
        other = residents[torch.randint(len(residents), row.shape)]
        row = torch.where(is_known, row, other)
        rows.append(row)
        found.append(index.ids[row])
    return torch.stack(found), torch.stack(rows)


def repeat(batches: Sequence[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def measure_steps(pairs: int) -> dict[str, Any]:
    """Return the ratios of steps with hashed ids to steps with row numbers."""
    hashed, static, stream = collection(HashedIds()), collection(None), Stream(0)
    fill(hashed, stream)
    found = {}
    for ids_per_bag in (1, 8):
        gradient = torch.randn(BATCH, TABLES * DIM)
        known = [known_batch(hashed, stream.batch(ids_per_bag)) for _ in range(8)]
        of_ours, of_other = repeat(known), repeat(known)
        times = take_turns(
            lambda: step(hashed, next(of_ours)[0], gradient),  # noqa: B023
            lambda: step(static, next(of_other)[1], gradient),  # noqa: B023
            pairs,
        )
        found[f"known ids, {ids_per_bag} per bag"] = known_ratio = times.summary()
        fresh = [stream.batch(ids_per_bag) for _ in range(pairs + 2)]
        rows = [of.remainder(geometry(ROWS)[0]) for of in fresh]
        ids, of_other = iter(fresh), iter(rows)
        before = hashed_counts(hashed)
        times = take_turns(
            lambda: step(hashed, next(ids), gradient),  # noqa: B023
            lambda: step(static, next(of_other), gradient),  # noqa: B023
            pairs,
        )
        admitted = hashed_counts(hashed) - before
        share = admitted / (len(fresh) * fresh[0].numel())
        new = times.summary() | {"new_ids": round(share, 4)}
        # a step is known ids at their ratio, and new ids
        cost = (new["ratio"] - known_ratio["ratio"] * (1 - share)) / share
        found[f"new ids, {ids_per_bag} per bag"] = new | {"new_id_to_static_id": round(cost, 2)}
    return found


def hashed_counts(model: Any) -> int:
    """Return the number of ids that got a row so far."""
    return sum(bag.index.stats().admitted for bag in model.embedding_bags.values())


def measure_marks(pairs: int) -> dict[str, Any]:
    """Return the ratios of steps with marks of changed rows to steps without; all ids are known.

    Both turns use the same tables: equal tables at other addresses differ by more than the marks.
    """
    found = {}
    for kind, ids in (("static", None), ("hashed", HashedIds())):
        model, stream = collection(ids), Stream(4)
        dlrm = DLRM(model, 13, [512, 256, DIM], [512, 512, 256, 1])
        dense = torch.randn(BATCH, 13)
        for ids_per_bag in (1, 8):
            gradient = torch.randn(BATCH, TABLES * DIM)
            known = [number_of(stream.batch(ids_per_bag), 60_000) for _ in range(8)]
            batches = repeat(known)
            runs: dict[str, Callable[[], None]] = {
                "lookup and update": lambda: step(model, next(batches), gradient),  # noqa: B023
                "DLRM": lambda: dlrm(dense, features_of(next(batches))).sum().backward(),  # noqa: B023
            }
            for name, run in runs.items():
                times = marked_and_not(model, run, pairs)
                found[f"{kind}, {ids_per_bag} per bag, {name}"] = times.summary()
    return found


def marked_and_not(model: Any, run: Callable[[], None], pairs: int) -> Pairs:
    """Time steps with a consumer of changed rows, and without."""
    times = Pairs([], [])
    for pair in range(pairs):
        for is_marked in (True, False) if pair % 2 else (False, True):
            changed = ChangedRows(model) if is_marked else None
            run()
            began = time.thread_time()
            for _ in range(4):
                run()
            (times.ours if is_marked else times.other).append((time.thread_time() - began) * 250)
            if changed is not None:
                assert any(len(rows) for rows in changed.take().values())
                changed.close()
    return times


# -- mapping alone ---------------------------------------------------------------------------------


def full_indexes(stream: Stream) -> list[IdIndex]:
    settings, (rows, regions) = HashedIds().settings(), geometry(ROWS)
    indexes = [IdIndex.empty(settings, rows, regions, 0, regions, i) for i in range(TABLES)]
    for number in range(1, 41):
        ids = stream.batch(32)
        map_ids(indexes, ids.view(-1), [ids.shape[1]] * TABLES, number, number, is_training=True)
    return indexes


def measure_mapping(pairs: int) -> dict[str, Any]:
    """Compare the mapping of a batch with a gather of one int64 per id, and with MCH."""
    stream = Stream(1)
    indexes = full_indexes(stream)
    batches, sizes = [stream.batch(1) for _ in range(pairs + 2)], [BATCH] * TABLES
    per_row = torch.zeros(TABLES * geometry(ROWS)[0], dtype=torch.int64).random_()
    first = torch.arange(TABLES)[:, None] * geometry(ROWS)[0]
    places = [(batch.remainder(geometry(ROWS)[0]) + first).view(-1) for batch in batches]
    ids, rows = iter(batches), iter(places)
    read = take_turns(
        lambda: map_ids(indexes, next(ids).view(-1), sizes, 1000, 1000, is_training=False),
        lambda: per_row[next(rows)],
        pairs,
    )
    found = {"read-only lookup to a gather": read.summary()}
    if MCHManagedCollisionModule is not None:
        found["mapping in training to MCH"] = measure_mch(indexes, stream, 60)
    return found


def measure_mch(indexes: Sequence[IdIndex], stream: Stream, pairs: int) -> dict[str, Any]:
    """Compare the mapping in training with the peer's profile and remap.

    The peer evicts in each 20th batch, so that the ratio of totals counts.
    """
    peers = [
        MCHManagedCollisionModule(
            zch_size=geometry(ROWS)[0],
            device=torch.device("cpu"),
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=20,
            input_hash_size=2**62,
        )
        for _ in range(TABLES)
    ]
    for peer in peers:
        peer.train()

    def remap(ids: Tensor) -> None:
        lengths = torch.ones(BATCH, dtype=torch.int64)
        for name, peer, of_table in zip(NAMES, peers, ids, strict=True):
            peer({name: PeerJaggedTensor(of_table & (2**62 - 1), lengths=lengths)})

    for _ in range(40):  # as many ids as the hash has seen by now
        for part in stream.batch(4).split(BATCH, dim=1):
            remap(part)
    batches = [stream.batch(1) for _ in range(pairs + 2)]
    ours, other, number = iter(batches), iter(batches), iter(range(2000, 2000 + pairs + 2))

    def map_batch() -> None:
        at = next(number)
        map_ids(indexes, next(ours).view(-1), [BATCH] * TABLES, at, at, is_training=True)

    return take_turns(map_batch, lambda: remap(next(other)), pairs).summary()


# -- endless ids -----------------------------------------------------------------------------------


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure_endless() -> dict[str, Any]:
    """Train tables on 100 times as many distinct ids as they have rows, half of each batch new.

    The last tenth of one table's ids takes turns with the third tenth of another's.
    """
    size, total = BATCH * 16, 100 * geometry(ROWS)[0]
    gradient, num_new = torch.randn(BATCH, DIM), size // 2
    tenth = total // num_new // 10

    def train(model: Any, number: int) -> None:
        first = number * num_new
        new = torch.arange(first, first + num_new)
        recent = torch.randint(max(first - ROWS // 2, 0), first + 1, (size - num_new,))
        step(model, scattered(torch.cat([new, recent]))[None], gradient)

    young, old = collection(HashedIds(), tables=1), collection(HashedIds(), tables=1)
    memory = []
    for number in range(9 * tenth):
        train(old, number)
        if number < 2 * tenth:
            train(young, number)
        if number % tenth == tenth - 1:
            memory.append(resident_mib())
    third, last = iter(range(2 * tenth, 3 * tenth)), iter(range(9 * tenth, 10 * tenth))
    times = take_turns(lambda: train(young, next(third)), lambda: train(old, next(last)), tenth - 2)
    stats = old.embedding_bags["t0"].index.stats()
    return {
        "rows": stats.rows,
        "admitted": stats.admitted,
        "rate of last to third tenth": times.summary(),
        "resident_mib": [round(m) for m in (*memory, resident_mib())],
    }


def measure_load() -> dict[str, float]:
    """Return the share of ids that have a row, by the share of rows that the ids would fill."""
    settings, (rows, regions) = HashedIds(eviction=None).settings(), geometry(ROWS)
    found = {}
    for load in (0.7, 0.8, 0.9):
        index = IdIndex.empty(settings, rows, regions, 0, regions, 0)
        ids = scattered(torch.randperm(int(load * rows)))
        mapped = map_ids([index], ids, [len(ids)], 1, 1, is_training=True)
        found[str(load)] = round(len(mapped.new_rows) / len(ids), 5)
    return found


# -- two ranks -------------------------------------------------------------------------------------


def sharded(ids: HashedIds | None, kind: str) -> Any:
    torch.manual_seed(0)
    model, world = collection(ids, device="meta"), dist.get_world_size()
    sharder = EmbeddingBagCollectionSharder()
    chosen = {
        f"t{i}": table_wise(rank=i % world) if kind == "table_wise" else row_wise()
        for i in range(TABLES)
    }
    plan = construct_module_sharding_plan(
        model, chosen, sharder, world_size=world, local_size=world, device_type="cpu"
    )
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"": plan}), sharders=[sharder]
    )


def measure_ranks(pairs: int) -> dict[str, Any]:
    """Return the ratios of steps of two ranks by wall clock, with known ids."""
    found = {}
    gradient = torch.randn(BATCH, TABLES * DIM)

    def train(model: Any, ids: Tensor) -> None:
        model(features_of(ids)).values().backward(gradient)

    for kind in ("table_wise", "row_wise"):
        hashed, static = sharded(HashedIds(), kind), sharded(None, kind)
        for ids_per_bag in (1, 8):
            # few enough that every id has a row
            drawn = Stream(2 + dist.get_rank())
            known = [scattered(number_of(drawn.batch(ids_per_bag), 60_000)) for _ in range(8)]
            rows = [number_of(of, geometry(ROWS)[0]) for of in known]
            for of in known:
                train(hashed, of)
            ours, other = repeat(known), repeat(rows)

            def clock() -> float:
                dist.barrier()
                return time.perf_counter()

            times = take_turns(
                lambda: train(hashed, next(ours)),  # noqa: B023
                lambda: train(static, next(other)),  # noqa: B023
                pairs,
                clock,
            )
            found[f"{kind}, {ids_per_bag} per bag"] = times.summary()
    return found


def number_of(ids: Tensor, limit: int) -> Tensor:
    """Return numbers below a limit for ids, by their high bits."""
    return (ids >> 20).remainder(limit)


def main() -> None:
    """Measure all, or one of the parts, and write the result."""
    parts: dict[str, Callable[[int], Any]] = {
        "step": measure_steps,
        "marks": measure_marks,
        "mapping": measure_mapping,
        "endless": lambda pairs: measure_endless(),
        "load": lambda pairs: measure_load(),
        "ranks": lambda pairs: ranks.launch("benchmarks.hashed", 2, "--pairs", str(pairs)),
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=parts, nargs="+", default=[*parts])
    parser.add_argument("--pairs", type=int, default=40)
    if "RANK" in os.environ:
        arguments = ranks.begin(parser)
        ranks.end(measure_ranks(arguments.pairs), arguments.out)
        return
    parser.add_argument("--out", type=Path, default=RESULTS / "hashed-cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    from benchmarks.__main__ import machine

    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    result = known | {"machine": machine(), "pairs": arguments.pairs}
    for name in arguments.only:
        result[name] = parts[name](arguments.pairs)
        print(json.dumps({name: result[name]}, indent=1), flush=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
