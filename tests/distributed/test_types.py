"""Awaitables stand for their result; plans print and parse; the environment names the ranks."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding, rects_of
from recsys.distributed.ranks import comm
from recsys.distributed.types import (
    Awaitable,
    CacheParams,
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    LazyAwaitable,
    LazyNoWait,
    NoWait,
    ParameterSharding,
    Placement,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
    compute_kernel_to_embedding_location,
    copy_to_device,
    placement_rank,
)
from recsys.modules.embedding_configs import DataType, EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedTensor
from tests.distributed.cases import CPU, Case
from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]
VALUES = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


class Result:
    """A result that counts how often it is computed."""

    def __init__(self, value: object) -> None:
        self.value = value
        self.calls = 0

    def __call__(self) -> object:
        self.calls += 1
        return self.value


def later(value: object = VALUES) -> LazyAwaitable:
    return LazyAwaitable(Result(value))


class TestLazyAwaitable:
    def test_computes_once_and_only_when_it_must(self) -> None:
        result = Result(VALUES)
        lazy = LazyAwaitable(result)
        assert repr(lazy) == "LazyAwaitable(in progress)"
        assert result.calls == 0
        assert lazy.wait() is VALUES
        assert lazy.wait() is VALUES
        assert (lazy + 1).shape == (2, 2)
        assert result.calls == 1
        assert "tensor" in repr(lazy)

    def test_probing_does_not_wait(self) -> None:
        result = Result(VALUES)
        lazy = LazyAwaitable(result)
        assert not hasattr(lazy, "__array__")
        assert isinstance(hash(lazy), int)
        with pytest.raises(AttributeError):
            lazy.__deepcopy__
        assert result.calls == 0

    @pytest.mark.parametrize(
        "copied", [copy.copy, copy.deepcopy, lambda lazy: pickle.loads(pickle.dumps(lazy))]
    )
    def test_copies_hold_the_result(self, copied: Any) -> None:
        result = Result({"a": torch.ones(2)})
        lazy = LazyAwaitable(result)
        other = copied(lazy)
        assert isinstance(other, LazyAwaitable)
        assert other["a"].tolist() == lazy["a"].tolist() == [1, 1]
        assert result.calls == 1

    def test_is_released_from_what_it_waited_for(self) -> None:
        lazy = later()
        lazy.wait()
        assert lazy._finish is None

    @pytest.mark.parametrize(
        "use",
        [
            lambda x: x + 1,
            lambda x: 1 + x,
            lambda x: x - 3,
            lambda x: 3 - x,
            lambda x: x * 2,
            lambda x: 2 * x,
            lambda x: x / 2,
            lambda x: 2 / x,
            lambda x: x @ VALUES,
            lambda x: VALUES @ x,
            lambda x: VALUES + x,
            lambda x: VALUES - x,
            lambda x: VALUES / x,
            lambda x: x // 2,
            lambda x: 9 // x,
            lambda x: x % 2,
            lambda x: x**2,
            lambda x: 2**x,
            lambda x: abs(x),
            lambda x: -x,
            lambda x: x == 2,
            lambda x: x != 2,
            lambda x: x < 2,
            lambda x: x <= 2,
            lambda x: x > 2,
            lambda x: x >= 2,
            lambda x: x[0],
            lambda x: x[:, 1],
            lambda x: x.sum(),
            lambda x: x.T,
            lambda x: torch.sin(x),
            lambda x: torch.cat([x, VALUES]),
            lambda x: torch.stack(list(x)),
            lambda x: torch.nn.functional.linear(VALUES, x),
            lambda x: torch.add(VALUES, other=x),
            lambda x: torch.tensor(len(x)),
        ],
    )
    def test_is_used_as_the_tensor_it_stands_for(self, use) -> None:
        received = use(later())
        assert type(received) is Tensor
        torch.testing.assert_close(received, use(VALUES), rtol=0, atol=0)

    def test_masks(self) -> None:
        mask, other = VALUES > 2, VALUES < 4
        torch.testing.assert_close(later(mask) & other, mask & other)
        torch.testing.assert_close(later(mask) | other, mask | other)
        torch.testing.assert_close(later(mask) ^ other, mask ^ other)
        torch.testing.assert_close(~later(mask), ~mask)

    def test_two_of_them_meet(self) -> None:
        torch.testing.assert_close(later() + later(), VALUES + VALUES)
        torch.testing.assert_close(torch.cat([later(), later()]), torch.cat([VALUES, VALUES]))

    def test_passes_a_gradient_on(self) -> None:
        leaf = VALUES.clone().requires_grad_()
        (LazyAwaitable(lambda: leaf * 3) * 2).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [[6.0, 6.0], [6.0, 6.0]]

    def test_is_as_true_and_as_big_as_its_result(self) -> None:
        assert not later(torch.tensor([0.0]))
        assert later(torch.tensor(2.5))
        assert (int(later(torch.tensor(2))), float(later(torch.tensor(2.5)))) == (2, 2.5)
        assert 3.0 in later()
        assert 5.0 not in later()

    def test_is_written_to(self) -> None:
        values = VALUES.clone()
        later(values)[0, 1] = 7.0
        assert values[0].tolist() == [1.0, 7.0]

    def test_stands_for_any_object(self) -> None:
        tensor = KeyedTensor(keys=["a", "b"], length_per_key=[1, 1], values=VALUES)
        lazy = later(tensor)
        assert lazy.keys() == ["a", "b"]
        assert lazy["b"].tolist() == [[2.0], [4.0]]
        assert lazy.to_dict().keys() == {"a", "b"}
        with pytest.raises(AttributeError, match="no_such_name"):
            lazy.no_such_name

    def test_an_error_reaches_whoever_waits(self) -> None:
        def fail() -> Tensor:
            raise IndexError("bad id")

        lazy = LazyAwaitable(fail)
        for _ in range(2):
            with pytest.raises(IndexError, match="bad id"):
                lazy.wait()

    def test_no_wait_has_its_result(self) -> None:
        assert repr(LazyNoWait(3)) == "LazyNoWait(3)"
        assert LazyNoWait(3).wait() == 3

    def test_callbacks_change_the_result_once(self) -> None:
        lazy = later(torch.tensor(2))
        lazy.callbacks.append(lambda value: value + 1)
        lazy.callbacks.append(lambda value: value * 10)
        assert (lazy + 0).item() == 30
        assert lazy.wait().item() == 30

    def test_a_subclass_defines_how_it_waits(self) -> None:
        class Ones(LazyAwaitable[Tensor]):
            def __init__(self, size: list[int]) -> None:
                super().__init__()
                self._size = size
                self.calls = 0

            def _wait_impl(self) -> Tensor:
                self.calls += 1
                return torch.ones(self._size)

        ones = Ones([3, 2])
        assert repr(ones) == "Ones(in progress)"
        assert (ones + 1).tolist() == [[2.0, 2.0]] * 3
        assert ones.wait() is ones.wait()
        assert ones.calls == 1
        with pytest.raises(TypeError, match=r"LazyAwaitable needs a function"):
            LazyAwaitable()


class TestAwaitable:
    def test_a_subclass_defines_how_it_waits(self) -> None:
        class Three(Awaitable[int]):
            def _wait_impl(self) -> int:
                return 3

        three = Three()
        assert three.wait() == 3
        three.callbacks.append(lambda value: value + 1)
        assert three.wait() == 4
        with pytest.raises(TypeError, match="_wait_impl"):
            Awaitable()  # type: ignore[abstract]

    def test_no_wait_has_its_result(self) -> None:
        result = object()
        assert NoWait(result).wait() is result
        assert NoWait(obj=result).wait() is result


class TestPlacement:
    @pytest.mark.parametrize(
        ("placement", "rank"),
        [("rank:0/cpu", 0), ("rank:12/cuda:4", 12), ("rank:3", 3)],
    )
    def test_names_a_rank(self, placement: str, rank: int) -> None:
        assert placement_rank(placement) == rank
        shard = ShardMetadata([0, 0], [1, 1], placement)
        assert shard.rank == rank
        assert shard.placement.rank() == rank  # type: ignore[attr-defined]
        assert shard.placement == placement
        assert pickle.loads(pickle.dumps(shard)).placement.rank() == rank

    def test_names_a_device(self) -> None:
        assert Placement("rank:12/cuda:4").device() == torch.device("cuda:4")

    def test_of_torch(self) -> None:
        assert placement_rank(torch.distributed._remote_device("rank:2/cpu")) == 2

    @pytest.mark.parametrize("placement", ["cuda:1", "rank:x/cpu", "", None, "rank:-1/cpu", 1.5])
    def test_without_a_rank_is_refused(self, placement: object) -> None:
        with pytest.raises(ValueError, match=r"must be 'rank:<rank>/<device>'.*received "):
            placement_rank(placement)


class TestPlan:
    def plan(self) -> ShardingPlan:
        return ShardingPlan(
            {
                "sparse.ebc": EmbeddingModuleShardingPlan(
                    {
                        "users": parameter_sharding(ShardingType.ROW_WISE, 5, 8, [0, 1]),
                        "films": parameter_sharding(
                            ShardingType.COLUMN_WISE, 10, 8, [1, 0], device_type="cuda"
                        ),
                        "days": parameter_sharding(
                            ShardingType.DATA_PARALLEL,
                            7,
                            8,
                            [0, 1],
                            compute_kernel=EmbeddingComputeKernel.DENSE,
                        ),
                    }
                )
            }
        )

    def test_prints_as_the_table_users_know(self) -> None:
        assert str(self.plan()) == (
            "module: sparse.ebc\n"
            "param | sharding type | compute kernel | ranks\n"
            "----- | ------------- | -------------- | ------\n"
            "users | row_wise      | fused          | [0, 1]\n"
            "films | column_wise   | fused          | [1, 0]\n"
            "days  | data_parallel | dense          | [0, 1]\n"
            "\n"
            "param | shard offsets | shard sizes | placement\n"
            "----- | ------------- | ----------- | -------------\n"
            "users | [0, 0]        | [3, 8]      | rank:0/cpu\n"
            "users | [3, 0]        | [2, 8]      | rank:1/cpu\n"
            "films | [0, 0]        | [10, 4]     | rank:1/cuda:1\n"
            "films | [0, 4]        | [10, 4]     | rank:0/cuda:0"
        )

    def test_is_looked_up_by_module(self) -> None:
        plan = self.plan()
        assert plan.get_plan_for_module("sparse.ebc") is plan.plan["sparse.ebc"]
        assert plan.get_plan_for_module("sparse") is None

    def test_copies_and_pickles(self) -> None:
        for other in (copy.deepcopy(self.plan()), pickle.loads(pickle.dumps(self.plan()))):
            assert other == self.plan()
            assert str(other) == str(self.plan())

    def test_takes_enum_members(self) -> None:
        sharding = ParameterSharding(ShardingType.TABLE_WISE, EmbeddingComputeKernel.FUSED, [0])
        assert sharding == ParameterSharding("table_wise", "fused", [0])

    @pytest.mark.parametrize(
        ("ranks", "kind", "message"),
        [
            ("0", TypeError, "ranks must .*received '0'"),
            (0, TypeError, "ranks must .*received 0"),
            ([0.0], TypeError, r"ranks\[0\] must .*received 0\.0"),
            ([0, True], TypeError, r"ranks\[1\] must .*received True"),
            ([-1], ValueError, r"ranks\[0\] must .*received -1"),
        ],
    )
    def test_refuses_what_is_no_rank(self, ranks: Any, kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=f"ParameterSharding.{message}"):
            ParameterSharding("table_wise", "fused", ranks=ranks)

    @pytest.mark.parametrize(
        ("offsets", "sizes", "kind", "message"),
        [
            ([0], [4, 4], ValueError, r"shard_offsets must .*received \[0\]"),
            ([0, 0], [4], ValueError, r"shard_sizes must .*received \[4\]"),
            ([0, 0], [-4, 4], ValueError, r"shard_sizes\[0\] must .*received -4"),
            ([0, 0], [4.0, 4], TypeError, r"shard_sizes\[0\] must be .*number; .* 4\.0"),
            (["0", 0], [4, 4], TypeError, r"shard_offsets\[0\] must be .*whole number; .*'0'"),
            ("00", [4, 4], TypeError, "shard_offsets must be .*whole numbers; .*'00'"),
        ],
    )
    def test_refuses_what_is_no_shard(
        self, offsets: Any, sizes: Any, kind: type[Exception], message: str
    ) -> None:
        with pytest.raises(kind, match=f"ShardMetadata.{message}"):
            ShardMetadata(offsets, sizes, "rank:0/cpu")
        shard = ShardMetadata([0, 0], [4, 4], "rank:0/cpu")
        shard.shard_offsets, shard.shard_sizes = offsets, sizes
        placed = ParameterSharding("row_wise", "fused", None, EnumerableShardingSpec([shard]))
        at_use = message.replace("shard_offsets", "shard_offsets of table 't'")
        at_use = at_use.replace("shard_sizes", "shard_sizes of table 't'")
        with pytest.raises(kind, match=at_use):
            rects_of("t", 4, 4, placed, world_size=1)

    def test_takes_numpys_numbers(self) -> None:
        placed = ParameterSharding("table_wise", "fused", ranks=np.arange(1))  # type: ignore[arg-type]
        assert placed == ParameterSharding("table_wise", "fused", ranks=[0])

    def test_refuses_unknown_words(self) -> None:
        known = ", ".join(kind.value for kind in ShardingType)
        with pytest.raises(ValueError, match=f"sharding_type must be .*{known}; .*'tw'"):
            ParameterSharding("tw", "fused")
        with pytest.raises(ValueError, match=r"compute_kernel must be .*quant; .*'gpu'"):
            ParameterSharding("table_wise", "gpu")


def _default_env() -> tuple[int, int]:
    env = ShardingEnv.default()
    assert env.process_group is torch.distributed.group.WORLD
    return env.rank, env.world_size


class TestCacheParams:
    def test_what_means_nothing_warns_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("recsys.distributed.placement.plan._warned_of", set())
        assert CacheParams(None, 0.5, prefetch_pipeline=False).load_factor == 0.5
        with pytest.warns(UserWarning, match=r"CacheParams.reserved_memory .* 8.0"):
            CacheParams(reserved_memory=8.0)
        with pytest.warns(UserWarning, match=r"CacheParams.algorithm .*'LFU'"):
            assert CacheParams("LFU", 0.5).load_factor == 0.5
        CacheParams("LRU", reserved_memory=1.0)  # a warning is an error in tests

    @pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
    def test_a_load_factor_is_a_share(self, share: float) -> None:
        with pytest.raises(ValueError, match=r"load_factor must be .*0, 1\]; received"):
            CacheParams(load_factor=share)

    def test_it_reaches_the_lookup(self) -> None:
        config = EmbeddingBagConfig(8, 4, "t", feature_names=["f"])
        ebc = EmbeddingBagCollection(tables=[config])
        for cache, share in ((None, None), (CacheParams(load_factor=0.5), 0.5)):
            placed = parameter_sharding(ShardingType.TABLE_WISE, 8, 4, [0])
            placed.cache_params = cache
            sharded = EmbeddingBagCollectionSharder().shard(ebc, {"t": placed}, ShardingEnv(1, 0))
            assert sharded.layout.tables[0].group.cache_load_factor == share


as_in_streams = mock.patch.object(ShardingEnv, "exchanges_in_streams", True)
"""Exchanges as over NCCL: over gloo no groups are made beside the given one."""


@as_in_streams
def _groups_of_lopsided_ranks(members: list[int]) -> bool | None:
    """Ranks 0 and 1 are in a group that rank 2 is not in; then some exchange ids."""
    dist.new_group([0, 1])
    given = dist.new_group(members) if len(members) < 3 else dist.group.WORLD
    if dist.get_rank() not in members:
        return None
    assert given is not None
    env = ShardingEnv.from_process_group(given)
    own = torch.full((len(members),), float(env.rank))
    sizes = [1] * len(members)
    received = comm.all_to_all(env.for_ids, "try", own, sizes, sizes).wait()
    assert received.tolist() == list(range(len(members)))
    if env.for_ids is env:  # and it must not be used by two threads
        with pytest.raises(ValueError, match="received a group of 2 ranks"):
            env.for_saves()
    else:
        assert env.for_saves().process_group is not env.process_group
    return env.for_ids is not env


def _groups_of_lopsided_nodes() -> None:
    """The first ranks of two nodes are in one group more than the others; then nodes sum up."""
    dist.new_group([0, 2])
    rank, whole = dist.get_rank(), ShardingEnv.default()
    half = dist.new_group([0, 1])
    if rank < 2:
        with pytest.raises(ValueError, match=r"Ranks \[0, 1\] of 2 .*groups"):
            ShardingEnv.from_process_group(half).of_node(2)
    for _ in range(2):
        node = whole.of_node(2)
        found = torch.tensor([rank])
        dist.all_reduce(found, group=node.process_group)
        assert found.item() == (1 if rank < 2 else 5)
    assert whole.of_node(2).process_group is node.process_group


def _groups_that_some_ranks_know() -> None:
    """Ranks 0 and 1 have made the group of their node before all ranks of the job ask."""
    assert dist.group.WORLD is not None
    timeout = dist.group.WORLD._get_backend(CPU).options._timeout
    half = dist.new_group([0, 1], timeout=timeout, use_local_synchronization=True)
    if dist.get_rank() < 2:
        known = ShardingEnv.from_process_group(half).of_node(2).process_group
    node = ShardingEnv.default().of_node(2)
    found = torch.tensor([dist.get_rank()])
    dist.all_reduce(found, group=node.process_group)
    if dist.get_rank() < 2:
        assert node.process_group is known
    assert found.item() == (1 if dist.get_rank() < 2 else 5)


@as_in_streams
def _groups_of_all_ranks() -> None:
    """The job's own group, and others of all ranks with its timeout."""
    assert dist.group.WORLD is not None
    env = ShardingEnv.default()
    made = [env.for_ids.process_group, env.for_embeddings.process_group]
    num_groups = len(dist.distributed_c10d._world.pg_map)
    for _ in range(2):
        again = dist.new_group(timeout=dist.group.WORLD._get_backend(CPU).options._timeout)
        other = ShardingEnv.from_process_group(again)
        assert [other.for_ids.process_group, other.for_embeddings.process_group] == made
        dist.destroy_process_group(again)
    assert len(dist.distributed_c10d._world.pg_map) == num_groups


@as_in_streams
def _groups_of_exchanges(members: list[int]) -> None:
    """Two models over some of the ranks; the others take no part in anything."""
    parent = dist.new_group(members, timeout=timedelta(seconds=50), use_local_synchronization=True)
    if dist.get_rank() not in members:
        return
    num_groups = len(dist.distributed_c10d._world.pg_map)
    env = ShardingEnv.from_process_group(parent)
    case = Case(7, world_size=2, types=(ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL))
    used: dict[str, set[Any]] = {}

    def noted(real: Any) -> Any:
        def call(env: ShardingEnv, what: str, *args: Any, **kwargs: Any) -> Any:
            used.setdefault(what, set()).add(env.process_group)
            return real(env, what, *args, **kwargs)

        return call

    with (
        mock.patch.object(comm, "all_to_all", noted(comm.all_to_all)),
        mock.patch.object(comm, "all_reduce", noted(comm.all_reduce)),
    ):
        for _ in range(2):
            model = DistributedModelParallel(case.model(), env=env, device=CPU, plan=case.plan())
            model(case.batches(0)[env.rank])[1].sum().backward()
    ids = used.pop("exchange id counts")
    assert ids == used.pop("send ids to their owners")
    embeddings = used.pop("send embeddings back")
    assert embeddings == used.pop("send gradients to the tables")
    assert embeddings == used.pop("add up gradients of replicated tables")
    assert not used
    (of_ids,), (of_embeddings,) = ids, embeddings  # one each, for both models
    assert len({parent, of_ids, of_embeddings}) == 3
    for group in of_ids, of_embeddings:
        assert dist.get_process_group_ranks(group) == members
        assert group._get_backend(CPU).options._timeout == timedelta(seconds=50)
        assert str(dist.get_backend_config(group)) == str(dist.get_backend_config(parent))
    # these two, and one for asynchronous saves
    assert len(dist.distributed_c10d._world.pg_map) == num_groups + 3
    # another group of these ranks does not make them again: their names would be taken
    again = dist.new_group(members, timeout=timedelta(seconds=50), use_local_synchronization=True)
    dist.destroy_process_group(parent)
    assert ShardingEnv.from_process_group(again).for_ids.process_group is of_ids


class TestEnv:
    def test_without_a_process_group(self) -> None:
        for env in (ShardingEnv.default(), ShardingEnv.from_local()):
            assert (env.rank, env.world_size, env.process_group) == (0, 1, None)

    def test_one_of_several_processes_needs_a_process_group(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match=r"WORLD_SIZE=2.*init_process_group.*from_local\(\)"):
            ShardingEnv.default()
        assert ShardingEnv.from_local().world_size == 1
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert ShardingEnv.default().world_size == 1

    def test_of_the_default_process_group(self, ranks: RankPool) -> None:
        assert ranks(2, _default_env) == [(0, 2), (1, 2)]

    @pytest.mark.parametrize("members", [[0, 1], [0, 2]])
    def test_ids_and_embeddings_have_groups_of_their_own(
        self, ranks: RankPool, members: list[int]
    ) -> None:
        ranks(3, _groups_of_exchanges, members)

    def test_groups_of_all_ranks_are_made_once(self, ranks: RankPool) -> None:
        ranks(2, _groups_of_all_ranks)

    @pytest.mark.parametrize("members", [[0, 1, 2], [1, 2]])
    def test_groups_are_made_where_ranks_are_in_unequally_many(
        self, ranks: RankPool, members: list[int]
    ) -> None:
        found = ranks(3, _groups_of_lopsided_ranks, members)
        # a part of the ranks stays in the group it was given
        assert found == [None if rank not in members else len(members) == 3 for rank in range(3)]

    @pytest.mark.parametrize("of_all", [_groups_of_lopsided_nodes, _groups_that_some_ranks_know])
    def test_nodes_have_groups_where_ranks_are_in_unequally_many(
        self, ranks: RankPool, of_all: Callable[[], None]
    ) -> None:
        ranks(4, of_all)

    @as_in_streams
    def test_a_part_of_a_bound_job_makes_no_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bound = SimpleNamespace(bound_device_id=torch.device("cuda", 0), size=lambda: 4)
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=bound))
        for members in ([0, 1], [3, 2]):  # and none where the new one would number them otherwise
            monkeypatch.setattr(dist, "get_process_group_ranks", lambda group, m=members: m)
            env = ShardingEnv(1, 0)
            env.world_size, env.process_group = 2, object()  # type: ignore[assignment]
            assert env.for_ids is env
            assert env.for_embeddings is env
            bound.bound_device_id = None

    def test_refuses_what_cannot_be(self) -> None:
        with pytest.raises(ValueError, match=r"rank must be in .*received rank=2"):
            ShardingEnv(world_size=2, rank=2)
        with pytest.raises(ValueError, match="needs a process group for world_size=2"):
            ShardingEnv(world_size=2, rank=0)


def test_where_the_rows_of_a_kernel_lie() -> None:
    found = {
        kernel.name: compute_kernel_to_embedding_location(kernel).name
        for kernel in EmbeddingComputeKernel
    }
    assert found == {
        "DENSE": "DEVICE",
        "FUSED": "DEVICE",
        "FUSED_UVM": "MANAGED",
        "FUSED_UVM_CACHING": "MANAGED_CACHING",
        "QUANT": "DEVICE",
    }
    with pytest.raises(ValueError, match=r"compute_kernel must be .*; received 'ssd'"):
        compute_kernel_to_embedding_location("ssd")  # type: ignore[arg-type]


def test_a_copy_moves_what_lies_on_one_device() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    cpu, meta = torch.device("cpu"), torch.device("meta")
    stayed = copy_to_device(model, meta, cpu)  # modules on meta have nothing to move
    assert [p.device.type for p in stayed.parameters()] == ["cpu", "cpu", "meta", "meta"]
    moved = copy_to_device(model, cpu, meta)
    assert {p.device.type for p in moved.parameters()} == {"meta"}
    assert model[0].weight.device == cpu


def test_an_output_dtype_is_a_dtype_however_given() -> None:
    placed = ParameterSharding("table_wise", "fused", [0], output_dtype=DataType.FP16)
    assert placed.output_dtype is torch.float16


ENDS_AT_ONCE = """
import os, threading, time, torch.distributed as dist
from recsys.distributed.types import ShardingEnv
ShardingEnv(world_size=2, rank=0, pg=dist.ProcessGroup(0, 2))
go_on = threading.Event()
def drop_what_was_exchanged():
    go_on.wait()
    time.sleep(0.03)
    os.write(1, b"dropped")
threading.Thread(target=drop_what_was_exchanged, daemon=True).start()
time.sleep(0.1)
go_on.set()
"""


def test_a_process_that_ends_lets_threads_of_its_groups_finish() -> None:
    command = [sys.executable, "-W", "ignore", "-c", ENDS_AT_ONCE]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout == "dropped", done.stderr
