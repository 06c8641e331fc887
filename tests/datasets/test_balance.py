from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from recsys import datasets
from recsys.base.loaders import epoch_length
from recsys.datasets.balance import (
    BalancedBatches,
    BalancedSampler,
    balanced_order,
    imbalance,
)
from recsys.datasets.utils import Batch
from recsys.distributed.checkpoint import Stateful
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.features import FeatureSpec, Ids, Label
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.modules.sequences.hstu import HSTU
from recsys.modules.sequences.next_item import NextItem, with_catalogue
from recsys.optim import SGD, in_backward_optimizer_filter
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from recsys.training.batches import ResumableBatches
from tests.ranks import RankPool

ITEMS, MOST = 30, 40


def zipf_lengths(count: int, most: int, seed: int) -> np.ndarray:
    numbers = np.arange(1, most + 1)
    shares = numbers**-1.05
    return np.random.default_rng(seed).choice(numbers, count, p=shares / shares.sum())


@given(st.lists(st.integers(0, 9), max_size=7), st.integers(1, 3))
def test_parts_against_all_divisions(costs, num_parts):
    costs = np.array(costs, np.float64)
    order, edges = balanced_order(costs, num_parts)
    parts = [order[edges[i] : edges[i + 1]] for i in range(num_parts)]
    assert sorted(np.concatenate(parts).tolist()) == [*range(len(costs))]
    assert all((np.diff(part) > 0).all() for part in parts)
    most = max((costs[part].sum() for part in parts), default=0.0)
    best = min(
        max(sum(costs[i] for i, of in enumerate(chosen) if of == part) for part in range(num_parts))
        for chosen in itertools.product(range(num_parts), repeat=len(costs))
    )
    assert most <= best * 4 / 3 + 1e-9
    if costs.any():
        expected = most / (costs.sum() / num_parts) - 1
        assert abs(imbalance(costs, order, edges) - expected) < 1e-9


def test_items_without_cost_are_divided():
    order, edges = balanced_order(np.zeros(10), 3)
    assert np.diff(edges).tolist() == [4, 3, 3]
    assert sorted(order.tolist()) == [*range(10)]
    _, edges = balanced_order(np.array([0.0, 5.0, 0.0, 5.0]), 4)
    assert np.diff(edges).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("most", [200, 1000, 8192])
def test_lengths_by_zipfs_law_on_8_ranks(most):
    """64 samples a rank: at most 3% above the mean; in order 40% and more."""
    found, in_order = [], []
    for seed in range(20):
        costs = zipf_lengths(8 * 64, most, seed).astype(np.float64) ** 2
        found.append(imbalance(costs, *balanced_order(costs, 8)))
        in_order.append(imbalance(costs, np.arange(8 * 64), np.arange(9) * 64))
    assert max(found) < 0.03
    assert np.mean(in_order) > 0.4


def sequences(seed: int, size: int) -> Batch:
    lengths = torch.from_numpy(zipf_lengths(size, MOST, seed))
    draw = torch.Generator().manual_seed(seed)
    num = int(lengths.sum())
    ids = torch.randint(0, ITEMS, (2, num), generator=draw)
    features = KeyedJaggedTensor(
        ["history", "target"], ids.flatten(), lengths=torch.cat([lengths, lengths])
    )
    weights = torch.rand(size, generator=draw) if seed else None
    return Batch(
        torch.arange(float(size)).unsqueeze(1), features, torch.zeros(size), sample_weights=weights
    )


@pytest.mark.parametrize("world_size", [1, 3, 9])
@pytest.mark.parametrize("mean_over", ["samples", "values"])
def test_every_sample_is_of_one_rank(world_size, mean_over):
    batch = sequences(0, 7)
    lengths = batch.sparse_features["history"].lengths()
    shares = []
    for rank in range(world_size):
        (share,) = BalancedBatches([batch], "history", rank, world_size, mean_over=mean_over)
        rows = share.dense_features.flatten().long()
        shares.append(rows)
        assert torch.equal(share.sparse_features["history"].lengths(), lengths[rows])
        for row, bag in zip(rows, share.sparse_features["target"].to_dense(), strict=True):
            assert torch.equal(bag, batch.sparse_features["target"].to_dense()[row])
        counts = torch.ones(7) if mean_over == "samples" else lengths.float()
        expected = counts[rows].sum() * world_size / counts.sum()
        torch.testing.assert_close(share.sample_weights, expected.expand(len(rows)))
    assert torch.cat(shares).sort().values.tolist() == [*range(7)]


def test_weights_of_the_samples_are_kept():
    batch = sequences(0, 6)
    batch.sample_weights = torch.arange(6.0)
    (share,) = BalancedBatches([batch], "history", 0, 1)
    assert torch.equal(share.sample_weights, torch.arange(6.0))


def test_a_reader_resumes_below():
    data = {"seen": [[1] * (i % 5) for i in range(40)], "ok": [i % 2 for i in range(40)]}
    spec = FeatureSpec([Ids("seen", rows=5, is_list=True), Label("ok")]).fit(data)

    def build():
        reader = datasets.table(data, spec, batch_size=8, shuffle=True, seed=3)
        return BalancedBatches(reader, "seen", 1, 2)

    whole = [batch.labels for batch in build()]
    broken = build()
    batches = iter(broken)
    first = [next(batches).labels for _ in range(2)]
    resumed = build()
    resumed.load_state_dict(broken.state_dict())
    for one, other in zip([*first, *(batch.labels for batch in resumed)], whole, strict=True):
        assert torch.equal(one, other)
    assert broken.unbalanced > broken.imbalance
    assert isinstance(broken, Stateful)
    assert broken.num_batches == 5
    elsewhere = build()
    elsewhere.load_state_dicts([broken.state_dict()] * 3)  # as on 3 ranks
    assert next(iter(elsewhere)).labels.tolist() == whole[2].tolist()


@pytest.mark.parametrize("divide", ["row_groups", "batches"])
@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (3, 2)])
def test_another_number_of_ranks_reads_each_sample_once(divide: str, before: int, now: int):
    data = {"seen": [[i] for i in range(40)], "ok": [0, 1] * 20}
    spec = FeatureSpec([Ids("seen", rows=40, is_list=True), Label("ok")]).fit(data)

    def build(ranks: int):
        readers = [
            datasets.table(data, spec, 4 * ranks, rank=0, world_size=1, divide=divide)
            for _ in range(ranks)
        ]
        return [BalancedBatches(reader, "seen", i, ranks) for i, reader in enumerate(readers)]

    seen: list[int] = []
    ranks = build(before)
    for batches in ranks:
        seen += next(iter(batches)).sparse_features["seen"].values().tolist()
    states = [batches.state_dict() for batches in ranks]
    for batches in build(now):
        batches.load_state_dicts(states)
        seen += [n for batch in batches for n in batch.sparse_features["seen"].values().tolist()]
    [whole] = datasets.table(data, spec, 40)
    assert sorted(seen) == sorted(whole.sparse_features["seen"].values().tolist())


def test_batches_without_a_state_are_read_again():
    """A trainer skips batches if their loader has no state."""
    assert not isinstance(BalancedBatches([], "seen"), Stateful)
    batches = ResumableBatches(
        BalancedBatches([sequences(seed, 4) for seed in range(3)], "history"), lambda step: True
    )
    for _ in zip(range(2), batches, strict=False):
        batches.trained()
    assert batches.state_dict()["loader"] is None


def test_epochs_have_other_orders():
    """Orders of a reader, of a DataLoader below, and of a batch sampler."""
    lengths = [*range(1, 25)]

    def collate(rows):
        ids = torch.cat([torch.full((length,), length) for length in rows])
        features = KeyedJaggedTensor(["seen"], ids, lengths=torch.tensor(rows))
        return Batch(torch.zeros(len(rows), 0), features, torch.tensor(rows).float())

    sampler = DistributedSampler(lengths, 1, 0, seed=1)
    of_all = DataLoader(lengths, 12, sampler=sampler, collate_fn=collate)
    of_rank = DataLoader(
        lengths, batch_sampler=BalancedSampler(lengths, 6, 0, 2, shuffle=True), collate_fn=collate
    )
    for loader in (BalancedBatches(of_all, "seen", 0, 2), of_rank):
        assert epoch_length(loader) == 2
        batches = ResumableBatches(loader, lambda step: False)
        epochs = []
        for _ in range(3):
            epochs.append([])
            for batch in batches:
                epochs[-1].append(batch.labels.tolist())
                batches.trained()
            batches.end_epoch()
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_samplers_of_all_ranks_take_each_sample_once():
    lengths = zipf_lengths(100, 50, 0)
    samplers = [BalancedSampler(lengths, 8, rank, 3, shuffle=True, seed=1) for rank in range(3)]
    taken = [list(sampler) for sampler in samplers]
    assert {len(steps) for steps in taken} == {len(samplers[0])} == {5}
    for step in range(4):
        costs = [float((lengths[steps[step]] ** 2).sum()) for steps in taken]
        assert max(costs) < max(1.05 * sum(costs) / 3, float(lengths.max()) ** 2 + 1)
        assert sum(len(steps[step]) for steps in taken) == 24
        total = sum(lengths[steps[step]].sum() for steps in taken)
        for sampler, steps in zip(samplers, taken, strict=True):
            own = lengths[steps[step]].sum() * 3 / total
            assert abs(sampler.weights(step) - own) < 1e-12
            assert abs(sampler.weights(step, "samples") - len(steps[step]) / 8) < 1e-12
    flat = [row for steps in taken for step in steps for row in step]
    assert sorted(flat) == [*range(100)]
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != taken[0]


def test_errors():
    with pytest.raises(ValueError, match="'samples' or 'values'; received 'ids'"):
        BalancedBatches([], "seen", mean_over="ids")
    for lengths, received in (
        ([1, -1], r"int64 \[2\], the least -1"),
        ([1.5, 2.0], r"float64 \[2\], the least [01]"),
        ([[1]], r"int64 \[1, 1\]"),
    ):
        with pytest.raises(ValueError, match=f"whole numbers, .* received {received}"):
            BalancedSampler(lengths, 2)
    with pytest.raises(ValueError, match=r"rank must .* 2"):
        BalancedSampler([1, 2], 2, rank=2, world_size=2)


def build() -> NextItem:
    torch.manual_seed(0)
    items = EmbeddingConfig(
        num_embeddings=ITEMS, embedding_dim=8, name="items",
        feature_names=["history", "target", "candidates"],
    )  # fmt: skip
    encoder = HSTU(8, MOST, dropout=0.0)
    return NextItem(EmbeddingCollection(tables=[items]), encoder, "full")


def train(model: torch.nn.Module, batches: list[Batch]) -> dict[str, Tensor]:
    dense = dict(in_backward_optimizer_filter(model.named_parameters())).values()
    optimizer = torch.optim.SGD(dense, lr=0.5)
    for batch in batches:
        optimizer.zero_grad()
        features = with_catalogue(batch.sparse_features, ITEMS)
        model(replace(batch, sparse_features=features))[0].backward()
        optimizer.step()
    found = {name: value.detach() for name, value in model.named_parameters() if "encoder" in name}
    module = getattr(model, "module", model)
    found["items"] = module.items(ITEMS, torch.device("cpu")).detach()
    return found


def train_balanced() -> dict[str, Tensor]:
    model = build()
    apply_optimizer_in_backward(SGD, model.embedding_collection.parameters(), {"lr": 0.5})
    model = DistributedModelParallel(model, env=ShardingEnv.default(), device=torch.device("cpu"))
    # the last batch has fewer samples than ranks
    batches = [sequences(0, 16), sequences(1, 16), sequences(2, 1)]
    return train(
        model, list(BalancedBatches(batches, "history", dist.get_rank(), dist.get_world_size()))
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_equals_one_process(ranks: RankPool, world_size: int) -> None:
    expected = train(build(), [sequences(0, 16), sequences(1, 16), sequences(2, 1)])
    for found in ranks(world_size, train_balanced):
        for name, value in expected.items():
            (own,) = (found[key] for key in found if key.endswith(name))
            torch.testing.assert_close(own, value, rtol=1e-5, atol=1e-5)
