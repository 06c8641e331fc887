"""Dense parts: which are replicated, in which buckets, and what stays each rank's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recsys.distributed.data_parallel import DefaultDataParallelWrapper
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.shard import exclude_sharded_from_ddp
from recsys.distributed.types import LazyAwaitable
from recsys.optim import RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor, KeyedTensor
from tests.distributed.cases import CPU, FEATURES, EachType, Model, train
from tests.ranks import RankPool


def case_of(world_size: int) -> EachType:
    return EachType(1, world_size, optimizer=RowWiseAdagrad)


class _Unused(Model):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unused = nn.Linear(1, 1)


def _leave_unused() -> None:
    case = case_of(2)
    model = _Unused(case)
    wrapper = DefaultDataParallelWrapper(find_unused_parameters=True, bucket_cap_mb=1)
    sharded = DistributedModelParallel(
        model, device=CPU, plan=case.plan(), data_parallel_wrapper=wrapper
    )
    train(case, sharded, range(3), rank=dist.get_rank())


def test_settings_reach_data_parallel(ranks: RankPool) -> None:
    ranks(2, _leave_unused)


class _Unusual(_Unused):
    """A model whose output is not a tensor."""

    def __init__(self, output: str, *args: Any) -> None:
        super().__init__(*args)
        self.output = output

    def forward(self, features: KeyedJaggedTensor) -> Any:
        pooled = self.ebc(features).values()

        def finish() -> KeyedTensor:
            return KeyedTensor(["x"], [3], self.over(pooled))

        if self.output == "keyed":
            return finish()
        return LazyAwaitable(finish) if self.output == "pending" else {"a": LazyAwaitable(finish)}


def _gradients_of(output: str, setting: str) -> list[bool]:
    case, equal = case_of(2), []
    model = DistributedModelParallel(
        _Unusual(output, case),
        device=CPU,
        plan=case.plan(),
        data_parallel_wrapper=DefaultDataParallelWrapper(**{setting: True}),
    )
    weight = model.module.over.weight
    for step in range(1, 4):
        weight.grad = None
        keyed = model(case.batches(step)[dist.get_rank()])
        keyed = keyed["a"] if output == "in_dict" else keyed
        assert isinstance(keyed, KeyedTensor)
        keyed["x"].sum().backward()
        grads = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(grads, weight.grad)
        assert grads[0].abs().sum() > 0
        equal.append(torch.equal(*grads))
    return equal


@pytest.mark.parametrize("output", ["keyed", "pending", "in_dict"])
@pytest.mark.parametrize("setting", ["find_unused_parameters", "static_graph"])
def test_parameters_are_found_behind_any_output(ranks: RankPool, output: str, setting: str) -> None:
    assert ranks(2, _gradients_of, output, setting, timeout=20.0) == [[True] * 3] * 2


class _Normalized(Model):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm = nn.BatchNorm1d(self.over.in_features)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled = self.norm(self.ebc(features).values())
        return pooled, self.over(pooled)


def _running_means(broadcast_buffers: bool | None) -> Tensor:
    case, rank = case_of(2), dist.get_rank()
    model = DistributedModelParallel(
        _Normalized(case),
        device=CPU,
        plan=case.plan(),
        data_parallel_wrapper=DefaultDataParallelWrapper(broadcast_buffers=broadcast_buffers),
    )
    for _ in range(2):
        ids = torch.arange(rank, rank + 8) % 12
        batch = KeyedJaggedTensor(FEATURES, ids, lengths=torch.ones(8, dtype=torch.int64))
        model(batch)[1].sum().backward()
    model.eval()
    model(batch)
    return model.module.norm.running_mean.clone()


@pytest.mark.parametrize(
    ("broadcast_buffers", "same"), [(None, True), (True, True), (False, False)]
)
def test_running_statistics_are_those_of_rank_0(
    ranks: RankPool, broadcast_buffers: bool | None, same: bool
) -> None:
    means = ranks(2, _running_means, broadcast_buffers, timeout=20.0)
    assert means[0].abs().sum() > 0
    assert torch.equal(*means) is same


def _update_dense_in_backward() -> str:
    case = case_of(2)
    model = case.model()
    apply_optimizer_in_backward(torch.optim.SGD, model.over.parameters(), {"lr": 0.1})
    try:
        DistributedModelParallel(model, device=CPU, plan=case.plan())
    except ValueError as error:
        return str(error)
    return ""


def test_dense_parts_keep_their_gradients(ranks: RankPool) -> None:
    for message in ranks(2, _update_dense_in_backward):
        assert "updated in backward: ['over.weight', 'over.bias']" in message


# -- buckets ---------------------------------------------------------------------------------------


class _Deep(nn.Module):
    """Layers whose gradients become ready in another order than the parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(400, 1)
        self.layers = nn.ModuleList(nn.Linear(400, 400) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x).relu()
        return self.last(x).squeeze(-1)  # type: ignore[no-any-return]


def _resume(settings: dict[str, Any]) -> bool:
    """Return True if a model rebuilt between two steps trains like one that is kept."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = DistributedModelParallel(
            _Deep(), device=CPU, data_parallel_wrapper=DefaultDataParallelWrapper(**settings)
        )
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(16, 400, generator=generator)).pow(2).mean().backward()
        optimizer.step()

    model, optimizer = build()
    for number in range(2):
        step(model, optimizer, number)
    restarted, its_optimizer = build()
    restarted.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(2, 5):
        step(model, optimizer, number)
        step(restarted, its_optimizer, number)
    ours, theirs = model.state_dict(), restarted.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "settings",
    [{}, {"bucket_cap_mb": 1}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=str,
)
def test_a_restarted_job_repeats_steps_to_the_bit(
    ranks: RankPool, settings: dict[str, Any]
) -> None:
    assert ranks(3, _resume, settings) == [True] * 3


def _sizes_of_buckets(is_of_torch: bool, finds_unused: bool) -> list[list[int]]:
    """The sizes of the buckets in the first three steps."""
    settings: Any = {"bucket_cap_mb": 1, "find_unused_parameters": finds_unused}
    if is_of_torch:
        wrapped = DistributedDataParallel(_Deep(), **settings)
    else:
        wrapper = DefaultDataParallelWrapper(**settings)
        model = DistributedModelParallel(_Deep(), device=CPU, data_parallel_wrapper=wrapper)
        wrapped = model._dmp_wrapped_module
    sizes: list[list[int]] = []

    def hook(_: None, bucket: Any) -> Any:
        sizes[-1].append(bucket.buffer().numel())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__ = {  # as it asks for
        "bucket": dist.GradBucket,
        "return": torch.futures.Future[Tensor],
    }
    wrapped.register_comm_hook(None, hook)
    for _ in range(3):
        sizes.append([])
        wrapped(torch.ones(2, 400)).sum().backward()
    return sizes


def test_all_steps_have_the_same_buckets(ranks: RankPool) -> None:
    for sizes in ranks(2, _sizes_of_buckets, False, False):
        assert len(sizes[0]) > 2  # the exchange begins before backward ends
        assert sizes[0] == sizes[1] == sizes[2]


def test_buckets_that_torch_keeps_stay(ranks: RankPool) -> None:
    def sizes(is_of_torch: bool) -> list[list[int]]:
        ours, _ = ranks(2, _sizes_of_buckets, is_of_torch, True)
        return ours

    expected = sizes(is_of_torch=True)
    assert len(expected[0]) > 2
    assert sizes(is_of_torch=False) == expected


# -- parts left alone ------------------------------------------------------------------------------


def _keep_own(how: str) -> list[float]:
    case = case_of(2)
    model = case.model()
    nn.init.constant_(model.over.weight, float(dist.get_rank()))
    wrapper = DefaultDataParallelWrapper()
    if how == "argument":
        wrapper = DefaultDataParallelWrapper(params_to_ignore=["over.weight"])
    else:
        ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, ["over.weight"])
    if how == "plain":  # the model is wrapped by its owner
        exclude_sharded_from_ddp(model)
        wrapped: nn.Module = DistributedDataParallel(model)
        return [float(wrapped.module.over.weight.detach().mean())]
    sharded = DistributedModelParallel(
        model, device=CPU, plan=case.plan(), data_parallel_wrapper=wrapper
    )
    return [float(sharded.module.over.weight.detach().mean())]


@pytest.mark.parametrize("how", ["argument", "attribute", "plain"])
def test_parameters_may_stay_each_ranks_own(ranks: RankPool, how: str) -> None:
    assert ranks(2, _keep_own, how) == [[0.0], [1.0]]


def _ignore_an_unknown_name() -> str:
    case = case_of(2)
    wrapper = DefaultDataParallelWrapper(params_to_ignore=["over.wait"])
    with pytest.raises(ValueError, match="params_to_ignore") as caught:
        DistributedModelParallel(
            case.model(), device=CPU, plan=case.plan(), data_parallel_wrapper=wrapper
        )
    return str(caught.value)


def test_unknown_names_to_ignore_are_refused(ranks: RankPool) -> None:
    for message in ranks(2, _ignore_an_unknown_name):
        assert "['over.wait']" in message
