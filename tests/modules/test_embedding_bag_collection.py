from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recsys.features import FeatureSpec, Hashed
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from recsys.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
)
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor

TABLES = [
    EmbeddingBagConfig(20, 4, "users", feature_names=["user", "friend"]),
    EmbeddingBagConfig(30, 8, "films", feature_names=["liked"], pooling=PoolingType.MEAN),
    EmbeddingBagConfig(25, 4, "bias", feature_names=["user"], data_type=DataType.FP16),
    EmbeddingBagConfig(10, 3, "genres", feature_names=["genre"]),
]


def batch(
    keys: tuple[str, ...] = ("genre", "user", "unused", "friend", "liked"),
    batch_size: int = 3,
    seed: int = 0,
    weighted: bool = False,
    dtype: torch.dtype = torch.int64,
) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * batch_size,), generator=generator)
    count = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.randint(0, 10, (count,), generator=generator).to(dtype),
        lengths=lengths,
        weights=torch.rand(count, generator=generator) if weighted else None,
    )


def reference(
    tables: list[EmbeddingBagConfig],
    weights: dict[str, torch.Tensor],
    features: KeyedJaggedTensor,
    is_weighted: bool = False,
) -> torch.Tensor:
    """One nn.functional.embedding per bag."""
    columns = []
    for config in tables:
        for name in config.feature_names:
            jagged = features[name]
            bounds = jagged.offsets().tolist()
            bags = []
            for start, end in itertools.pairwise(bounds):
                rows = weights[config.name][jagged.values()[start:end].long()].float()
                if is_weighted:
                    rows = rows * jagged.weights()[start:end].unsqueeze(1)
                pooled = rows.sum(0)
                if config.pooling is PoolingType.MEAN:
                    pooled = pooled / max(1, end - start)
                bags.append(pooled)
            columns.append(torch.stack(bags))
    return torch.cat(columns, 1)


def weights_of(ebc: EmbeddingBagCollection) -> dict[str, torch.Tensor]:
    return {name: table.weight for name, table in ebc.embedding_bags.items()}  # type: ignore[misc]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_forward_and_gradients_equal_a_loop(weighted: bool, dtype: torch.dtype) -> None:
    ebc = EmbeddingBagCollection(tables=TABLES, is_weighted=weighted)
    features = batch(weighted=weighted, dtype=dtype)
    out = ebc(features)
    copies = {n: w.detach().clone().requires_grad_() for n, w in weights_of(ebc).items()}
    expected = reference(TABLES, copies, features, weighted)
    torch.testing.assert_close(out.values(), expected)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    out.values().backward(grad)
    expected.backward(grad)
    for name, weight in weights_of(ebc).items():
        torch.testing.assert_close(weight.grad, copies[name].grad)


def test_output_names_and_order() -> None:
    ebc = EmbeddingBagCollection(tables=TABLES)
    out = ebc(batch())
    assert out.keys() == ["user@users", "friend", "liked", "user@bias", "genre"]
    assert out.length_per_key() == [4, 4, 8, 4, 3]
    assert out.values().dtype is torch.float32
    assert ebc.embedding_names == out.keys()
    assert ebc.embedding_bag_configs() == TABLES
    assert not ebc.is_weighted()
    assert isinstance(ebc, EmbeddingBagCollectionInterface)


def test_parameters_are_real_and_appear_once() -> None:
    ebc = EmbeddingBagCollection(tables=TABLES)
    names = [f"embedding_bags.{c.name}.weight" for c in TABLES]
    assert [n for n, _ in ebc.named_parameters()] == names
    assert list(ebc.state_dict()) == names
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in ebc.parameters())
    assert ebc.embedding_bags["films"].weight.shape == (30, 8)


def test_tables_alike_are_one_lookup() -> None:
    tables = [EmbeddingBagConfig(10, d, f"t{d}", feature_names=[f"f{d}"]) for d in (4, 8, 16)]
    ebc = EmbeddingBagCollection(tables=tables)
    assert len(ebc._current_lookups().groups) == 1
    features = batch(keys=("f4", "f8", "f16"))
    assert ebc(features).values().shape == (3, 28)


def test_keys_in_lookup_order_are_not_copied() -> None:
    ebc = EmbeddingBagCollection(tables=TABLES[:1])
    features = batch(keys=("user", "friend"))
    (group,) = ebc._current_lookups().groups
    assert group.selector.select(features.parts(), None).indices is features.values()


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
)
def test_any_torch_optimizer_trains_the_tables(optimizer) -> None:  # type: ignore[no-untyped-def]
    tables = [TABLES[0], TABLES[1], TABLES[3]]
    ebc = EmbeddingBagCollection(tables=tables)
    copies = {n: nn.Parameter(w.detach().clone()) for n, w in weights_of(ebc).items()}
    ours, theirs = optimizer(ebc.parameters()), optimizer(copies.values())
    for step in range(3):
        features = batch(seed=step)
        ours.zero_grad()
        theirs.zero_grad()
        ebc(features).values().square().sum().backward()
        reference(tables, copies, features).square().sum().backward()
        ours.step()
        theirs.step()
    for name, weight in weights_of(ebc).items():
        torch.testing.assert_close(weight, copies[name])


def test_frozen_tables_get_no_gradient() -> None:
    ebc = EmbeddingBagCollection(tables=TABLES)
    ebc.embedding_bags["users"].weight.requires_grad_(False)
    ebc(batch()).values().sum().backward()
    assert ebc.embedding_bags["users"].weight.grad is None
    assert ebc.embedding_bags["films"].weight.grad is not None
    ebc.requires_grad_(False)
    assert not ebc(batch()).values().requires_grad


def test_eval_and_train_give_the_same_values() -> None:
    ebc = EmbeddingBagCollection(tables=TABLES)
    expected = ebc(batch()).values()
    with torch.no_grad():
        assert torch.equal(ebc.eval()(batch()).values(), expected)
    assert torch.equal(ebc.train()(batch()).values(), expected)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), fused=st.booleans())
def test_batches_of_different_keys_and_sizes_follow_each_other(seed: int, fused: bool) -> None:
    ebc = EmbeddingBagCollection(tables=TABLES[:2])
    if fused:
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
    for step, keys in enumerate(
        [("user", "friend", "liked"), ("liked", "user", "friend"), ("friend", "liked", "x", "user")]
    ):
        features = batch(keys=keys, batch_size=1 + (seed + step) % 4, seed=seed + step)
        before = {n: w.detach().clone() for n, w in weights_of(ebc).items()}
        out = ebc(features).values()
        torch.testing.assert_close(out, reference(TABLES[:2], before, features))
        out.sum().backward()


def test_batches_with_a_size_per_key_are_expanded() -> None:
    ebc = EmbeddingBagCollection(tables=TABLES[:2])
    features = KeyedJaggedTensor(
        keys=["user", "friend", "liked"],
        values=torch.tensor([1, 2, 3, 4, 5, 6]),
        lengths=torch.tensor([1, 1, 2, 2]),
        stride_per_key_per_rank=[[2], [1], [1]],
        inverse_indices=(
            ["user", "friend", "liked"],
            torch.tensor([[0, 1, 0], [0, 0, 0], [0, 0, 0]]),
        ),
    )
    plain = KeyedJaggedTensor(
        keys=["user", "friend", "liked"],
        values=torch.tensor([1, 2, 1, 3, 4, 3, 4, 3, 4, 5, 6, 5, 6, 5, 6]),
        lengths=torch.tensor([1, 1, 1, 2, 2, 2, 2, 2, 2]),
    )
    out = ebc(features).values()
    torch.testing.assert_close(out, ebc(plain).values())
    out.sum().backward()
    users = ebc.embedding_bags["users"].weight.grad
    assert users[1].eq(2).all()
    assert users[3].eq(3).all()


def test_a_size_per_key_without_inverse_indices_raises() -> None:
    ebc = EmbeddingBagCollection(tables=TABLES[:2])
    features = KeyedJaggedTensor(
        keys=["user", "friend", "liked"],
        values=torch.tensor([1, 2, 3, 4]),
        lengths=torch.tensor([1, 1, 1, 1]),
        stride_per_key_per_rank=[[2], [1], [1]],
    )
    with pytest.raises(
        ValueError, match=r"needs inverse_indices.*stride_per_key=\[2, 1, 1\] and none"
    ):
        ebc(features)


# -- bad input --------------------------------------------------------------------------------


def test_a_missing_feature_is_named() -> None:
    ebc = EmbeddingBagCollection(tables=TABLES[:2])
    missing = r"\['liked'\].* tables \['films'\].*\['user', 'friend'\]"
    with pytest.raises(KeyError, match=missing):
        ebc(batch(keys=("user", "friend")))


def test_float_ids_raise() -> None:
    ebc = EmbeddingBagCollection(tables=TABLES[:1])
    features = KeyedJaggedTensor(
        keys=["user", "friend"], values=torch.ones(2), lengths=torch.tensor([1, 1])
    )
    with pytest.raises(TypeError, match=r"received torch\.float32 .*with \.long\(\)"):
        ebc(features)


def test_missing_weights_raise_and_superfluous_ones_are_ignored() -> None:
    weighted = EmbeddingBagCollection(tables=TABLES, is_weighted=True)
    assert weighted.is_weighted()
    with pytest.raises(ValueError, match=r"EmbeddingBagCollection .*needs one weight per id"):
        weighted(batch())
    plain = EmbeddingBagCollection(tables=TABLES)
    with_weights, without = batch(weighted=True), batch()
    assert torch.equal(with_weights.values()[:3], without.values()[:3])
    plain(with_weights)


def test_a_batch_on_another_device_raises() -> None:
    ebc = EmbeddingBagCollection(tables=TABLES[:1], device=torch.device("meta"))
    with pytest.raises(ValueError, match=r"tables on meta; .*on cpu"):
        ebc(batch())


@pytest.mark.parametrize("bad", [20, -1])
def test_a_bad_id_raises_before_anything_is_read_or_written(bad: int) -> None:
    ebc = EmbeddingBagCollection(tables=TABLES[:1])
    features = KeyedJaggedTensor(
        keys=["user", "friend"],
        values=torch.tensor([1, 2, bad]),
        lengths=torch.tensor([1, 0, 0, 2]),
    )
    message = rf"^Id {bad} .*'friend' .*'users' .*sample 1\."
    with pytest.raises(IndexError, match=message):
        ebc(features)


def test_bounds_check_modes() -> None:
    features = KeyedJaggedTensor(
        keys=["user", "friend"], values=torch.tensor([99, 2]), lengths=torch.tensor([1, 1])
    )
    zero = KeyedJaggedTensor(
        keys=["user", "friend"], values=torch.tensor([0, 2]), lengths=torch.tensor([1, 1])
    )
    warns = EmbeddingBagCollection(tables=TABLES[:1], bounds_check_mode=BoundsCheckMode.WARNING)
    with pytest.warns(UserWarning, match="Id 99 .*Row 0 is read"):
        out = warns(features)
    assert torch.equal(out.values(), warns(zero).values())
    silent = EmbeddingBagCollection(tables=TABLES[:1], bounds_check_mode=BoundsCheckMode.IGNORE)
    assert torch.equal(silent(features).values(), silent(zero).values())
    trusting = EmbeddingBagCollection(tables=TABLES[:1], bounds_check_mode=BoundsCheckMode.NONE)
    assert torch.equal(trusting(zero).values(), reference(TABLES[:1], weights_of(trusting), zero))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([TABLES[0], TABLES[0]], r"different names; received \['users'\] more"),
        ([EmbeddingBagConfig(3, 4, "t")], "table 't' needs feature_names"),
        ([EmbeddingBagConfig(3, 4, "", feature_names=["f"])], "must have a name without dots"),
        (
            FeatureSpec([Hashed("b.c", rows=9)]).tables(4),
            r"received 'b\.c'.*another table=\.\.\.",
        ),
        (
            [EmbeddingBagConfig(3, 4, "t", DataType.INT8, ["f"])],
            r"table 't' .*\['FP32', 'FP16', 'BF16'\]; .*INT8",
        ),
        (
            [EmbeddingBagConfig(3, 4, "t", feature_names=["f"], pooling=PoolingType.NONE)],
            r"received PoolingType\.NONE for table 't'",
        ),
    ],
)
def test_bad_tables_raise(tables: list[EmbeddingBagConfig], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingBagCollection(tables=tables)


def test_on_meta_the_output_has_its_shape() -> None:
    meta = torch.device("meta")
    collection = EmbeddingBagCollection(tables=TABLES, device=meta)
    keys = [f for config in TABLES for f in config.feature_names]
    keys = list(dict.fromkeys(keys))
    batch = KeyedJaggedTensor(
        keys, torch.arange(2 * len(keys)), lengths=torch.ones(2 * len(keys), dtype=torch.int64)
    )
    pooled = collection(batch.to(meta))
    expected = EmbeddingBagCollection(tables=TABLES)(batch)
    assert pooled.values().is_meta
    assert pooled.values().shape == expected.values().shape
    assert (pooled.keys(), pooled.length_per_key()) == (expected.keys(), expected.length_per_key())
    with pytest.raises(ValueError, match=r"tables on meta; .*on cpu"):
        collection(batch)


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_one_table_looks_up_as_nn_embedding_bag(pooling: PoolingType) -> None:
    table = EmbeddingBagConfig(30, 4, "films", feature_names=["film"], pooling=pooling)
    bags = EmbeddingBagCollection(tables=[table]).embedding_bags["films"]
    same = nn.EmbeddingBag(30, 4, mode=pooling.name.lower())
    same.load_state_dict(bags.state_dict())
    ids, offsets = torch.tensor([3, 3, 29, 0]), torch.tensor([0, 2, 2])
    for inputs in [(ids, offsets), (ids.reshape(2, 2),)]:
        torch.testing.assert_close(bags(*inputs), same(*inputs), rtol=0, atol=0)
    for found in (bags, same):
        found(ids, offsets).square().sum().backward()
    torch.testing.assert_close(bags.weight.grad, same.weight.grad)
    if pooling is PoolingType.SUM:
        weights = torch.rand(4)
        weighted = bags(ids, offsets, weights), same(ids, offsets, weights)
        torch.testing.assert_close(*weighted, rtol=0, atol=0)


def test_one_table_that_is_updated_in_backward_is_only_read() -> None:
    table = EmbeddingBagConfig(30, 4, "films", feature_names=["film"])
    collection = EmbeddingBagCollection(tables=[table])
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    bags = collection.embedding_bags["films"]
    with pytest.raises(ValueError, match="optimizer in backward is trained"):
        bags(torch.tensor([[1]]))
    with torch.no_grad():
        torch.testing.assert_close(bags(torch.tensor([[1]])), bags.weight[1:2])
