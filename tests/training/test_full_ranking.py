from __future__ import annotations

import math

import pytest
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
from tests.training import rankings

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


def next_item(num_items: int, **options: object) -> NextItem:
    films = EmbeddingConfig(num_items, 8, "films", feature_names=["history", "target"], **options)
    return NextItem(EmbeddingCollection(tables=[films]), SASRec(8, 5), "in_batch").eval()


def ranking(model: NextItem, num_items: int, features: KeyedJaggedTensor, **options: object):
    metrics = FullRanking(model, num_items, CPU, **options)
    metrics.update(model(features)[1], features)
    return metrics.compute()


def test_other_seen_items_are_not_ranked():
    model, names = next_item(3), ["history", "target"]
    ids, lengths = torch.tensor([0, 1, 1, 0, 1, 2, 1, 2]), torch.tensor([2, 2, 2, 2])
    features = KeyedJaggedTensor(names, ids, lengths=lengths)
    assert ranking(model, 3, features, ks=[1])["hit_rate@1"] == 1.0  # item 2 is the only one left
    more = KeyedJaggedTensor(["earlier"], torch.tensor([2]), lengths=torch.tensor([1, 0]))
    features = KeyedJaggedTensor.concat([features, more])
    found = ranking(model, 3, features, ks=[1], seen=["earlier"], seen_targets="skip")
    assert (found["hit_rate@1"], found["seen_targets"]) == (1.0, 1.0)


def test_a_target_that_was_seen():
    """A seen target is ranked with the unseen items, or its sample is left out."""
    model, names = next_item(20), ["history", "target"]
    ids, lengths = torch.tensor([5, 6, 5, 6, 6, 5, 6, 5]), torch.tensor([4, 0, 4, 0])
    features = KeyedJaggedTensor(names, ids, lengths=lengths)
    found = ranking(model, 20, features, ks=[19])
    assert found["hit_rate@19"] == 1.0
    assert "seen_targets" not in found
    found = ranking(model, 20, features, ks=[19], seen_targets="skip")
    assert found["seen_targets"] == 1.0
    assert math.isnan(found["hit_rate@19"])  # no sample is left
    with pytest.raises(ValueError, match='"rank" or "skip"; received \'hide\''):
        FullRanking(model, 20, CPU, seen_targets="hide")


def test_a_collapsed_model_has_the_metrics_of_chance():
    model = next_item(1000, init_fn=torch.nn.init.zeros_)
    targets = torch.arange(2, 12).repeat(40)  # the first rows are the most frequent items
    lengths = torch.ones(800, dtype=torch.int64)
    features = KeyedJaggedTensor(
        ["history", "target"], torch.cat([torch.full((400,), 900), targets]), lengths=lengths
    )
    found = ranking(model, 1000, features, ks=[10])
    assert found["hit_rate@10"] == pytest.approx(10 / 999)
    assert found["mrr@10"] == pytest.approx(sum(1 / rank for rank in range(1, 11)) / 999)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite(value: float):
    """Such an item is not ranked; as the target or in the query it makes the metrics NaN."""
    model, names = next_item(6), ["history", "target"]
    with torch.no_grad():
        model.embedding_collection.embeddings["films"].weight[3] = value
    lengths = torch.tensor([1, 1])

    def of(history: int, target: int) -> float:
        features = KeyedJaggedTensor(names, torch.tensor([history, target]), lengths=lengths)
        return ranking(model, 6, features, ks=[4])["hit_rate@4"]

    assert of(1, 2) == 1.0  # four items are left
    assert math.isnan(of(1, 3))
    assert math.isnan(of(3, 2))


def test_special_rows_are_not_ranked_on_ranks(ranks: RankPool):
    for found, of_special in ranks(2, rank_with_special_rows):
        assert found == 1.0  # rows 2 to 5 without the history
        assert of_special == 0.0


def rank_with_special_rows() -> tuple[float, float]:
    torch.manual_seed(0)
    model = DistributedModelParallel(
        next_item(6, num_special_rows=2), env=ShardingEnv.default(), device=CPU
    ).eval()
    metrics = [FullRanking(model, 6, CPU, [3]) for _ in range(2)]
    for target, one in zip((3, 1), metrics, strict=True):
        features = KeyedJaggedTensor(
            ["history", "target"], torch.tensor([2, target]), lengths=torch.tensor([1, 1])
        )
        one.update(model(features)[1], features)
        one.sync()
    return metrics[0].compute()["hit_rate@3"], metrics[1].compute()["hit_rate@3"]


def test_against_brute_force():
    """The short form of `python -m tests.training.rankings`."""
    failures, counts = rankings.search(range(120))
    assert not failures
    assert all(counts[(name,)] for name in rankings.PROPERTIES)


def test_a_trainer_finds_the_next_item(tmp_path, ranks: RankPool):
    by_trainer, by_hand = train(str(tmp_path / "one"))
    assert by_trainer["hit_rate@1"] == by_hand["hit_rate@1"] > 0.9
    for by_trainer, by_hand in ranks(2, train, str(tmp_path / "two")):
        assert by_trainer["hit_rate@1"] == by_hand["hit_rate@1"] > 0.9
