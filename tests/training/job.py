"""Jobs of a `Trainer` for tests, on the model and the samples of `tests.distributed.job`.

    python -m tests.training.job FOLDER [--loader state] [--fault kill --after 0.2]

The script trains on one process, or on several under torchrun, and continues from its last save.
A fault happens to its last rank.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from recsys.datasets.utils import Batch
from recsys.distributed.checkpoint import newest_version
from recsys.distributed.checkpoint.versions import read_manifest
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.monitoring.watchdog import end_with_launcher
from recsys.distributed.types import ShardingEnv
from recsys.optim import in_backward_optimizer_filter
from recsys.sparse import set_value_checks
from recsys.training import ProgressiveValidation, Trainer, exit_on_error
from tests.distributed import job

NUM_BATCHES = 12
CPU = torch.device("cpu")


class DrawnByTorch:
    """Batches of a rank, shuffled by the random generator of the process, as a DataLoader does."""

    def __init__(self) -> None:
        env = ShardingEnv.default()
        self.batches = [job.samples(n, env.rank, env.world_size) for n in range(NUM_BATCHES)]

    def order(self) -> list[int]:
        return torch.randperm(NUM_BATCHES).tolist()

    def __len__(self) -> int:
        return NUM_BATCHES

    def __iter__(self) -> Iterator[Batch]:
        return (self.batches[number] for number in self.order())


class Shuffled(DrawnByTorch):
    """The same batches, in an order of each epoch; resumed by reading and skipping."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return torch.randperm(NUM_BATCHES, generator=generator).tolist()


class WithState(Shuffled):
    """The same batches, resumed by the loader's own state."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.start = self.num_reads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["read"]

    def __iter__(self) -> Iterator[Batch]:
        self.read, self.start = self.start, 0
        for number in self.order()[self.read :]:
            self.read += 1
            self.num_reads += 1
            yield self.batches[number]


LOADERS = {"skips": Shuffled, "state": WithState, "torch": DrawnByTorch}


def validation() -> list[Batch]:
    env = ShardingEnv.default()
    return [job.samples(number, env.rank, env.world_size) for number in range(100, 104)]


def model_of(dropout: bool = True) -> DistributedModelParallel:
    """A model on these ranks; with dropout, whose random numbers a resumed job repeats, too."""
    model = job.model_of()
    if dropout:
        torch.manual_seed(7)
        model.model.over_arch.model.insert(1, torch.nn.Dropout(0.1))
    env = ShardingEnv.default()
    plan = job.plan_for(env.world_size, env.node_size)
    return DistributedModelParallel(model, device=CPU, plan=plan)


def adam_of(model: torch.nn.Module) -> torch.optim.Adam:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return torch.optim.Adam(dense.values(), lr=0.02)


def trainer_of(folder: str | Path, **settings: Any) -> Trainer:
    """A trainer with a new model."""
    model = settings.pop("model", None) or model_of()
    optimizer = adam_of(model)
    make_schedule = settings.pop("schedule", None)
    if make_schedule is not None:
        settings["schedule"] = make_schedule(optimizer)
    quiet = {"loggers": (), "shows_bar": False, "log_every": 5}
    return Trainer(model, optimizer, folder, **{**quiet, **settings})


def saved_in(folder: str | Path, name: str = "last") -> list[list[int]]:
    """Length and CRC of all that the newest version contains."""
    version = newest_version(Path(folder) / name)
    assert version is not None, f"{folder} has no {name}"
    files = read_manifest(version)["files"]
    return sorted(list(block) for name, of in files.items() if name != ".metadata" for block in of)


class Faulty:
    """Batches of a loader, slow enough for a fault on the way."""

    def __init__(self, loader: Any, fault: str | None, after: float) -> None:
        self.loader, self.fault, self.after = loader, fault, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Batch]:
        if self.fault == "kill":
            kill = threading.Timer(self.after, os.kill, (os.getpid(), signal.SIGKILL))
            kill.daemon = True
            kill.start()
        start = time.monotonic()
        for batch in self.loader:
            time.sleep(0.005)
            is_due = time.monotonic() > start + self.after
            if self.fault == "raise" and is_due:
                raise ValueError("row 17 of day_3.parquet has no label")
            if self.fault == "nan" and is_due:
                batch.labels[0] = torch.nan
            yield batch


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--loader", choices=LOADERS, default="skips")
    parser.add_argument("--fault", choices=["kill", "raise", "nan"])
    parser.add_argument("--after", type=float, default=0.0, help="seconds of training")
    arguments = parser.parse_args()
    end_with_launcher()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    env = ShardingEnv.default()
    random.seed(0)
    np.random.seed(0)
    set_value_checks(arguments.fault != "nan")  # they would find it before the loss
    fault = arguments.fault if env.rank == env.world_size - 1 else None
    loader = Faulty(LOADERS[arguments.loader](), fault, arguments.after)
    with exit_on_error(arguments.folder, "Run the same command again."):
        trainer = trainer_of(
            arguments.folder,
            epochs=arguments.epochs,
            save_every=4,
            evaluate_every=9,
            resume=True,
            progressive=ProgressiveValidation(window=7),
        )
        print("training", flush=True)
        trainer.fit(loader, validation())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
