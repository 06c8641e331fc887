"""Helpers that TorchRec cannot run on a CPU, and what holds under the compat install alone."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recsys.compat import torchrec as compat
from recsys.compat.distributed import (
    GetItemLazyAwaitable,
    LazyGetItemMixin,
    get_sharding_constructor_from_type,
    intra_and_cross_node_pg,
    sharded_model_copy,
)
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.fused_params import optimizer_of_table
from recsys.distributed.ranks.comm import (
    LazyAwaitable,
)
from recsys.distributed.types import ParameterSharding, ShardingType
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from tests.ranks import RankPool


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


def _copy() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])
    model = DistributedModelParallel(
        nn.Sequential(EmbeddingBagCollection(tables=[table]), nn.Linear(2, 2)),
        device=torch.device("cpu"),
    )
    with sharded_model_copy("cpu"):
        copied = copy.deepcopy(model)
    assert copied.device == torch.device("cpu")
    assert copied.state_dict().keys() == model.state_dict().keys()
    ours, theirs = copied.state_dict()["1.weight"], model.state_dict()["1.weight"]
    assert torch.equal(ours, theirs)
    assert ours.data_ptr() != theirs.data_ptr()


def test_a_sharded_model_is_copied(ranks: RankPool) -> None:
    ranks(1, _copy)


@pytest.mark.usefixtures("installed")
def test_without_a_name_the_optimizer_is_sgd() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    with pytest.warns(UserWarning, match="name no optimizer, and so mean SGD"):
        optimizer = optimizer_of_table(weight, {"learning_rate": 0.1})
    assert optimizer is not None
    assert (optimizer.spec.algorithm.name, optimizer.spec.learning_rate) == ("SGD", 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer_of_table(weight, {"optimizer": "EXACT_SGD", "learning_rate": 0.1})
        assert optimizer_of_table(weight, {"enforce_hbm": True}) is None


def test_a_dense_table_has_no_optimizer_of_its_sharder_under_the_install() -> None:
    weight, settings = nn.Parameter(torch.ones(3, 2)), {"optimizer": "ADAM"}
    plans = [ParameterSharding("table_wise", kernel, [0]) for kernel in ("dense", "fused")]
    assert None not in [optimizer_of_table(weight, settings, plan) for plan in plans]
    compat.install()
    try:
        found = [optimizer_of_table(weight, settings, plan) for plan in plans]
    finally:
        compat.uninstall()
    assert found[0] is None
    assert found[1] is not None


class _Entries(LazyGetItemMixin[str, int], LazyAwaitable[dict[str, int]]):
    num_waits = 0

    def __init__(self) -> None:
        super().__init__()

    def _wait_impl(self) -> dict[str, int]:
        _Entries.num_waits += 1
        return {"a": 3, "b": 4}


def test_an_entry_waits_when_it_is_used_and_once_for_all() -> None:
    _Entries.num_waits = 0
    pending = _Entries()
    one, other, missing = pending["a"], pending["b"], pending["c"]
    assert isinstance(one, GetItemLazyAwaitable)
    assert _Entries.num_waits == 0
    assert one + other == 7
    assert copy.deepcopy(one).wait() == 3
    assert _Entries.num_waits == 1
    with pytest.raises(KeyError):
        missing.wait()


def _members() -> list[list[int]]:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        groups = intra_and_cross_node_pg()
        again = intra_and_cross_node_pg(torch.device("cpu"), "gloo")
        assert all(
            mine is other for mine, other in zip(intra_and_cross_node_pg(), groups, strict=True)
        )
        found = []
        for group in (*groups, *again):
            assert group is not None
            total = torch.tensor([1 << dist.get_rank()])
            dist.all_reduce(total, group=group)  # they talk, and to the right ranks
            found.append([rank for rank in range(4) if int(total) >> rank & 1])
    return found


def test_groups_of_a_node_and_across_nodes(ranks: RankPool) -> None:
    found = ranks(4, _members)
    assert found[0] == [[0, 1], [0, 2]] * 2
    assert found[3] == [[2, 3], [1, 3]] * 2


def test_no_groups_without_processes() -> None:
    assert intra_and_cross_node_pg(torch.device("meta")) == (None, None)
    with pytest.raises(ValueError, match="needs the default process group"):
        intra_and_cross_node_pg()


def test_constructors_by_sharding_type() -> None:
    made = {kind: get_sharding_constructor_from_type(kind).__name__ for kind in ShardingType}
    assert made == {kind: kind.value for kind in ShardingType}
