from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.modules.sequences import losses
from recsys.modules.sequences.gru4rec import GRU4Rec
from recsys.modules.sequences.hstu import HSTU
from recsys.modules.sequences.next_item import NextItem, with_catalogue
from recsys.modules.sequences.sasrec import SASRec
from recsys.optim import SGD, in_backward_optimizer_filter
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import JaggedTensor, KeyedJaggedTensor
from tests.ranks import RankPool

ITEMS, DIM = 20, 8
FEATURES = ["history", "target", "candidates", "times"]
LOSSES = ["full", "sampled", "in_batch", "bpr", "binary"]


def encoder(kind: str) -> nn.Module:
    if kind == "hstu":
        return HSTU(DIM, 9, num_heads=2, dropout=0.0, has_time=True)
    return {"sasrec": SASRec, "gru4rec": GRU4Rec}[kind](DIM, 9, dropout=0.0)


def build(loss: str, kind: str = "hstu", log_q: Tensor | None = None) -> NextItem:
    items = EmbeddingConfig(
        num_embeddings=ITEMS, embedding_dim=DIM, name="items", feature_names=FEATURES[:3]
    )
    torch.manual_seed(0)
    return NextItem(
        EmbeddingCollection(tables=[items]), encoder(kind), loss, times="times", log_q=log_q
    )


def samples(seed: int, size: int = 6) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return histories, targets, two candidates for each value, and times."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(size):
        length = int(torch.randint(0, 9, (), generator=draw))
        ids = torch.randint(0, ITEMS, (4, length), generator=draw)
        others = torch.randint(0, ITEMS, (2 * length,), generator=draw)
        times = torch.randint(0, 10**6, (length,), generator=draw).sort().values
        found.append((ids[0], ids[1], others, times))
    return found


def batch(rows: list[tuple[Tensor, ...]], loss: str) -> KeyedJaggedTensor:
    names = [name for name in FEATURES if name != "candidates" or loss != "full"]
    parts = [[row[FEATURES.index(name)] for row in rows] for name in names]
    lengths = torch.tensor([len(bag) for part in parts for bag in part])
    ids = torch.cat([bag for part in parts for bag in part])
    features = KeyedJaggedTensor(names, ids, lengths=lengths)
    return with_catalogue(features, ITEMS) if loss == "full" else features


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_a_batch(loss):
    log_q = torch.randn(ITEMS) if loss in ("sampled", "in_batch") else None
    model = build(loss, log_q=log_q)
    rows = samples(1)
    features = batch(rows, loss)
    mean, (detached, users, ids) = model(features)
    assert torch.equal(users, model.users(features))
    assert torch.equal(
        model.items(ITEMS, users.device), model.embedding_collection.embeddings["items"].weight
    )
    table = model.embedding_collection.embeddings["items"].weight
    targets = torch.cat([row[1] for row in rows])
    assert torch.equal(ids, targets)
    history = JaggedTensor(features["history"].values(), lengths=features["history"].lengths())
    embedded = JaggedTensor(table[history.values()], lengths=history.lengths())
    queries = model.encoder(embedded, torch.cat([row[3] for row in rows])).values()
    others = torch.cat([row[2] for row in rows])
    if loss == "full":
        expected = losses.full_softmax_loss(queries, table, targets)
    elif loss == "sampled":
        given = queries, table[targets], table[others], targets, others, log_q
        expected = losses.sampled_softmax_loss(*given)
    elif loss == "in_batch":
        expected = losses.in_batch_softmax_loss(queries, table[targets], targets, log_q)
    else:
        negative = (queries.unsqueeze(1) * table[others].view(len(ids), 2, DIM)).sum(2)
        function = losses.bpr_loss if loss == "bpr" else losses.binary_loss
        expected = function((queries * table[targets]).sum(1), negative)
    torch.testing.assert_close(mean, expected.mean())
    assert torch.equal(detached, mean)
    mean.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("loss", LOSSES)
def test_batch_without_values(loss):
    empty = torch.zeros(0, dtype=torch.int64)
    model = build(loss, "gru4rec")
    mean, _ = model(batch([(empty, empty, empty, empty)] * 2, loss))
    assert mean.item() == 0
    mean.backward()


def test_users_are_the_last_vectors():
    model = build("in_batch").eval()
    rows = samples(2)
    features = batch(rows, "in_batch")
    vectors = model.users(features)
    for row, vector in zip(rows, vectors, strict=True):
        if not len(row[0]):
            assert not vector.any()
            continue
        alone = model.users(batch([row], "in_batch"))[0]
        torch.testing.assert_close(vector, alone)
    assert vectors.shape == (len(rows), DIM)


def test_special_rows_are_no_items():
    model = build("in_batch")
    (config,) = model.embedding_collection.embedding_configs()
    config.num_special_rows = 2
    assert model.special_ids().tolist() == [0, 1]
    vectors = model.items(9, torch.device("cpu"))
    weight = model.embedding_collection.embeddings[config.name].weight
    assert vectors[:2].isneginf().all()
    assert torch.equal(vectors[2:], weight[2:9])


def test_errors():
    with pytest.raises(ValueError, match=r"loss must be .*in_batch.*'hinge'"):
        build("hinge")
    with pytest.raises(ValueError, match="loss 'full' does not read log_q"):
        build("full", log_q=torch.zeros(ITEMS))
    two, one = torch.arange(2), torch.arange(1)
    for others in ((two, two), (torch.arange(3), one), (torch.arange(5), one), (two[:0], one[:0])):
        rows = [(bag, bag, other, bag) for bag, other in zip((two, one), others, strict=True)]
        with pytest.raises(ValueError, match=f"{len(others[0])} for 2.*bag 0|of bag 1"):
            build("bpr")(batch(rows, "bpr"))
    rows = [(two, two, two, one), (one, one, one, two)]
    with pytest.raises(ValueError, match=r"received 2 and 1.*bag 0"):
        build("in_batch")(batch(rows, "in_batch"))
    rows = samples(3)
    features = batch([(row[0], row[1][1:], row[2], row[3]) for row in rows], "in_batch")
    with pytest.raises(ValueError, match="lengths must be equal"):
        build("in_batch")(features)


def train(model: nn.Module, steps: list[list[KeyedJaggedTensor]]) -> list[Tensor]:
    """Train by the mean loss of the batches of each step; return the losses after each step."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters())).values()
    optimizer = torch.optim.SGD(dense, lr=0.1)
    found = []
    for batches in steps:
        optimizer.zero_grad()
        losses_of = [model(features)[0] for features in batches]
        torch.stack(losses_of).mean().backward()
        optimizer.step()
        found.append(torch.stack(losses_of).detach())
    return found


def train_on_ranks(kind: str) -> list[Tensor]:
    """Train 3 steps, with a batch of each rank."""
    model = build("full", kind)
    apply_optimizer_in_backward(SGD, model.embedding_collection.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(model, env=ShardingEnv.default(), device=torch.device("cpu"))
    rank = dist.get_rank()
    return train(model, [[batch(samples(3 * step + rank), "full")] for step in range(3)])


@pytest.mark.parametrize("kind", ["hstu", "sasrec", "gru4rec"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_is_unsharded(ranks: RankPool, kind: str, world_size: int) -> None:
    steps = [
        [batch(samples(3 * step + rank), "full") for rank in range(world_size)] for step in range(3)
    ]
    model = build("full", kind)
    expected = train(model, steps)
    for rank, found in enumerate(ranks(world_size, train_on_ranks, kind)):
        of_rank = [losses_of[rank : rank + 1] for losses_of in expected]
        torch.testing.assert_close(found, of_rank, rtol=1e-5, atol=1e-5)
