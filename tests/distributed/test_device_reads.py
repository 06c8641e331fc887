"""On a GPU the host waits once a step, for the header; with one rank it need not.

Seen on a device that is pretended.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.ranks.wire import (
    CommType,
    QCommsConfig,
    WireFormat,
    get_qcomm_codecs_registry,
)
from recsys.distributed.shard import shard
from recsys.distributed.sharding_plan import data_parallel, row_wise, table_wise
from recsys.distributed.stages import input_dist
from recsys.distributed.stages.input_dist import InputDist, start_together
from recsys.distributed.train_pipeline.even_batches import EvenBatches
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recsys.kernels import ops
from recsys.kernels.types import BoundsCheckMode, EmbOptimType, UpdateMode
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.tables import batch_checker
from recsys.optim import RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.needs_triton import needs_triton
from tests.pretended_cuda import CUDA, PretendedCuda
from tests.ranks import RankPool

CPU = torch.device("cpu")
ROWS, SAMPLES = 40, 5
S = ShardingType


@dataclass(frozen=True)
class Plan:
    """The sharded tables and their strategies; the strategies take turns among the tables."""

    types: tuple[ShardingType, ...]
    kind: str = "pooled"
    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    dims: tuple[int, ...] = (8, 4)
    twice: bool = False  # whether each feature is read by two tables
    means: tuple[bool, ...] = (False,)  # whether tables average; they take turns
    deferred: bool = False
    wire: CommType = CommType.FP32
    alone: bool = False  # whether there is one rank
    keys: str = "more"  # than tables read; one rank's may be "as they are", or "reversed"
    told: bool = False  # whether the host knows how many ids each feature has
    halves: bool = False  # whether one rank has the rows of a table in two shards
    by_id: bool = False  # whether bags are taken for short
    nodes: bool = False  # whether there are four ranks, on two nodes

    @property
    def name(self) -> str:
        types = "+".join(t.value for t in self.types)
        rest = [self.kind, self.optimizer.name, "twice" * self.twice, "mean" * any(self.means)]
        rest += ["deferred" * self.deferred, str(self.wire) * (self.wire is not CommType.FP32)]
        rest += [self.keys * self.alone, "told" * self.told, "halves" * self.halves]
        rest += ["".join(map(str, self.dims)) * (len(self.dims) > 2)]
        rest += ["by_id" * self.by_id, "nodes" * self.nodes]
        return "-".join(filter(None, [types, *rest]))

    def owners(self, kind: ShardingType, table: int) -> list[int]:
        """The ranks of a table."""
        if self.alone:
            return [0, 0] if self.halves else [0]
        if self.nodes and kind is not S.TABLE_ROW_WISE:
            return [table % 4] if kind is S.TABLE_WISE else [0, 1, 2, 3]
        first = 2 * (table % 2) if self.nodes else 0
        return [table % 2] if kind is S.TABLE_WISE else [first, first + 1]


ALL = (S.TABLE_WISE, S.ROW_WISE, S.COLUMN_WISE, S.DATA_PARALLEL, S.GRID_SHARD)
PLANS = [
    *(Plan((kind,)) for kind in (*ALL, S.TABLE_ROW_WISE, S.TABLE_COLUMN_WISE)),
    *(Plan(ALL, kind) for kind in ("pooled", "weighted", "variable")),
    *(Plan(ALL, kind, dims=(8,)) for kind in ("sequence", "distinct")),
    *(Plan((kind,), "sequence", dims=(8,)) for kind in (S.ROW_WISE, S.COLUMN_WISE)),
    *(Plan((kind,), "distinct", dims=(8,)) for kind in (S.ROW_WISE, S.TABLE_WISE)),
    Plan((S.ROW_WISE, S.TABLE_WISE), twice=True),
    Plan((S.ROW_WISE,), "sequence", dims=(8,), twice=True),
    Plan((S.COLUMN_WISE,), "sequence", dims=(12, 12, 12)),  # in parts of 4 and of 8
    Plan(ALL, means=(True,)),
    Plan(ALL, told=True),
    Plan(ALL, deferred=True),
    *(Plan(ALL, kind, dims=(8,), wire=CommType.FP16) for kind in ("pooled", "sequence")),
    Plan((S.DATA_PARALLEL, S.ROW_WISE, S.COLUMN_WISE), optimizer=EmbOptimType.ADAM),
    Plan((S.DATA_PARALLEL, S.ROW_WISE, S.TABLE_WISE), optimizer=EmbOptimType.LAMB),
    Plan((S.COLUMN_WISE, S.DATA_PARALLEL), optimizer=EmbOptimType.PARTIAL_ROWWISE_ADAM),
    Plan((S.COLUMN_WISE, S.DATA_PARALLEL), optimizer=EmbOptimType.SGD),
]
BY_ID = [
    Plan((S.ROW_WISE,), by_id=True),
    *(Plan(ALL, kind, by_id=True) for kind in ("pooled", "weighted", "variable")),
    Plan(ALL, means=(True,), by_id=True),
    Plan((S.ROW_WISE, S.TABLE_WISE), twice=True, deferred=True, by_id=True),
]


class Model(nn.Module):
    """A collection, and the sum of its outputs, weighted so that gradients differ."""

    def __init__(self, plan: Plan, device: str = "meta") -> None:
        super().__init__()
        self.output: Tensor
        self.sequence = plan.kind in ("sequence", "distinct")
        features = {f"t{i}": [f"f{i % 4 if plan.twice else i}"] for i in range(6)}
        if plan.keys == "more":
            features["t5"].append("f0")
        torch.manual_seed(0)
        dims = plan.dims * 6
        if self.sequence:
            self.tables: nn.Module = EmbeddingCollection(
                tables=[
                    EmbeddingConfig(ROWS, dims[i], name, feature_names=names)
                    for i, (name, names) in enumerate(features.items())
                ],
                device=torch.device(device),
            )
        else:
            self.tables = EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        ROWS,
                        dims[i],
                        name,
                        feature_names=names,
                        pooling=PoolingType.MEAN if means else PoolingType.SUM,
                    )
                    for i, (name, names) in enumerate(features.items())
                    for means in [plan.means[i % len(plan.means)]]
                ],
                is_weighted=plan.kind == "weighted",
                device=torch.device(device),
            )

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        found = self.tables(batch)
        parts = [jagged.values() for jagged in found.values()] if self.sequence else []
        values = torch.cat(parts) if parts else found.values()
        self.output = values.detach()
        return (values * values).sum()


def _batch(plan: Plan, step: int, device: torch.device, samples: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    keys = ["unread"] * (plan.keys == "more") + [f"f{i}" for i in range(6)]
    if plan.keys == "reversed":
        keys.reverse()
    is_variable = plan.kind == "variable"
    strides = [max(1, samples - 3 * (i % 2)) if is_variable else samples for i in range(len(keys))]
    lengths = torch.randint(0, 4, (sum(strides),), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(values.numel(), generator=generator)
    batch = KeyedJaggedTensor(
        keys,
        values,
        weights if plan.kind == "weighted" else None,
        lengths,
        stride_per_key=strides if is_variable else None,
        inverse_indices=(keys, torch.stack([torch.arange(samples) % n for n in strides]))
        if is_variable
        else None,
    )
    moved = batch.to(device)
    if not plan.told:  # as if it were made there
        moved.unsync()
    if plan.kind == "weighted":
        moved.weights().requires_grad_()
    return moved


def _train(
    plan: Plan, device: torch.device, samples: Sequence[int], after_step: Callable[[int], None]
) -> dict[str, Tensor]:
    sharder_type = EmbeddingCollectionSharder if Model(plan).sequence else None
    fused: dict[str, object] = {"optimizer": plan.optimizer, "learning_rate": 0.1}
    if plan.optimizer is not EmbOptimType.SGD:
        fused["eps"] = 1e-3
    if plan.deferred:
        fused["update_mode"] = UpdateMode.DEFERRED
    narrow = QCommsConfig(
        forward_precision=plan.wire, backward_precision=plan.wire, backward_loss_scale=8.0
    )
    codecs = get_qcomm_codecs_registry(narrow)
    if sharder_type is None:
        sharder: object = EmbeddingBagCollectionSharder(fused, qcomm_codecs_registry=codecs)
    else:
        is_distinct = plan.kind == "distinct"
        sharder = sharder_type(fused, qcomm_codecs_registry=codecs, use_index_dedup=is_distinct)
    model = Model(plan)
    tables: EmbeddingBagCollection = model.tables  # type: ignore[assignment]
    shardings = EmbeddingModuleShardingPlan(
        {
            config.name: parameter_sharding(
                kind,
                config.num_embeddings,
                config.embedding_dim,
                plan.owners(kind, i),
            )
            for i, config in enumerate(tables.configs())
            for kind in [plan.types[i % len(plan.types)]]
        }
    )
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"tables": shardings}),
        sharders=[sharder],  # type: ignore[list-item]
    )
    found: dict[str, Tensor] = {}
    for step, number in enumerate(samples):
        batch = _batch(plan, step, device, number)
        after_step(-1)
        sharded(batch).backward()
        if plan.deferred:
            sharded.fused_optimizer.step()
        after_step(step)
        _keep(found, step, model, batch)
    return found | {name: parameter.detach() for name, parameter in sharded.named_parameters()}


def _keep(found: dict[str, Tensor], step: int, model: Model, batch: KeyedJaggedTensor) -> None:
    """Keeps the output of a step, and the gradients of weights."""
    found[f"output of step {step}"] = model.output
    weights = batch.weights_or_none()
    if weights is not None:
        assert weights.grad is not None
        found[f"gradients of weights of step {step}"] = weights.grad


def _train_unsharded(plan: Plan, samples: Sequence[int]) -> dict[str, Tensor]:
    """Do the same as `_train` on one rank, on the CPU."""
    model, found = Model(plan, "cpu"), dict[str, Tensor]()
    optimizer = {EmbOptimType.ADAM: torch.optim.Adam}.get(plan.optimizer, RowWiseAdagrad)
    settings = {"lr": 0.1, "eps": 1e-3}
    apply_optimizer_in_backward(optimizer, model.parameters(), settings)
    for step, number in enumerate(samples):
        batch = _batch(plan, step, CPU, number)
        model(batch).backward()
        _keep(found, step, model, batch)
    return found | {name: parameter.detach() for name, parameter in model.named_parameters()}


def _read_once(plan: Plan, triton: bool) -> list[tuple[str, str, str]]:
    """Checks the device's results against the CPU's; returns the notes of the last step."""
    samples = [SAMPLES, SAMPLES, SAMPLES]
    if plan.alone and not plan.halves:
        expected = _train_unsharded(plan, samples)
    else:
        expected = _train(plan, CPU, samples, lambda step: None)
    decode = mock.patch.object(WireFormat, "decode", autospec=True, side_effect=WireFormat.decode)
    short = mock.patch.multiple(input_dist, _MAX_IDS=1e9 if plan.by_id else -1, _MIN_VALUES=0)
    told = mock.patch.object(batch_checker, "check_length_per_key")
    with short, PretendedCuda(triton) as cuda, decode as decoded, told as checked:

        def after_step(step: int) -> None:
            if step < 0:
                cuda.forget()

        found = _train(plan, CUDA, samples, after_step)
        notes = list(cuda.notes)
    is_pooled = plan.kind not in ("sequence", "distinct")
    assert ("make_safe" in cuda.launched) is triton
    assert checked.called is (plan in TOLD_PARTS)  # unused sizes cost nothing
    lays_out = triton and is_pooled and not plan.alone
    if triton and not plan.alone:
        ragged = "_ragged" * (plan.kind == "variable" or plan.by_id)
        rows = ragged if is_pooled else "_rows"
        assert {f"gather{rows}", f"scatter_grad{rows}"} <= cuda.launched
    if plan.wire is not CommType.FP32:  # of gradients, and of embeddings where no kernel does it
        assert decoded.call_count == len(samples) * (1 if lays_out else 2)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    return notes


def _read_once_on_nodes(plan: Plan, triton: bool) -> list[tuple[str, str, str]]:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        return _read_once(plan, triton)


SEQUENCES = [plan for plan in PLANS if plan.kind in ("sequence", "distinct")]
MOVED = [plan for plan in SEQUENCES if plan.types != (S.TABLE_WISE,) and plan.types != ALL]
BY_TRITON = [*PLANS[:4], *(plan for plan in PLANS if plan.types == ALL), *PLANS[-4:], *MOVED]


@pytest.mark.parametrize(
    ("plan", "triton"),
    [
        *(pytest.param(plan, False, id=plan.name) for plan in PLANS),
        *(
            pytest.param(plan, True, id=f"{plan.name}-triton", marks=needs_triton)
            for plan in [*BY_TRITON, *BY_ID]
        ),
    ],
)
def test_a_step_waits_for_the_device_once(ranks: RankPool, plan: Plan, triton: bool) -> None:
    for notes in ranks(2, _read_once, plan, triton):
        assert [kind for kind, _, _ in notes] == ["read"], notes
        assert "input_dist.py" in notes[0][2]


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("beside", [(), (S.TABLE_WISE,)], ids=["hops", "hops and others"])
def test_sums_of_two_nodes_wait_for_the_device_once(
    ranks: RankPool, beside: tuple[ShardingType, ...], triton: bool
) -> None:
    plan = Plan((S.TABLE_ROW_WISE, S.GRID_SHARD, *beside), nodes=True)
    for notes in ranks(4, _read_once_on_nodes, plan, triton):
        assert [kind for kind, _, _ in notes] == ["read"], notes


AS_IT_IS = Plan((S.TABLE_WISE,), dims=(8,), alone=True, keys="as they are")
WHOLE = [  # each lookup reads every feature once
    *(
        Plan((S.TABLE_WISE, S.ROW_WISE, S.COLUMN_WISE), kind, dims=(8,), alone=True, keys=keys)
        for kind in ("pooled", "weighted", "variable")
        for keys in ("as they are", "reversed")
    ),
    replace(AS_IT_IS, deferred=True),
    replace(AS_IT_IS, means=(True,), optimizer=EmbOptimType.ADAM),
    replace(AS_IT_IS, types=(S.DATA_PARALLEL,)),
    replace(AS_IT_IS, types=(S.DATA_PARALLEL,), keys="reversed", kind="weighted"),
]
PARTS = [  # the host must know how many ids each feature has
    replace(AS_IT_IS, kind="sequence"),
    replace(AS_IT_IS, kind="sequence", keys="reversed"),
    replace(AS_IT_IS, kind="sequence", keys="more"),
    replace(AS_IT_IS, kind="distinct", keys="more"),
    replace(AS_IT_IS, kind="sequence", types=(S.COLUMN_WISE, S.DATA_PARALLEL), keys="more"),
    replace(AS_IT_IS, dims=(4, 4, 4, 8, 8, 8)),
    replace(AS_IT_IS, dims=(4, 8, 4), keys="reversed", kind="weighted"),
    replace(AS_IT_IS, means=(True, False)),
    replace(AS_IT_IS, types=(S.TABLE_WISE, S.DATA_PARALLEL)),
    *(replace(AS_IT_IS, kind=kind, keys="more") for kind in ("pooled", "weighted", "variable")),
    replace(AS_IT_IS, twice=True),
    Plan(ALL, "variable", alone=True),
    Plan(ALL, "weighted", means=(False, True), deferred=True, alone=True),
]
TOLD_PARTS = [replace(plan, told=True) for plan in PARTS]
HALVES = replace(AS_IT_IS, types=(S.ROW_WISE,), halves=True)  # it must know more than that


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize(
    "plan",
    [*WHOLE, *(replace(plan, told=True) for plan in WHOLE), *TOLD_PARTS],
    ids=lambda plan: plan.name,
)
def test_a_step_of_one_rank_waits_for_nothing(ranks: RankPool, plan: Plan, triton: bool) -> None:
    assert ranks(1, _read_once, plan, triton) == [[]]


@pytest.mark.parametrize(
    "plan",
    [*PARTS, HALVES, replace(HALVES, told=True)],
    ids=lambda plan: plan.name,
)
def test_one_rank_waits_once_where_the_host_needs_counts(ranks: RankPool, plan: Plan) -> None:
    (notes,) = ranks(1, _read_once, plan, False)
    assert [kind for kind, _, _ in notes] == ["read"], notes


LENGTHS = torch.tensor([1, 0, 2, 1])
BATCHES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "lengths": ({"lengths": LENGTHS}, [1, 3]),
    "offsets": ({"offsets": ops.complete_cumsum(LENGTHS)}, [1, 3]),
    "lengths by feature": ({"lengths": LENGTHS, "stride_per_key": [3, 1]}, [3, 1]),
    "offsets by feature": (
        {"offsets": ops.complete_cumsum(LENGTHS), "stride_per_key": [3, 1]},
        [3, 1],
    ),
    "no samples": ({"values": torch.arange(0), "lengths": LENGTHS[:0]}, [0, 0]),
    "no features": ({"keys": [], "values": torch.arange(0), "lengths": LENGTHS[:0]}, []),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_that_leaves_the_cpu_knows_its_sizes(kind: str) -> None:
    parts, sizes = BATCHES[kind]
    batch = KeyedJaggedTensor(**{"keys": ["f", "g"], "values": torch.arange(4), **parts})
    with PretendedCuda() as cuda:
        moved = batch.to(CUDA)
        assert moved.length_per_key_or_none() == sizes
        assert moved.to(CUDA).length_per_key() == sizes
        assert {kind for kind, _, _ in cuda.notes} == {"upload"}  # and nothing was read
    assert batch.length_per_key_or_none() is None
    if "offsets" in parts:  # which are all that is kept, and copied
        assert batch.lengths_or_none() is None
        assert moved.lengths_or_none() is None


def test_a_buffer_that_is_filled_anew_tells_the_sizes_of_today() -> None:
    lengths = torch.tensor([1, 0, 2, 1])
    buffer = KeyedJaggedTensor(["f", "g"], torch.arange(4), lengths=lengths)
    with PretendedCuda():
        assert buffer.to(CUDA).length_per_key() == [1, 3]
        lengths.copy_(torch.tensor([0, 3, 1, 0]))
        assert buffer.to(CUDA).length_per_key() == [3, 1]
    assert buffer.length_per_key() == [3, 1]


def test_sizes_are_noted_only_where_they_can_be_and_are_of_use() -> None:
    unfit = [
        KeyedJaggedTensor.from_parts(["f"], torch.arange(4), None, torch.tensor(lengths), stride=2)
        for lengths in ([1, 4], [1, 2, 1])
    ]
    good = _good()
    assert good.to("cpu").length_per_key_or_none() is None
    assert good.to("meta").length_per_key_or_none() is None
    with PretendedCuda() as cuda:
        for bad in unfit:
            assert bad.to(CUDA).length_per_key_or_none() is None
        there = good.to(CUDA).unsync()
        assert there.to(CUDA).length_per_key_or_none() is None
        assert there.to("cuda:0").length_per_key_or_none() is None
        assert {kind for kind, _, _ in cuda.notes} == {"upload"}  # and nothing was read


def _leave_one_rank_out(plan: Plan) -> list[tuple[str, str, str]]:
    with PretendedCuda() as cuda:
        _train(plan, CUDA, [SAMPLES, 0 if dist.get_rank() else SAMPLES], lambda step: None)
        return list(cuda.notes)


@pytest.mark.parametrize("kind", ["pooled", "sequence", "distinct"])
def test_a_rank_without_samples_launches_no_empty_kernel(ranks: RankPool, kind: str) -> None:
    for notes in ranks(2, _leave_one_rank_out, Plan((S.ROW_WISE,), kind, dims=(8,))):
        assert "launch" not in {what for what, _, _ in notes}, notes


def _unchecked(lengths: list[int] | None, offsets: list[int]) -> KeyedJaggedTensor:
    """A batch as it may be built on a device: features of one and of two samples."""
    return KeyedJaggedTensor.from_parts(
        ["f", "g"],
        torch.tensor([1, 2, 0]),
        None,
        None if lengths is None else torch.tensor(lengths),
        torch.tensor(offsets),
        stride=2,
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["f", "g"], torch.tensor([[0, 0], [1, 0]])),
    )


FAULTS = {
    "lengths": (
        lambda: KeyedJaggedTensor(
            ["f", "g"], torch.tensor([1, 2, 0]), lengths=torch.tensor([2, -1, 2, 0])
        ),
        'lengths must not be negative; received length -1 at bag 1 of feature "f"',
    ),
    "offsets": (
        lambda: KeyedJaggedTensor(
            ["f", "g"], torch.tensor([1, 2, 0]), offsets=torch.tensor([0, 900_000, 2, 3, 3])
        ),
        'received length -899998 at bag 1 of feature "f"',
    ),
    "inverse": (
        lambda: KeyedJaggedTensor(
            ["f", "g"],
            torch.tensor([1, 2, 0]),
            lengths=torch.ones(3, dtype=torch.int64),
            stride_per_key=[1, 2],
            inverse_indices=(["f", "g"], torch.tensor([[0, 0], [1, 7]])),
        ),
        'inverse_indices of feature "g" must be in 0..1; received 7',
    ),
    "ids": (
        lambda: KeyedJaggedTensor(
            ["f", "g"], torch.tensor([1, 2, 30]), lengths=torch.tensor([1, 1, 1, 0])
        ),
        "Id 30 at position 0 of feature 'g' must be from 0 to 2. Table 'u' has 3 rows",
    ),
    "lengths of batch sizes of their own": (
        lambda: KeyedJaggedTensor(
            ["f", "g"],
            torch.tensor([1, 2, 0]),
            lengths=torch.tensor([2, -1, 2]),
            stride_per_key=[1, 2],
            inverse_indices=(["f", "g"], torch.tensor([[0, 0], [1, 0]])),
        ),
        'lengths must not be negative; received length -1 at bag 0 of feature "g"',
    ),
    "offsets of batch sizes of their own": (
        lambda: _unchecked(lengths=None, offsets=[1, 2, 2, 4]),
        "offsets must run from 0 to at most the number of values, 3; received offsets from 1 to 4",
    ),
    "lengths and offsets of batch sizes of their own": (
        lambda: _unchecked(lengths=[1, 0, 2], offsets=[0, 1, 2, 3]),
        'of 1 at bag 0 of feature "g"',
    ),
    "ids of batch sizes of their own": (
        lambda: KeyedJaggedTensor(
            ["f", "g"],
            torch.tensor([1, 2, 30]),
            lengths=torch.tensor([1, 0, 2]),
            stride_per_key=[1, 2],
            inverse_indices=(["f", "g"], torch.tensor([[0, 0], [1, 0]])),
        ),
        "Id 30 at position 1 of feature 'g' must be from 0 to 2. Table 'u' has 3 rows",
    ),
}


def _bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(3, 4, name, feature_names=[feature])
            for name, feature in (("t", "f"), ("u", "g"))
        ],
        device=torch.device("meta"),
    )


def _look_up_fault(fault: str, triton: bool) -> str:
    with PretendedCuda(triton):
        plan = EmbeddingModuleShardingPlan(
            t=parameter_sharding(S.TABLE_WISE, 3, 4, [0]),
            u=parameter_sharding(S.ROW_WISE, 3, 4, [0, 1]),
        )
        sharded = DistributedModelParallel(
            _bags(),
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CUDA,
            plan=ShardingPlan({"": plan}),
        )
        good = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
        batch = FAULTS[fault][0]() if dist.get_rank() else good
        try:
            sharded(batch.to(CUDA))
        except (ValueError, IndexError) as error:
            said = str(error)
        else:
            said = "no error"
        assert sharded(good.to(CUDA)).values().shape == (1, 8)
    return said


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_batch_on_a_device_is_raised_on_all(
    ranks: RankPool, fault: str, triton: bool
) -> None:
    first, second = ranks(2, _look_up_fault, fault, triton)
    assert first == second
    assert first.startswith("On rank 1: ")
    assert FAULTS[fault][1] in first


def _alone(mode: BoundsCheckMode = BoundsCheckMode.FATAL) -> ShardedEmbeddingBagCollection:
    plan = {"t": table_wise(rank=0), "u": row_wise()}
    tables = _bags()
    tables._bounds_check_mode = mode
    return shard(tables, plan, ShardingEnv.from_local(), CUDA)  # type: ignore[return-value]


def _good(ids: Sequence[int] = (1, 2)) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f", "g"], torch.tensor(ids), lengths=torch.tensor([1, 1]))


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("by", ["a later batch", "check_ids", "its own batch"])
def test_a_bad_batch_of_one_rank_is_raised_later(fault: str, by: str, triton: bool) -> None:
    bad, text = FAULTS[fault]
    with PretendedCuda(triton) as cuda:
        tables = _alone()
        good, batch = _good().to(CUDA), bad().to(CUDA)
        tables(good)
        cuda.forget()
        if by != "its own batch":
            cuda.is_behind = True
            found = tables(batch).values()
            # index tensors of its shape are made
            assert {kind for kind, _, _ in cuda.notes} <= {"upload"}
            assert found.shape[1] == 8
            assert bool(torch.isfinite(found).all())  # nothing foreign was read
            tables(good)  # the report of the bad batch has not arrived
        cuda.is_behind = by == "check_ids"
        tell = {
            "a later batch": lambda: tables(good),
            "check_ids": tables.check_ids,
            "its own batch": lambda: tables(batch),
        }[by]
        with pytest.raises((ValueError, IndexError), match=text) as raised:
            tell()
        assert str(raised.value).startswith("On rank 0: ")
        tables.check_ids()  # the error was already raised
        assert tables(good).values().shape == (1, 8)


def _with_parts(batch: KeyedJaggedTensor, sizes: list[int] | None) -> KeyedJaggedTensor:
    """A batch with the given sizes, right or wrong."""
    parts = batch.parts()._replace(length_per_key=sizes)._asdict()
    return KeyedJaggedTensor.from_parts(**parts)


TOLD: dict[str, tuple[Callable[[], KeyedJaggedTensor], list[int], str]] = {
    "lengths": (FAULTS["lengths"][0], [1, 2], FAULTS["lengths"][1]),
    "lengths and sizes": (FAULTS["lengths"][0], [2, 1], FAULTS["lengths"][1]),
    "offsets": (FAULTS["offsets"][0], [2, 1], FAULTS["offsets"][1]),
    "inverse": (FAULTS["inverse"][0], [1, 2], FAULTS["inverse"][1]),
    "ids": (FAULTS["ids"][0], [2, 1], "Id 30 at position 0 of feature 'g' .* Table 't'"),
    "sizes and inverse": (FAULTS["inverse"][0], [2, 1], "length_per_key must agree with lengths"),
    "sizes": (
        lambda: KeyedJaggedTensor(
            ["f", "g"], torch.tensor([1, 2, 0]), lengths=torch.tensor([1, 0, 1, 1])
        ),
        [3, 0],
        r"length_per_key must agree with lengths; received \[3, 0\] for \[1, 2\]",
    ),
}
PLANS_OF_TWO = {
    "widths": {"t": table_wise(rank=0), "u": table_wise(rank=0)},
    "replicas": {"t": table_wise(rank=0), "u": data_parallel()},
    "sequence": {"t": table_wise(rank=0), "u": table_wise(rank=0)},
    "sequence replicas": {"t": table_wise(rank=0), "u": data_parallel()},
}


def _two_tables(kind: str, features: str = "gf") -> tuple[Any, ShardedEmbeddingBagCollection]:
    """Two tables, unsharded and sharded, which read a feature each."""
    dims = (4, 8) if kind == "widths" else (4, 4)
    is_sequence = kind.startswith("sequence")
    config: Any = EmbeddingConfig if is_sequence else EmbeddingBagConfig
    collection: Any = EmbeddingCollection if is_sequence else EmbeddingBagCollection
    tables = collection(
        tables=[
            config(3, dim, name, feature_names=[feature])
            for dim, name, feature in zip(dims, "tu", features, strict=True)
        ]
    )
    sharded = shard(tables, PLANS_OF_TWO[kind], ShardingEnv.from_local(), CUDA)
    return tables, sharded  # type: ignore[return-value]


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("fault", TOLD)
@pytest.mark.parametrize("kind", PLANS_OF_TWO)
@pytest.mark.parametrize("by", ["a later batch", "check_ids"])
def test_a_bad_batch_of_known_sizes_is_raised_later(
    kind: str, fault: str, by: str, triton: bool
) -> None:
    build, sizes, text = TOLD[fault]
    good = _with_parts(_good(), [1, 1])
    with PretendedCuda(triton) as cuda:
        _, tables = _two_tables(kind)
        batch = _with_parts(build().to(CUDA), sizes)
        before = [tensor.clone() for tensor in batch.parts() if isinstance(tensor, Tensor)]
        tables(good.to(CUDA)).wait()
        cuda.forget()
        cuda.is_behind = True
        ctx = tables.create_context()
        given = tables.input_dist(ctx, batch).wait().wait()
        found = tables.compute_and_output_dist(ctx, given).wait()
        # index tensors of its shape are made
        assert {kind for kind, _, _ in cuda.notes} <= {"upload"}
        for bags in (*ctx.received.lookups, *ctx.received.replicas):  # sizes known on the host
            assert bags.offsets[0] == 0
            assert bool((bags.offsets.diff() >= 0).all())
            assert bags.offsets[-1] == len(bags.indices)
            assert bool(((bags.indices >= 0) & (bags.indices < 3)).all())
        jagged = list(found.values()) if isinstance(found, dict) else []
        for one in jagged:  # its lengths add up to its rows
            assert int(one.lengths().sum()) == len(one.values()) == int(one.offsets()[-1])
        values = torch.cat([one.values() for one in jagged]) if jagged else found.values()
        assert bool(torch.isfinite(values).all())
        values.sum().backward()
        assert all(bool(torch.isfinite(weight).all()) for weight in tables.parameters())
        after = [tensor for tensor in batch.parts() if isinstance(tensor, Tensor)]
        assert all(map(torch.equal, before, after))
        tables(good.to(CUDA)).wait()  # the report of the bad batch has not arrived
        cuda.is_behind = by == "check_ids"
        tell = tables.check_ids if by == "check_ids" else lambda: tables(good.to(CUDA))
        with pytest.raises((ValueError, IndexError), match=text) as raised:
            tell()
        assert str(raised.value).startswith("On rank 0: ")
        tables.check_ids()  # the error was already raised


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("kind", PLANS_OF_TWO)
@pytest.mark.parametrize(
    ("keys", "ids", "lengths"),
    [("f", [2, 0, 2], [1, 0, 2]), ("fg", [], [0] * 6), ("fg", [], [])],
    ids=["one feature", "no ids", "no samples"],
)
def test_sizes_that_nobody_needs_to_tell(
    keys: str, ids: list[int], lengths: list[int], kind: str, triton: bool
) -> None:
    values, of_bags = torch.tensor(ids).long(), torch.tensor(lengths).long()
    batch = KeyedJaggedTensor([*keys], values, lengths=of_bags)
    with PretendedCuda(triton) as cuda:
        unsharded, tables = _two_tables(kind, "ff" if keys == "f" else "gf")
        moved = batch.to(CUDA)
        for _ in range(2):
            cuda.forget()
            found = tables(moved).wait()
            kinds = {kind for kind, _, _ in cuda.notes}
        assert kinds == set()
        tables.check_ids()
    expected = unsharded(batch)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, jagged in expected.items():
            torch.testing.assert_close(found[name].values(), jagged.values())
            assert torch.equal(found[name].lengths(), jagged.lengths())
    else:
        torch.testing.assert_close(found.values(), expected.values())


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("kind", PLANS_OF_TWO)
def test_a_buffer_may_be_longer_than_the_sizes_told(kind: str, triton: bool) -> None:
    """Ids that no table has follow the last bag."""
    lengths = torch.tensor([1, 2, 0, 1])
    long = KeyedJaggedTensor(["f", "g"], torch.tensor([2, 0, 1, 2, 99, -1]), lengths=lengths)
    short = KeyedJaggedTensor(["f", "g"], torch.tensor([2, 0, 1, 2]), lengths=lengths)
    with PretendedCuda(triton):
        _, tables = _two_tables(kind)
        moved = long.to(CUDA)
        assert moved.length_per_key_or_none() == [3, 1]
        found, expected = tables(moved).wait(), tables(short.to(CUDA)).wait()
        tables.check_ids()
        parts = [
            [one.values() for one in given.values()]
            if isinstance(given, dict)
            else [given.values()]
            for given in (found, expected)
        ]
        assert all(map(torch.equal, *parts))

        def look_up_without_sizes() -> None:
            tables(moved.unsync()).wait()
            tables.check_ids()

        with pytest.raises(ValueError, match="longer than its bags needs length_per_key"):
            look_up_without_sizes()


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("kind", PLANS_OF_TWO)
def test_sizes_that_cannot_be_are_raised_at_once(kind: str, triton: bool) -> None:
    build = FAULTS["inverse"][0]
    without_samples = KeyedJaggedTensor(
        ["f", "g"], torch.tensor([]).int(), lengths=torch.tensor([]).int()
    )
    without_bags = KeyedJaggedTensor(
        ["f", "g"], torch.tensor([1, 2]), lengths=torch.tensor([2]), stride_per_key=[1, 0]
    )
    with PretendedCuda(triton) as cuda:
        _, tables = _two_tables(kind)
        cuda.is_behind = True
        for batch in (_good((0, 1)), build(), without_samples):
            num_ids = batch.values().numel()
            for sizes in ([4, 1], [num_ids + 1, -1]):
                with pytest.raises(
                    ValueError, match=r"JaggedTensor\.length_per_key must (add up|not be)"
                ):
                    tables(_with_parts(batch.to(CUDA), sizes))
        if kind.startswith("sequence"):
            with pytest.raises(ValueError, match="length_per_key must agree with lengths"):
                tables(_with_parts(without_bags.to(CUDA), [1, 1]))
            found = tables(_with_parts(without_bags.to(CUDA), [2, 0])).wait()
            assert {name: len(one.values()) for name, one in found.items()} == {"g": 0, "f": 2}
        tables.check_ids()


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize(
    ("mode", "filters", "said"),
    [
        ("WARNING", "always", UserWarning),
        ("WARNING", "error", IndexError),
        ("IGNORE", "error", None),
    ],
)
def test_bad_ids_of_one_rank_do_what_the_mode_says(
    mode: str, filters: str, said: type[Exception] | None, triton: bool
) -> None:
    with PretendedCuda(triton) as cuda, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter(filters)  # type: ignore[arg-type]
        tables = _alone(BoundsCheckMode[mode])
        cuda.is_behind = True
        rows = tables(_good((1, 30)).to(CUDA)).values()
        assert torch.equal(rows, tables(_good((1, 0)).to(CUDA)).values())
        assert warned == []
        raised = None
        cuda.forget()
        try:
            tables.check_ids()
        except IndexError as error:
            raised = error
        if said is None:
            assert {what for _, what, _ in cuda.notes} == {"an event"}
        assert (type(raised) if raised else None) is (said if said is IndexError else None)
        assert [w.category for w in warned] == ([said] if said is UserWarning else [])
        for told in [raised, *(w.message for w in warned)]:
            if told is not None:
                assert "Id 30 at position 0 of feature 'g' must be from 0 to 2. Table 'u'" in str(
                    told
                )
        bad_lengths = FAULTS["lengths"][0]().to(CUDA)
        tables(bad_lengths)
        with pytest.raises(ValueError, match="lengths must not be negative"):
            tables.check_ids()


def test_ids_that_were_written_to_before_they_are_told_of() -> None:
    with PretendedCuda() as cuda:
        tables = _alone()
        cuda.is_behind = True
        batch = _good((1, 30)).to(CUDA)
        tables(batch)
        batch.values().fill_(0)
        with pytest.raises(IndexError, match="memory was overwritten"):
            tables.check_ids()


def test_what_the_host_can_see_is_raised_at_once_on_one_rank() -> None:
    with PretendedCuda() as cuda:
        tables = _alone()
        cuda.is_behind = True
        tables(_good().to(CUDA))
        cuda.forget()
        without = KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
        with pytest.raises(KeyError, match="lacks the features"):
            tables(without.to(CUDA))
        with pytest.raises(TypeError, match="KeyedJaggedTensor"):
            tables(torch.ones(2))
        assert {kind for kind, _, _ in cuda.notes} <= {"upload"}  # of the batch above
        assert tables(_good().to(CUDA)).values().shape == (1, 8)


def test_what_is_found_late_follows_tables_that_move() -> None:
    with PretendedCuda() as cuda:
        tables = _alone()
        cuda.is_behind = True
        tables(_good((1, 30)).to(CUDA))
        tables.reshard({"t": parameter_sharding(S.COLUMN_WISE, 3, 4, [0])})
        with pytest.raises(IndexError, match=r"Id 30 at .*of feature 'g'"):
            tables.check_ids()


class _Towers(nn.Module):
    """One collection that reads the batch as it is, and one that reads half of it."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                name: EmbeddingBagCollection(
                    tables=[
                        EmbeddingBagConfig(3, 4, f"{name}{feature}", feature_names=[feature])
                        for feature in ("fg" if name == "all" else "g")
                    ]
                )
                for name in names
            }
        )

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        return torch.cat([tables(batch).values() for tables in self.tables.values()], dim=1)


@pytest.mark.parametrize(
    ("names", "reads"),
    [(["all"], 0), (["second", "all"], 1), (["all", "second"], 1)],
    ids=["all", "second first", "all first"],
)
@pytest.mark.parametrize("is_told", [False, True])
def test_modules_of_one_rank_start_together_and_hear_of_the_last_batch(
    names: list[str], reads: int, is_told: bool
) -> None:
    torch.manual_seed(0)
    model = _Towers(names)
    batches = [_good((i, 2 - i)) for i in range(3)]
    reads = 0 if is_told else reads
    expected = [model(batch) for batch in batches]
    header_of = InputDist.header_of
    with PretendedCuda() as cuda, mock.patch.object(
        InputDist, "header_of", autospec=True, side_effect=header_of
    ) as headers:  # fmt: skip
        sharded = DistributedModelParallel(model, device=CUDA)
        moved = [batch.to(CUDA) for batch in batches]
        moved = moved if is_told else [batch.unsync() for batch in moved]
        found, counts = [], []
        for batch in EvenBatches(moved, sharded, "drop"):
            assert len(found) < len(batches)
            cuda.forget()
            found.append(sharded(batch).detach())
            counts.append(len(cuda.notes))
        for values, wanted in zip(found, expected, strict=True):
            assert torch.equal(values, wanted)
    assert counts[1:] == [reads] * 2  # in the first, index tensors are made
    assert headers.call_count == reads * 3


def test_replicas_beside_a_lookup_of_the_whole_batch_need_counts() -> None:
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(3, 4, name, feature_names=[feature])
            for name, feature in (("t", "f"), ("u", "g"), ("v", "g"))
        ]
    )
    expected = tables(_good()).values()
    plan = {"t": table_wise(rank=0), "u": table_wise(rank=0), "v": data_parallel()}
    with PretendedCuda() as cuda:
        sharded = shard(tables, plan, ShardingEnv.from_local(), CUDA)
        batch = _good().to(CUDA).unsync()
        sharded(batch)
        cuda.forget()
        found = sharded(batch).values()
        # the CPU's permute accepts a wrong number of ids: the test checks the host's read
        assert [kind for kind, _, _ in cuda.notes] == ["read"]
        assert torch.equal(found, expected)


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_batch_on_a_device_is_raised_later_unsharded(fault: str, triton: bool) -> None:
    bad, text = FAULTS[fault]
    with PretendedCuda(triton):
        tables = _bags()
        for table in tables.embedding_bags.values():
            table.weight = nn.Parameter(torch.ones(3, 4, device=CUDA))
        found = tables(bad().to(CUDA))
        assert found.values().shape[1] == 8
        with pytest.raises((ValueError, IndexError), match=text):
            tables.check_ids()


READERS = {"readers alike": "g", "readers of two sizes": "f"}  # of the third table


def _unsharded(kind: str) -> EmbeddingBagCollection | EmbeddingCollection:
    """Three tables, the first smaller than the others; each feature has one reader, or not."""
    given = zip((3, 5, 5), "tuv", ("f", "g", READERS.get(kind, "h")), strict=True)
    torch.manual_seed(1)
    if kind.startswith("sequence"):
        return EmbeddingCollection(
            tables=[EmbeddingConfig(n, 4, name, feature_names=[key]) for n, name, key in given],
            need_indices=kind == "sequence with ids",
        )
    return EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(n, 4, name, feature_names=[key]) for n, name, key in given],
        is_weighted=kind == "weighted",
    )


def _move_to_device(collection: EmbeddingBagCollection | EmbeddingCollection) -> None:
    for table in collection._tables():
        table.weight = nn.Parameter(table.weight.detach().to(CUDA))


def _on_device(*tables: EmbeddingBagConfig) -> EmbeddingBagCollection:
    collection = EmbeddingBagCollection(tables=list(tables))
    _move_to_device(collection)
    return collection


@needs_triton
@pytest.mark.parametrize("keys", ["hfg", "xhfg"])
@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("mode", ["IGNORE", "FATAL"])
@pytest.mark.parametrize(
    "kind", ["one reader", *READERS, "weighted", "sequence", "sequence with ids"]
)
def test_unsharded_batches_are_checked_by_kernels(
    kind: str, mode: str, is_told: bool, keys: str
) -> None:
    """Equal to the CPU's results, in another order than the tables, with unread keys."""
    lengths = torch.tensor([[1, 2], [0, 1], [3, 0], [2, 1]])
    ids = torch.tensor([9, 9, 9, 4, 0, 2, 1, 0, 1, 2])
    if mode == "IGNORE":
        ids[3], ids[4], ids[-1] = -1, 2**40, 5  # of h, f and g
    if keys == "hfg":
        lengths, ids = lengths[1:], ids[3:]
    weights = torch.rand(len(ids))
    batch = KeyedJaggedTensor([*keys], ids, weights, lengths=lengths.flatten().int())
    reference, tables = _unsharded(kind), _unsharded(kind)
    reference._bounds_check_mode = tables._bounds_check_mode = BoundsCheckMode[mode]
    expected = reference(KeyedJaggedTensor([*keys], ids, weights, lengths=lengths.flatten()))
    told = mock.patch.object(batch_checker, "check_length_per_key")
    with PretendedCuda(triton=True) as cuda, told as checked:
        _move_to_device(tables)
        tables(batch.to(CUDA).unsync())
        moved = batch.to(CUDA) if is_told else batch.to(CUDA).unsync()
        cuda.forget()
        cuda.launched.clear()
        cuda.is_behind = True
        found = tables(moved)
        is_needed = keys == "xhfg" or kind in READERS or kind.startswith("sequence")
        assert checked.called is (is_told and is_needed)  # else it would cost an upload
        assert "make_safe" in cuda.launched
        reads = [kind for kind, _, _ in cuda.notes if kind != "upload"]
        assert len(reads) == (not is_told and is_needed)
        tables.check_ids()
    if isinstance(expected, dict):
        for name, jagged in expected.items():
            assert torch.equal(found[name].values(), jagged.values())
            if kind == "sequence with ids":
                assert torch.equal(found[name].weights(), jagged.weights())
    else:
        torch.testing.assert_close(found.values(), expected.values())


@pytest.mark.parametrize("is_told", [False, True])
def test_unsharded_batches_with_sizes_of_their_own_are_not_read(is_told: bool) -> None:
    batch = KeyedJaggedTensor(
        ["f", "g", "h"],
        torch.tensor([2, 0, 4, 1]),
        lengths=torch.tensor([1, 1, 1, 1, 0]),
        stride_per_key=[1, 2, 2],
        inverse_indices=(["f", "g", "h"], torch.tensor([[0, 0], [1, 0], [0, 1]])),
    )
    reference, tables = _unsharded("one reader"), _unsharded("one reader")
    with PretendedCuda() as cuda:
        _move_to_device(tables)
        moved = batch.to(CUDA) if is_told else batch.to(CUDA).unsync()
        tables(batch.to(CUDA))
        cuda.forget()
        found = tables(moved)
        assert not [kind for kind, _, _ in cuda.notes if kind != "upload"]
    torch.testing.assert_close(found.values(), reference(batch).values())


@needs_triton
@pytest.mark.parametrize("are_overwritten", [False, True])
@pytest.mark.parametrize("mode", ["WARNING", "FATAL"])
def test_bad_ids_of_unsharded_tables_do_what_the_mode_says(
    mode: str, are_overwritten: bool
) -> None:
    with PretendedCuda(triton=True) as cuda:
        tables = _bags()
        tables._bounds_check_mode = BoundsCheckMode[mode]
        for table in tables.embedding_bags.values():
            table.weight = nn.Parameter(torch.arange(12.0, device=CUDA).view(3, 4))
        cuda.is_behind = True
        batch = _good((1, 30)).to(CUDA)
        found = tables(batch).values()
        assert torch.equal(found[0], torch.tensor([4.0, 5, 6, 7, 0, 1, 2, 3]))
        text = "Id 30 at position 0 of feature 'g' must be from 0 to 2. Table 'u' has 3 rows"
        if are_overwritten:
            batch.values().fill_(0)
            text = "memory was overwritten"
        if mode == "WARNING":
            with pytest.warns(UserWarning, match=f"{text}.* Row 0 is read instead"):
                tables.check_ids()
        else:
            with pytest.raises(IndexError, match=text):
                tables.check_ids()
        tables.check_ids()  # the error was already raised


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
def test_a_later_batch_raises_for_an_earlier_one_unsharded(triton: bool) -> None:
    with PretendedCuda(triton):
        tables = _on_device(EmbeddingBagConfig(3, 4, "t", feature_names=["f", "g"]))
        tables(_good((1, 30)).to(CUDA))
        with pytest.raises(IndexError, match=r"Id 30 at .*of feature 'g'"):
            tables(_good().to(CUDA))
        tables(_good().to(CUDA))  # the error was already raised


@needs_triton
def test_an_unsharded_batch_may_have_its_keys_in_another_order_than_the_last() -> None:
    with PretendedCuda(triton=True) as cuda:
        tables = _on_device(
            EmbeddingBagConfig(3, 4, "t", feature_names=["f"]),
            EmbeddingBagConfig(9, 4, "u", feature_names=["g"]),
        )
        lengths, ids = torch.tensor([1, 1]), torch.tensor([2, 8])
        expected = tables(KeyedJaggedTensor(["f", "g"], ids, lengths=lengths).to(CUDA)).values()
        turned = KeyedJaggedTensor(["g", "f"], ids.flip(0), lengths=lengths).to(CUDA)
        assert torch.equal(tables(turned).values(), expected)
        assert "make_safe" in cuda.launched
        tables.check_ids()


@needs_triton
def test_a_batch_that_lacks_a_feature_is_told_of_once() -> None:
    with PretendedCuda(triton=True):
        tables = _on_device(EmbeddingBagConfig(3, 4, "t", feature_names=["f", "g"]))
        lacking = KeyedJaggedTensor(["f"], torch.tensor([1, 30]), lengths=torch.tensor([1, 1]))
        with pytest.raises(KeyError, match="lacks the features"):
            tables(lacking.to(CUDA))
        tables(_good().to(CUDA))
        tables.check_ids()


@needs_triton
def test_bad_ids_of_one_of_two_lookups_are_warned_of_once() -> None:
    with PretendedCuda(triton=True):
        tables = _on_device(
            EmbeddingBagConfig(3, 4, "t", feature_names=["f"]),
            EmbeddingBagConfig(3, 4, "u", feature_names=["g"], pooling=PoolingType.MEAN),
        )
        tables._bounds_check_mode = BoundsCheckMode.WARNING
        tables(_good((1, 30)).to(CUDA))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            tables.check_ids()
        assert ["Id 30" in str(warning.message) for warning in said] == [True]


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
def test_what_was_not_yet_told_keeps_no_tables_alive(triton: bool) -> None:
    with PretendedCuda(triton) as cuda:
        tables = _on_device(EmbeddingBagConfig(3, 4, "t", feature_names=["f", "g"]))
        cuda.is_behind = True
        tables(_good().to(CUDA))
        is_there = weakref.ref(tables)
        gc.collect()
        gc.disable()
        try:
            del tables
            assert is_there() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("sizes", [None, [1, 1], [2, 0]])
def test_unsharded_sequences_wait_for_sizes_that_nobody_told(sizes: list[int] | None) -> None:
    with PretendedCuda() as cuda:
        tables, _ = _two_tables("sequence")
        for table in tables.embeddings.values():
            table.weight = nn.Parameter(torch.arange(12.0, device=CUDA).view(3, 4))
        batch = _with_parts(_good().to(CUDA), sizes)
        tables(_good().to(CUDA))
        cuda.forget()
        cuda.is_behind = True
        found = tables(batch)
        reads = [kind for kind, _, _ in cuda.notes if kind != "upload"]
        assert len(reads) == (sizes is None)
        assert [len(found[name].values()) for name in "fg"] == (sizes or [1, 1])
        if sizes == [2, 0]:
            with pytest.raises(ValueError, match="length_per_key must agree"):
                tables.check_ids()


def test_inverse_indices_of_features_that_were_left_out_are_no_fault() -> None:
    whole = KeyedJaggedTensor(
        ["f", "g", "x"],
        torch.tensor([1, 2, 0]),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key=[1, 1, 1],
        inverse_indices=(["x", "f", "g"], torch.tensor([[0, 9], [0, 0], [0, 0]])),
    )
    part = whole.permute([0, 1])
    with PretendedCuda():
        tables = _bags()
        for table in tables.embedding_bags.values():
            table.weight = nn.Parameter(torch.ones(3, 4, device=CUDA))
        assert tables(part.to(CUDA)).values().tolist() == [[1.0] * 8] * 2
        tables.check_ids()


def _start_a_step_early() -> list[list[str]]:
    """The kinds of notes after a batch has started, and after it was sent."""
    features = KeyedJaggedTensor(["f"], torch.arange(4), lengths=torch.full((4,), 1))
    in_streams = mock.PropertyMock(return_value=True)
    with PretendedCuda() as cuda, mock.patch.object(
        ShardingEnv, "exchanges_in_streams", in_streams
    ):  # fmt: skip
        table = EmbeddingBagConfig(8, 4, "t", feature_names=["f"])
        ebc = shard(EmbeddingBagCollection(tables=[table]), {"t": row_wise()}, device=CUDA)
        batch = features.to(CUDA)
        ebc(batch).values()  # what depends on the layout alone is uploaded once
        cuda.forget()
        ctx = ebc.input_stage.prepare(batch)
        start_together([ctx])
        started = [kind for kind, _, _ in cuda.notes]
        ctx.stage.send(ctx)
        return [started, [kind for kind, _, _ in cuda.notes]]


@pytest.mark.parametrize("number", [1, 2])
def test_a_batch_that_starts_early_waits_for_nothing_until_it_is_sent(
    ranks: RankPool, number: int
) -> None:
    for started, sent in ranks(number, _start_a_step_early):
        assert started == []
        assert sent == ["read"] * (number - 1)


@pytest.mark.parametrize("device", [torch.device("meta"), CUDA], ids=["meta", "cuda"])
def test_tables_are_drawn_where_they_are(device: torch.device) -> None:
    tables = [EmbeddingBagConfig(ROWS, 8, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    torch.manual_seed(0)
    expected = EmbeddingBagCollection(tables=tables).state_dict()
    with PretendedCuda() as cuda:
        torch.manual_seed(0)
        model: nn.Module = EmbeddingBagCollection(tables=tables, device=device)
        model = DistributedModelParallel(model, device=CUDA)
        found = {name: parameter.detach() for name, parameter in model.module.named_parameters()}
        assert all(map(cuda.is_on_device, found.values()))
        # except the first table of each lookup, no value is copied from the host to the device
        assert {what for _, what, _ in cuda.notes} <= {"torch.tensor on the device"}
        assert {where.partition(":")[0] for _, _, where in cuda.notes} <= {
            "recsys/kernels/tbe_layout.py"
        }
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
