"""Kills processes while they save, and loads the checkpoint that remains.

    python -m tests.distributed.checkpoint.kills [--kills 60] [--savers 2] [--aside] [--delta]

A job of two ranks saves version after version of a model whose values are all the version's number.
Some time later one of its ranks is killed (signal 9), the other soon after. Then the folder must
load, with the values of one version, which is not older than the last reported save. The next job
continues in the same folder. With two savers, two jobs save into it at once. With `--aside` saves
are asynchronous, and the values change while one is under way. With `--delta` a version adds one to
a hundredth of the rows, and every fifth is full.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from recsys.distributed.checkpoint import (
    load_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
)
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from recsys.distributed.types import ShardingEnv, ShardingPlan
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor

RANKS, ROWS, DIM, PARTS = 2, 20_000, 32, 100


def build() -> EmbeddingBagCollection:
    """Returns a model of two tables of 2.5 MB each."""
    tables = [
        EmbeddingBagConfig(name=n, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[n])
        for n in ("a", "b")
    ]
    return EmbeddingBagCollection(tables=tables)


def fill(model: torch.nn.Module, number: float) -> None:
    """Makes all values a number."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)


def add_one(model: torch.nn.Module, number: int) -> None:
    """Trains on the rows of a number, which adds one to their values."""
    ids = torch.arange(number % PARTS, ROWS, PARTS)
    lengths = torch.ones(2 * len(ids), dtype=torch.int64)
    batch = KeyedJaggedTensor(["a", "b"], torch.cat([ids, ids]), lengths=lengths)
    (-model(batch).values()).sum().backward()


def expected(number: int) -> torch.Tensor:
    """Returns the value of each row after so many calls of `add_one`."""
    ids = torch.arange(ROWS) % PARTS
    return (number - ids).div(PARTS, rounding_mode="floor").add(ids > 0).clamp(min=0)


def save_for_ever(
    path: Path, rank: int, store: Path, saved: Path, aside: bool, delta: bool
) -> None:
    """Save until this rank or the other one is killed; record each saved version in a file."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=20),
    )
    model = build()
    if delta:
        fill(model, 0)
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    placed = construct_module_sharding_plan(
        model,
        {"a": row_wise(), "b": table_wise(rank=1)},
        world_size=RANKS,
        local_size=RANKS,
        device_type="cpu",
    )
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.default(),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"": placed}),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    for number in range(1, 1_000_000):
        extra = {"number": number, "delta": delta}
        if delta:
            add_one(sharded, number)
        else:
            fill(sharded, number)
        if delta:
            save_checkpoint(path, sharded, extra=extra, delta=True, full_every=5)
        elif aside:
            pending = save_checkpoint_async(path, sharded, extra=extra)
            fill(sharded, number + 0.5)
            pending.wait()
        else:
            save_checkpoint(path, sharded, extra=extra)
        if rank == 0:
            saved.write_text(str(number))


def start(path: Path, work: Path, job: str, aside: bool, delta: bool) -> list[int]:
    """Starts the ranks of a job; returns their process ids."""
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            with (work / f"{job}-{rank}").open("w") as log:
                try:
                    files = work / f"{job}-store", work / f"{job}-saved"
                    save_for_ever(path, rank, *files, aside, delta)
                except BaseException:  # the other rank was killed
                    traceback.print_exc(file=log)
            os._exit(0)
        children.append(child)
    return children


def wait_for(file: Path, seconds: float = 60.0) -> None:
    """Waits until a file is there."""
    end = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{file} is not there after {seconds} s")
        time.sleep(0.002)


def end(children: list[int], first: int) -> None:
    """Kills one rank, gives the others a moment to find out, and kills them, too."""
    os.kill(children[first], signal.SIGKILL)
    time.sleep(random.choice([0.0, 0.05]))
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def check(path: Path, at_least: int) -> int:
    """Load the checkpoint and return the number of its version.

    Raises:
        AssertionError: if the values are of several versions, or older than `at_least`.
    """
    model = build()
    extra = load_checkpoint(path, model)
    number: int = extra["number"]
    values = expected(number).unsqueeze(1) if extra["delta"] else number
    for name, value in model.state_dict().items():
        assert bool((value == values).all()), f"{name} is not that of {number}"
    assert number >= at_least, f"{number} was loaded; {at_least} had been saved"
    return number


def try_kills(kills: int, savers: int, seed: int, aside: bool, delta: bool) -> dict[str, int]:
    """Kill `kills` jobs, one after the other; return counts of the loads' results."""
    chance = random.Random(seed)
    random.seed(seed)
    found = {"kills": 0, "loaded": 0, "unfinished versions left": 0, "versions saved": 0}
    with tempfile.TemporaryDirectory() as folder:
        work, path = Path(folder), Path(folder) / "checkpoint"
        for kill in range(kills):
            names = [f"{kill}-{i}" for i in range(savers)]
            jobs = {name: start(path, work, name, aside, delta) for name in names}
            try:
                for job in jobs:
                    wait_for(work / f"{job}-saved")
                time.sleep(chance.uniform(0, 0.8 if delta else 0.15))
            finally:
                for children in jobs.values():
                    end(children, chance.randrange(RANKS))
            numbers = [int((work / f"{job}-saved").read_text() or 1) for job in jobs]
            check(path, at_least=numbers[0] if savers == 1 else 1)
            found["kills"] += savers
            found["loaded"] += 1
            found["versions saved"] += sum(numbers)
            found["unfinished versions left"] += sum(
                not (version / "manifest.json").exists() for version in path.glob("step-*")
            )
    return found


def main() -> None:
    """Print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, help="jobs that are killed")
    parser.add_argument("--savers", type=int, default=1, help="jobs at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--aside", action="store_true", help="asynchronous saves")
    parser.add_argument("--delta", action="store_true", help="saves of the changed rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    found = try_kills(
        arguments.kills, arguments.savers, arguments.seed, arguments.aside, arguments.delta
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
