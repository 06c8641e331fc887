import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.modules.sequences.bert4rec import BERT4Rec, BERTBlock
from recsys.modules.sequences.masked_item import mask_items
from recsys.optim import SGD, in_backward_optimizer_filter
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, ops
from tests.formulas import assert_follows, randomise
from tests.modules.sequences.cases import (
    DIM,
    LENGTHS,
    NUM,
    OnRows,
    by_bag,
    layer_norm,
    linear,
    softmax_attention,
)
from tests.ranks import RankPool


@by_bag
def formula(state, x):
    q, k, v = np.split(linear(state, "encoder.attention_in", x), 3, 1)
    read = linear(state, "encoder.attention_out", softmax_attention(q, k, v, 2, causal=False))
    x = layer_norm(state, "encoder.attention_norm", x + read)
    hidden = linear(state, "encoder.forward_in", x)
    hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    return layer_norm(
        state, "encoder.forward_norm", x + linear(state, "encoder.forward_out", hidden)
    )


def test_block_against_the_formula():
    torch.manual_seed(0)
    block = BERTBlock(DIM, 6, num_heads=2)
    randomise(block)
    assert_follows(OnRows(block), formula, torch.randn(NUM, DIM, dtype=torch.float64))


def batch() -> KeyedJaggedTensor:
    ids = torch.randint(0, 10, (NUM,))
    return KeyedJaggedTensor(["item"], ids, lengths=torch.tensor(LENGTHS))


def test_padded_scores_are_the_scores_of_each_value():
    model = BERT4Rec(10, 5, DIM, 2, 2).eval()
    padded, jagged = model(batch_ := batch()), model.scores(batch_).to_dense()
    assert padded.shape == (len(LENGTHS), 5, 10)
    for row, bag in zip(padded, jagged, strict=True):
        assert torch.equal(row[: len(bag)], bag)
        assert not row[len(bag) :].any()


def test_later_values_change_earlier_ones():
    model = BERT4Rec(10, 5, DIM, 2, 1).eval()
    features = batch()
    before = model.scores(features).values()
    features.values()[2] = (features.values()[2] + 1) % 10
    after = model.scores(features).values()
    assert (before != after).any(1).tolist() == [True] * 3 + [False] * (NUM - 3)


def test_masks():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 100, (3000,), generator=generator)
    lengths = torch.tensor([1] * 1000 + [0] * 5 + [20] * 100)
    x = JaggedTensor(ids, lengths=lengths)
    masked, targets = mask_items(x, 0, 0.2, generator)
    is_masked = targets >= 0
    assert torch.equal(masked.values(), ids.masked_fill(is_masked, 0))
    assert torch.equal(targets[is_masked], ids[is_masked])
    assert set(targets[~is_masked].tolist()) == {-100}
    assert is_masked[:1000].all()
    assert 0.17 < float(is_masked[1000:].float().mean()) < 0.23
    assert is_masked[1000:].view(100, 20).any(1).all()
    with pytest.raises(ValueError, match=r"0 and at most 1; .*0"):
        mask_items(x, 0, 0.0)


ITEMS, MASK = 30, 29
EXAMPLE = {"vocab_size": ITEMS, "max_len": 16, "emb_dim": 8, "nhead": 2, "num_layers": 2}
"""The arguments that TorchRec's example passes."""


def train(rank: int, world_size: int, *, sharded: bool) -> dict[str, Tensor]:
    """Train on a rank's histories, padded as in TorchRec's example, or on all ranks' histories."""
    torch.manual_seed(0)
    model: nn.Module = BERT4Rec(**EXAMPLE, dropout=0.0)
    tables = model.embedding_collection.parameters()
    if sharded:
        apply_optimizer_in_backward(SGD, tables, {"lr": 0.5})
        model = DistributedModelParallel(
            model, env=ShardingEnv.default(), device=torch.device("cpu")
        )
    dense = dict(in_backward_optimizer_filter(model.named_parameters())).values()
    optimizer = torch.optim.SGD(dense, lr=0.5)
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        lengths = torch.randint(1, 17, (6,), generator=draw)
        bags = [torch.randint(0, MASK, (int(n),), generator=draw) for n in lengths]
        of_each = [mask_items(JaggedTensor(b, lengths=n[None]), MASK, 0.3, draw)
                   for b, n in zip(bags, lengths, strict=True)]  # fmt: skip
        own = of_each[rank::world_size]
        ids = torch.cat([masked.values() for masked, _ in own])
        counts = torch.tensor([len(labels) for _, labels in own])
        scores = model(KeyedJaggedTensor(["item"], ids, lengths=counts))
        labels = ops.pad(JaggedTensor(torch.cat([labels for _, labels in own]), lengths=counts),
                         16, -100)  # fmt: skip
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            scores.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        (loss * world_size / 20).backward()
        optimizer.step()
    found = {
        name.removeprefix("module."): value.detach()
        for name, value in dict(in_backward_optimizer_filter(model.named_parameters())).items()
    }
    collection = getattr(model, "module", model).embedding_collection
    every = KeyedJaggedTensor(["item"], torch.arange(ITEMS), lengths=torch.tensor([ITEMS]))
    found["items"] = collection(every)["item"].values().detach()
    return found


def train_on_ranks() -> dict[str, Tensor]:
    return train(dist.get_rank(), dist.get_world_size(), sharded=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_by_its_example_arguments_is_unsharded(ranks: RankPool, world_size: int) -> None:
    expected = train(0, 1, sharded=False)
    for found in ranks(world_size, train_on_ranks):
        assert len(found) > 20
        for name, value in found.items():
            wanted = expected[name]
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5, msg=name)


def test_errors():
    with pytest.raises(ValueError, match="multiple of num_heads=3; received 4"):
        BERT4Rec(10, 5, DIM, 3, 1)
