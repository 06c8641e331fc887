from __future__ import annotations

import torch
import torch.distributed as dist

from recsys import datasets
from recsys.datasets.histories import leave_one_out
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.features import Categorical, FeatureSpec, Ids
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.modules.sequences.next_item import NextItem
from recsys.modules.sequences.sasrec import SASRec
from recsys.optim import Adam, in_backward_optimizer_filter
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from recsys.training import Trainer
from recsys.training.full_ranking import FullRanking
from tests.ranks import RankPool

CPU = torch.device("cpu")


def cycles(users: int, length: int) -> dict[str, list]:
    """Each user reads items in the order of their names, from another start."""
    rows = [(u, f"item {(7 * u + t) % 20:02}", t) for u in range(users) for t in range(length)]
    return dict(zip(("user", "item", "time"), map(list, zip(*rows, strict=True)), strict=True))


def train(folder: str) -> tuple[dict[str, float], dict[str, float]]:
    """Train a next-item model; return the metrics of an evaluation by the trainer, and by hand."""
    parts = leave_one_out(cycles(64, 9), max_length=6)
    columns = ("history", "target")
    spec = FeatureSpec(
        [Categorical(name, is_list=True, table="items") for name in columns]
        + [Ids("times", rows=100, is_list=True)]
    ).fit(parts["train"])
    rows = spec.fitted.vocabularies["items"].num_rows
    rank = (
        {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        if dist.is_initialized()
        else {}
    )
    options = {"divide": "batches", "labels": False, **rank}
    loaders = [
        datasets.table(parts[name], spec, 16, shuffle=name == "train", **options)
        for name in ("train", "test")
    ]
    torch.manual_seed(0)
    items = EmbeddingConfig(
        num_embeddings=rows, embedding_dim=16, name="items", feature_names=[*columns]
    )
    collection = EmbeddingCollection(tables=[items])
    apply_optimizer_in_backward(Adam, collection.parameters(), {"lr": 0.01})
    model = DistributedModelParallel(
        NextItem(collection, SASRec(16, 6, dropout=0.0), "in_batch"),
        env=ShardingEnv.default(), device=CPU,
    )  # fmt: skip
    dense = dict(in_backward_optimizer_filter(model.named_parameters())).values()
    trainer = Trainer(
        model, torch.optim.Adam(dense, lr=0.01), folder, epochs=12, log_every=None, loggers=(),
        metrics=lambda device: FullRanking(model, rows, device, [1, 3]),
        monitor="hit_rate@1",
    )  # fmt: skip
    trainer.fit(*loaders)
    by_trainer = trainer.evaluate(loaders[1])
    model.eval()
    hits = count = 0
    vectors = model.module.items(rows, CPU)
    for batch in loaders[1]:
        features = batch.sparse_features
        scores = model.module.users(features) @ vectors.T
        histories, targets = (features[name].to_dense() for name in columns)
        for score, history, target in zip(scores, histories, targets, strict=True):
            masked = score.detach().clone()
            masked[history] = -1e9
            hits += int(masked.argmax() == target[-1])
            count += 1
    numbers = torch.tensor([float(hits), float(count)])
    if dist.is_initialized():
        dist.all_reduce(numbers)
    return by_trainer, {"hit_rate@1": float(numbers[0] / numbers[1])}


def test_seen_items_are_no_hits():
    """With fewer other items than are asked for."""
    names = ["history", "target"]
    films = EmbeddingConfig(3, 8, "films", feature_names=names)
    model = NextItem(EmbeddingCollection(tables=[films]), SASRec(8, 5), "in_batch").eval()
    ids, lengths = torch.tensor([0, 1, 1, 0, 1, 0, 1, 2]), torch.tensor([2, 2, 2, 2])
    features = KeyedJaggedTensor(names, ids, lengths=lengths)
    metrics = FullRanking(model, 3, CPU, [3])
    metrics.update(model(features)[1], features)
    assert metrics.compute()["hit_rate@3"] == 0.5  # item 1 is seen, item 2 is not
    more = KeyedJaggedTensor(["earlier"], torch.tensor([2]), lengths=torch.tensor([0, 1]))
    features = KeyedJaggedTensor.concat([features, more])
    metrics = FullRanking(model, 3, CPU, [3], seen=["earlier"])
    metrics.update(model(features)[1], features)
    assert metrics.compute()["hit_rate@3"] == 0.0  # item 2 is seen, too


def test_a_trainer_finds_the_next_item(tmp_path, ranks: RankPool):
    by_trainer, by_hand = train(str(tmp_path / "one"))
    assert by_trainer["hit_rate@1"] == by_hand["hit_rate@1"] > 0.9
    for by_trainer, by_hand in ranks(2, train, str(tmp_path / "two")):
        assert by_trainer["hit_rate@1"] == by_hand["hit_rate@1"] > 0.9
