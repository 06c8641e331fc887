"""Train on clicks as they arrive, and publish changed rows every few seconds while servers read.

    torchrun --standalone --nproc-per-node=2 examples/stream/train.py --events runs/stream/clicks
    python examples/stream/train.py --kafka 127.0.0.1:9092 --topic clicks

Users and items are any 64-bit ids, which come and go: a table has a fixed number of rows, and the
least recently used ids lose theirs. Each batch is scored before it is trained on, so the printed
loss is of clicks that the model has not seen. At each start a version of the package is
written to `OUT/models/clicks`; then deltas follow. Checkpoints have the position in the stream.
"""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from events import FileEvents, KafkaEvents
from torch import Tensor, nn

import recsys.inference
from recsys import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig
from recsys.distributed.checkpoint import load_checkpoint, newest_version, save_checkpoint
from recsys.distributed.types import ShardingEnv
from recsys.modules.hashed_ids import HashedIds
from recsys.modules.mlp import MLP
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward, in_backward_optimizer_filter
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recsys.sparse import KeyedJaggedTensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from arguments import positive, whole

FEATURES = ["user", "item"]
LOOK = 20  # steps between two lines of output


class ClickModel(nn.Module):
    """Ids of a user and an item in, the logit of a click out."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                num_embeddings=rows, embedding_dim=dim, name=f"{name}s", feature_names=[name],
                ids=HashedIds(unknown="zero"),
            )
            for name in FEATURES
        ]  # fmt: skip
        self.bags = EmbeddingBagCollection(tables=tables)
        self.over = nn.Sequential(MLP(3 * dim, [64]), nn.Linear(64, 1))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Return logits, `[B]`."""
        users, items = self.bags(ids).values().tensor_split(2, dim=1)
        return self.over(torch.cat([users, items, users * items], dim=1))[:, 0]


def batch_of(events: list[dict[str, int]]) -> tuple[KeyedJaggedTensor, Tensor]:
    """Return the ids and the labels of events."""
    ids = torch.tensor([event[name] for name in FEATURES for event in events], dtype=torch.int64)
    lengths = torch.ones(len(ids), dtype=torch.int64)
    labels = torch.tensor([event["clicked"] for event in events], dtype=torch.float32)
    return KeyedJaggedTensor(FEATURES, ids, lengths=lengths), labels


def package(model: DistributedModelParallel, folder: Path, rank: int) -> Path:
    """Write the next version of the package, and return its folder."""
    numbers = [int(path.name) for path in folder.glob("[0-9]*")] if rank == 0 else []
    quantized = recsys.inference.quantize_embeddings(model, torch.int8)
    version = max(numbers, default=0) + 1
    if rank == 0:
        example, _ = batch_of([{"user": 1, "item": 2, "clicked": 0}] * 2)
        recsys.inference.package(quantized.cpu(), folder, [example], version=version)
    return folder / str(version)


def train(options: argparse.Namespace, env: ShardingEnv) -> None:
    torch.manual_seed(0)
    model = ClickModel(options.rows, options.embedding_dim)
    apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.3})
    sharded = DistributedModelParallel(model, env=env, device=torch.device("cpu"))
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    adam = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=1e-3))
    optimizer = CombinedOptimizer([sharded.fused_optimizer, adam])
    place = env.rank, env.world_size
    events: FileEvents | KafkaEvents
    if options.kafka:
        events = KafkaEvents(options.kafka, options.topic, *place)
    else:
        events = FileEvents(options.events, *place)
    checkpoint, progress = options.out / "checkpoint", {"events": events}
    first = 1
    if newest_version(checkpoint) is not None:
        extra = load_checkpoint(checkpoint, sharded, optimizer, progress=progress)
        first = extra["step"] + 1
    publisher = recsys.inference.Publisher(
        sharded, package(sharded, options.out / "models/clicks", env.rank), every=options.publish
    )
    end, loss, count = time.monotonic() + options.seconds, 0.0, 0
    for step in itertools.count(first):
        ids, labels = batch_of(events.read(options.batch_size, seconds=0.1))
        logits = sharded(ids)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        loss, count = loss + float(losses.detach().sum()), count + len(labels)
        adam.zero_grad()
        (losses.sum() / max(len(labels), 1)).backward()
        adam.step()
        publisher.step()
        is_last = False
        if step % LOOK == 0:
            if count and env.rank == 0:
                print(
                    f"step {step}: {count} clicks, loss {loss / count:.4f}",
                    flush=True,
                )
            loss, count = 0.0, 0
            is_last = all_agree(time.monotonic() > end)
        if is_last or step % options.save == 0:
            save_checkpoint(
                checkpoint, sharded, optimizer, {"step": step}, progress=progress, delta=True
            )
        if is_last:
            break
    publisher.publish()
    publisher.close()


def all_agree(value: bool) -> bool:
    """Return whether the value is true on all ranks."""
    votes = torch.tensor(int(value))
    if dist.is_initialized():
        dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=Path, default=Path("runs/stream/clicks"), help="a file")
    parser.add_argument("--kafka", help="addresses of brokers; instead of a file")
    parser.add_argument("--topic", default="clicks")
    parser.add_argument("--out", type=Path, default=Path("runs/stream"), help="output folder")
    parser.add_argument("--rows", type=whole(1), default=1 << 16, help="rows of each table")
    parser.add_argument("--embedding-dim", type=whole(1), default=16)
    parser.add_argument("--batch-size", type=whole(1), default=512, help="at most, per rank")
    parser.add_argument("--publish", type=positive, default=1.0, help="seconds between deltas")
    parser.add_argument("--save", type=whole(1), default=1000, help="steps between checkpoints")
    parser.add_argument("--seconds", type=positive, default=float("inf"), help="end after so long")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        train(options, ShardingEnv.default())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
