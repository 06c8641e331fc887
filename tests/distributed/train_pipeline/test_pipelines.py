"""Pipelines train like a plain loop, bit for bit, while they exchange the next batches' ids."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.ranks import comm
from recsys.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from recsys.distributed.train_pipeline.even_batches import EvenBatches
from recsys.distributed.train_pipeline.pipelines import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from recsys.distributed.train_pipeline.staged import PipelineStage, StagedTrainPipeline
from recsys.distributed.types import ShardingPlan
from recsys.kernels import ops
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import PositionWeightedModuleCollection
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.optim import RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.optim.keyed import KeyedOptimizerWrapper
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import CPU, counted_collectives, whole_state
from tests.pretended_cuda import CUDA, PretendedCuda
from tests.ranks import RankPool

ROWS, DIM, STEPS = 12, 8, 6
KEYS = ["f", "g"]


@dataclass
class Samples:
    """One batch."""

    dense: Tensor
    first: KeyedJaggedTensor
    second: KeyedJaggedTensor


def _features(
    generator: torch.Generator, size: int, *, is_weighted: bool = False
) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (2 * size,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if is_weighted else None
    return KeyedJaggedTensor(KEYS, ids, weights, lengths=lengths)


def samples(rank: int, step: int, kind: str = "") -> Samples:
    generator = torch.Generator().manual_seed(100 * step + rank)
    size = [3, 5, 1, 0, 4, 2][(step + rank) % 6]
    first = _features(generator, size, is_weighted=kind == "weighted")
    second = _features(generator, size)
    if kind == "vbe" and size:
        lengths = torch.randint(0, 4, (size + 1,), generator=generator)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        places = torch.stack([torch.arange(size), torch.zeros(size, dtype=torch.int64)])
        first = KeyedJaggedTensor(
            KEYS,
            ids,
            lengths=lengths,
            stride_per_key_per_rank=[[size], [1]],
            inverse_indices=(KEYS, places),
        )
    return Samples(torch.rand(size, 4, generator=generator), first, second)


def _bags(name: str, features: list[str], **more: Any) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(ROWS, DIM, f"{name}_{key}", feature_names=[key]) for key in features
    ]
    return EmbeddingBagCollection(tables=tables, **more)


def _sequences(name: str) -> EmbeddingCollection:
    tables = [EmbeddingConfig(ROWS, DIM, f"{name}_{key}", feature_names=[key]) for key in KEYS]
    return EmbeddingCollection(tables=tables)


class Model(nn.Module):
    """Returns a loss, and scores `[B]` of what `_scores` computes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind != "dlrm":
            self.over = nn.Linear(DIM, 1)
        for name, make in _PARTS[kind].items():
            self.add_module(name, make())

    def forward(self, batch: Samples) -> tuple[Tensor, Tensor]:
        scores = self._scores(batch)
        return scores.square().sum(), scores

    def _pooled(self, features: KeyedJaggedTensor, name: str = "a") -> Tensor:
        values: Tensor = getattr(self, name)(features).values()
        return values.unflatten(1, (-1, DIM)).sum(1)

    def _scores(self, batch: Samples) -> Tensor:
        first = batch.first
        if self.kind == "dlrm":
            logits: Tensor = self.get_submodule("dlrm")(batch.dense, first)
            return logits.squeeze(1)
        if self.kind in ("made", "declared"):
            first = made(batch)
        out = self._pooled(first)
        if self.kind in ("towers", "unused"):
            out = out * self._pooled(batch.second, "b")
        elif self.kind == "twice":
            out = out + self._pooled(batch.second)
        elif self.kind == "mixed":
            rows = self.get_submodule("s")(first)
            size, lengths = len(out), rows["g"].lengths()
            owners = torch.arange(size).repeat_interleave(lengths)
            out = out.index_add(0, owners, rows["g"].values())
        scores: Tensor = self.over(out)
        return scores.squeeze(1)


def made(batch: Samples) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.concat([batch.first, _renamed(batch.second)]).permute([1, 2])


def _renamed(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["h", "i"], features.values(), lengths=features.lengths())


_PARTS: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "dlrm": {"dlrm": lambda: DLRM(_bags("a", KEYS), 4, [8, DIM], [8, 1])},
    "towers": {"a": lambda: _bags("a", KEYS), "b": lambda: _bags("b", KEYS)},
    "mixed": {"a": lambda: _bags("a", KEYS), "s": lambda: _sequences("s")},
    "shared": {
        "a": lambda: EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(ROWS, DIM, "both", feature_names=KEYS),
                EmbeddingBagConfig(ROWS, DIM, "one", feature_names=["g"]),
            ]
        )
    },
    "vbe": {"a": lambda: _bags("a", KEYS)},
    "weighted": {"a": lambda: _bags("a", KEYS, is_weighted=True)},
    "made": {"a": lambda: _bags("a", ["g", "h"])},
    "declared": {"a": lambda: _bags("a", ["g", "h"])},
    "twice": {"a": lambda: _bags("a", KEYS)},
    "unused": {
        "a": lambda: _bags("a", KEYS),
        "b": lambda: _bags("b", KEYS),
        "c": lambda: _bags("c", KEYS),
    },
    "processed": {
        "a": lambda: FeatureProcessedEmbeddingBagCollection(
            _bags("a", KEYS, is_weighted=True),
            PositionWeightedModuleCollection({"f": 4, "g": 4}),
        )
    },
}


def build(kind: str) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    torch.manual_seed(7)
    model = Model(kind)
    ways = [table_wise(rank=1), row_wise(), column_wise(ranks=[0, 1]), data_parallel()]
    plan, number = {}, 0
    for path, part in model.named_modules():
        tables = getattr(part, "table_weights", None)
        if tables is None or isinstance(part, FeatureProcessedEmbeddingBagCollection):
            continue
        if path.endswith("_embedding_bag_collection"):  # planned as one with what processes
            path = path.rpartition(".")[0]
        chosen = {}
        for name, weight in tables().items():
            chosen[name] = ways[number % len(ways)]
            number += 1
            apply_optimizer_in_backward(RowWiseAdagrad, [weight], {"lr": 0.1})
        plan[path] = construct_module_sharding_plan(part, chosen, world_size=2, device_type="cpu")
    sharded = DistributedModelParallel(model, device=CPU, plan=ShardingPlan(plan))
    dense = {
        name: weight
        for name, weight in sharded.named_parameters()
        if not hasattr(weight, "_in_backward_optimizers")
    }
    dense = {n: w for n, w in dense.items() if "embedding" not in n}
    return sharded, KeyedOptimizerWrapper(dense, lambda ps: torch.optim.Adam(ps, lr=0.1))


def plain(
    model: Any, optimizer: Any, batches: list[Samples], then: Callable[[int], None] | None = None
) -> list[Tensor]:
    outputs = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss, scores = model(batch)
        loss.backward()
        optimizer.step()
        outputs.append(scores.detach())
        if then is not None:
            then(step)
    return outputs


def drain(pipeline: Any, batches: Iterator[Any]) -> list[Tensor]:
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(batches).detach())
        except StopIteration:
            return outputs


def _both(kind: str, make: Any, **settings: Any) -> list[str]:
    """Trains a model in a plain loop and in a pipeline; returns the warnings."""
    batches = [samples(dist.get_rank(), step, kind) for step in range(STEPS)]
    model, optimizer = build(kind)
    expected = plain(model, optimizer, batches)
    state = whole_state(model) | _states(model)
    model, optimizer = build(kind)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        outputs = drain(make(model, optimizer, CPU, **settings), iter(batches))
    assert len(outputs) == STEPS
    for mine, theirs in zip(outputs, expected, strict=True):
        assert torch.equal(mine, theirs)
    found = whole_state(model) | _states(model)
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(found[name], value), name
    return [str(warning.message) for warning in told]


def _states(model: DistributedModelParallel) -> dict[str, Tensor]:
    return {
        f"{name}.{state}": getattr(value, "full_tensor", lambda value=value: value)()
        for name, states in model.fused_optimizer.state_dict()["state"].items()
        for state, value in states.items()
    }


KINDS = [kind for kind in _PARTS if kind != "declared"]


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_a_plain_loop(ranks: RankPool, kind: str) -> None:
    for told in ranks(2, _both, kind, TrainPipelineSparseDist):
        if kind == "made":
            assert len(told) == 1
            assert "ids of module 'a' when it is called" in told[0]
            assert "reads features" in told[0]
        elif kind == "twice":
            assert "module 'a'" in told[0]
            assert "is called 2 times" in told[0]
        elif kind == "unused":
            assert [t for t in told if "is not called" in t]
        elif kind == "processed":
            assert "reads features" in told[0]
        else:
            assert told == []


@pytest.mark.parametrize("make", [TrainPipelineBase, PrefetchTrainPipelineSparseDist])
@pytest.mark.parametrize("kind", ["dlrm", "mixed"])
def test_other_synchronous_pipelines(ranks: RankPool, kind: str, make: Any) -> None:
    assert ranks(2, _both, kind, make) == [[], []]


@pytest.mark.parametrize("kind", ["dlrm", "towers", "mixed", "vbe", "weighted"])
def test_lookups_after_the_step(ranks: RankPool, kind: str) -> None:
    assert ranks(2, _both, kind, TrainPipelineFusedSparseDist) == [[], []]


def _declared(features: Any) -> list[str]:
    return _both("declared", TrainPipelineSparseDist, features=features)


def test_features_may_be_declared(ranks: RankPool) -> None:
    assert ranks(2, _declared, {"a": made}) == [[], []]


def _not_made(batch: Samples) -> KeyedJaggedTensor:
    return made(batch).permute([1, 0])


def _refusals() -> list[str]:
    messages = []
    model, optimizer = build("declared")
    for features in ({"a": _not_made}, {"nothing": made}):
        try:
            pipeline = TrainPipelineSparseDist(model, optimizer, CPU, features=features)
            pipeline.progress(iter([samples(0, 0)]))
        except (ValueError, KeyError) as error:
            messages.append(str(error))
    return messages


def test_wrong_declarations_are_refused(ranks: RankPool) -> None:
    for other, unknown in ranks(2, _refusals):
        assert "features for module 'a'" in other
        assert "['a']; received ['nothing']" in unknown


def _order() -> list[str]:
    """Return the order of the exchanges and of the dense layers in the fourth step."""
    model, optimizer = build("dlrm")
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, CPU)
    batches = iter([samples(dist.get_rank(), step) for step in range(STEPS)])
    for _ in range(3):
        pipeline.progress(batches)
    events: list[str] = []
    exchange = comm.all_to_all

    def noted(env: Any, what: str, *rest: Any, **more: Any) -> Any:
        events.append(what)
        return exchange(env, what, *rest, **more)

    bottom = model.module.get_submodule("dlrm").get_submodule("dense_arch")
    bottom.register_forward_hook(lambda *_: events.append("dense layers"))
    with mock.patch.object(comm, "all_to_all", noted):
        pipeline.progress(batches)
    return events


def test_ids_travel_behind_the_batch_before(ranks: RankPool) -> None:
    for events in ranks(2, _order):
        assert events[:2] == ["send ids to their owners", "exchange id counts"]
        assert events.index("dense layers") > 1
        assert events.count("send ids to their owners") == 1
        assert events.count("exchange id counts") == 1


def _collectives() -> list[int]:
    found = []
    for pipelined in (False, True):
        model, optimizer = build("mixed")
        batches = [samples(dist.get_rank(), step) for step in range(STEPS)]
        with counted_collectives() as counts:
            if pipelined:
                drain(TrainPipelineSparseDist(model, optimizer, CPU), iter(batches))
            else:
                plain(model, optimizer, batches)
        found.append(counts["all_to_all_single"])
    return found


def test_it_takes_no_more_collectives(ranks: RankPool) -> None:
    for without, with_pipeline in ranks(2, _collectives):
        assert without == with_pipeline


def _evaluations(pipelined: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of training, and of an evaluation after each second step."""
    rank = dist.get_rank()
    model, optimizer = build("towers")
    evaluated: list[Tensor] = []
    batches = [samples(rank, step) for step in range(STEPS)]
    held_out = [samples(rank, 50 + step) for step in range(3)]
    evaluation = EvalPipelineSparseDist(model, optimizer, CPU)

    def evaluate(step: int) -> None:
        if step % 2:
            return
        model.eval()
        if pipelined:
            epoch = iter(EvenBatches(held_out, model, "drop"))
            scores = drain(evaluation, epoch)
            assert not any(s.requires_grad for s in scores)
            evaluated.extend(scores)
        else:
            with torch.no_grad():
                evaluated.extend(model(batch)[1] for batch in held_out)
        model.train()

    if not pipelined:
        return plain(model, optimizer, batches, evaluate), evaluated
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, CPU)
    source, outputs = iter(EvenBatches(batches, model, "drop")), []
    for step in range(STEPS):
        outputs.append(pipeline.progress(source).detach())
        evaluate(step)
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    return outputs, evaluated


def _interleaved() -> None:
    for mine, theirs in zip(_evaluations(True), _evaluations(False), strict=True):
        assert len(mine) == len(theirs) > 0
        assert all(map(torch.equal, mine, theirs))


def test_evaluation_in_the_middle_of_training(ranks: RankPool) -> None:
    ranks(2, _interleaved)


def _uneven(policy: str) -> int:
    rank = dist.get_rank()
    batches = [samples(rank, step) for step in range([6, 4][rank])]
    model, optimizer = build("dlrm")
    expected = []
    for batch in EvenBatches(batches, model, policy):
        expected += plain(model, optimizer, [batch])
    model, optimizer = build("dlrm")
    pipeline = TrainPipelineSparseDist(model, optimizer, CPU)
    outputs = drain(pipeline, iter(EvenBatches(batches, model, policy)))
    assert all(map(torch.equal, outputs, expected))
    assert len(outputs) == len(expected)
    return len(outputs)


@pytest.mark.parametrize(("policy", "steps"), [("drop", 4), ("pad", 6), ("join", 6)])
def test_uneven_data(ranks: RankPool, policy: str, steps: int) -> None:
    assert ranks(2, _uneven, policy) == [steps] * 2


def _bad_batch(make: Any) -> tuple[int, str, bool]:
    rank = dist.get_rank()
    batches = [samples(rank, step) for step in range(5)]
    if rank == 1:
        batches[3].first.values()[0] = ROWS + 5
    good = [batch for step, batch in enumerate(batches) if step != 3]
    model, optimizer = build("dlrm")
    expected = plain(model, optimizer, good)
    model, optimizer = build("dlrm")
    pipeline: Any = make(model, optimizer, CPU)
    source, outputs, message = iter(batches), [], ""
    for step in range(5):
        try:
            outputs.append(pipeline.progress(source).detach())
        except IndexError as error:
            assert step == 3
            message = str(error)
    return len(outputs), message, all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("make", [TrainPipelineSparseDist, TrainPipelineFusedSparseDist])
def test_a_bad_batch_is_raised_when_its_turn_comes(ranks: RankPool, make: Any) -> None:
    for steps, message, is_same in ranks(2, _bad_batch, make):
        assert steps == 4
        assert message.startswith("On rank 1: ")
        assert "17" in message
        assert is_same  # and training continues without it


def _stale() -> None:
    """Looks up by hand with the tables of the step before, and compares."""
    rank = dist.get_rank()
    batches = [samples(rank, step) for step in range(STEPS)]
    model, optimizer = build("towers")
    parts = {name: model.module.get_submodule(name) for name in "ab"}
    early: dict[str, Any] = {}
    expected = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        with contextlib.ExitStack() as stack:
            for name, output in early.items():
                patch = mock.patch.object(parts[name], "forward", lambda _, out=output: out)
                stack.enter_context(patch)
            loss, scores = model(batch)
        early = {}
        if step >= 2 and step + 1 < STEPS:
            following = batches[step + 1]
            early = {"a": parts["a"](following.first), "b": parts["b"](following.second)}
        loss.backward()
        optimizer.step()
        expected.append(scores.detach())
    state = whole_state(model)
    model, optimizer = build("towers")
    pipeline = TrainPipelineSemiSync(model, optimizer, CPU, start_batch=2)
    assert not pipeline.is_semi_sync()
    outputs = drain(pipeline, iter(batches))
    assert pipeline.is_semi_sync()
    assert all(map(torch.equal, outputs, expected))
    assert len(outputs) == STEPS
    for name, value in whole_state(model).items():
        assert torch.equal(value, state[name])
    model, optimizer = build("towers")
    synchronous = plain(model, optimizer, batches)
    assert all(map(torch.equal, outputs[:3], synchronous[:3]))
    assert not all(map(torch.equal, outputs[3:], synchronous[3:]))


def test_semi_synchronous_embeddings_are_one_step_old(ranks: RankPool) -> None:
    ranks(2, _stale)


def _ends(execute_all: bool) -> list[int]:
    """Steps of two epochs from one pipeline."""
    model, optimizer = build("dlrm")
    pipeline = TrainPipelineSparseDist(model, optimizer, CPU, execute_all)
    batches = [samples(dist.get_rank(), step) for step in range(STEPS)]
    steps = [len(drain(pipeline, iter(batches))) for _ in range(2)]
    pipeline.progress(iter(batches))
    pipeline.reset()
    assert pipeline.detach() is model
    pipeline.attach(sparse_dist=False)
    steps.append(len(drain(pipeline, iter(batches))))
    model(batches[0])  # the ranks are still at one place
    return steps


@pytest.mark.parametrize(("execute_all", "expected"), [(True, [6, 6, 6]), (False, [4, 4, 6])])
def test_the_end_of_the_data(ranks: RankPool, execute_all: bool, expected: list[int]) -> None:
    assert ranks(2, _ends, execute_all) == [expected] * 2


@pytest.mark.parametrize("batches", [None, [torch.ones(1, 1)]])
def test_progress_needs_an_iterator(batches: Any) -> None:
    layer = nn.Linear(1, 1)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    stages = StagedTrainPipeline([PipelineStage("same", lambda x: x)])
    for pipeline in (TrainPipelineBase(layer, sgd, CPU), stages):
        with pytest.raises(TypeError, match="dataloader_iter must be an iterator; received"):
            pipeline.progress(batches)


def test_arguments_are_named() -> None:
    layer = nn.Linear(1, 1)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"TrainPipelineBase\.model must be .*Module; .*None"):
        TrainPipelineBase(None, sgd, CPU)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"TrainPipelineSparseDist\.optimizer must be an optimizer"):
        TrainPipelineSparseDist(layer, None, CPU)  # type: ignore[arg-type]
    for value in (None, 1.5, "900"):
        with pytest.raises(TypeError, match=r"TrainPipelineSemiSync\.start_batch must be a whole"):
            TrainPipelineSemiSync(layer, sgd, CPU, start_batch=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"start_batch must not be negative.* -1"):
        TrainPipelineSemiSync(layer, sgd, CPU, start_batch=-1)
    with pytest.raises(ValueError, match=r"sync_interval_batches must be positive; received 0"):
        TrainPipelineSparseDist(layer, sgd, CPU, dmp_collection_sync_interval_batches=0)
    EvalPipelineSparseDist(layer, None, CPU)  # type: ignore[arg-type]  # steps nothing


def test_one_process_without_ranks() -> None:
    model, optimizer = nn.Linear(2, 1), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [{"x": (torch.ones(3, 2), "text", None)}, {"x": (torch.ones(0, 2), "text", None)}]

    def forward(batch: Any) -> tuple[Tensor, Tensor]:
        out = model(batch["x"][0])
        return out.sum(1), out

    pipeline: Any = TrainPipelineSparseDist(model, optimizer, CPU, custom_model_fwd=forward)
    assert [len(out) for out in drain(pipeline, iter(batches))] == [3, 0]


class _Stream:
    """Stands for a stream of a GPU."""

    device = CUDA

    def __init__(self, device: object = None) -> None:
        self.waits = 0

    def wait_event(self, event: object) -> None:
        """Notes that it waits, where the host need not."""
        self.waits += 1


def test_a_gpu_copies_batches_on_a_stream_of_its_own_and_the_host_waits_for_none() -> None:
    batches = [{"x": torch.full((size, 2), 1.0 + size), "text": "a"} for size in (3, 1, 2)]
    compute, current, copied_on = _Stream(), list[_Stream](), list[_Stream]()
    upload = ops.upload

    @contextlib.contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def noted(*args: Any) -> Tensor:
        copied_on.append(current[-1])
        return upload(*args)

    with (
        PretendedCuda() as cuda,
        mock.patch.multiple(
            torch.cuda, Stream=_Stream, stream=on, current_stream=lambda device=None: compute
        ),
        mock.patch.object(ops, "upload", noted),
        mock.patch.object(Tensor, "record_stream"),
    ):
        weight = nn.Parameter(torch.ones(2, device=CUDA))
        model = nn.Module()
        model.register_parameter("weight", weight)

        def forward(batch: Any) -> tuple[Tensor, Tensor]:
            assert cuda.is_on_device(batch["x"])
            out = batch["x"] @ weight
            return out.sum(), out

        optimizer = torch.optim.SGD([weight], lr=0.0)
        pipeline: Any = TrainPipelineBase(model, optimizer, CUDA, forward)
        outputs = drain(pipeline, iter(batches))
        assert cuda.notes == []
    assert [out.tolist() for out in outputs] == [[8.0] * 3, [4.0], [6.0] * 2]
    assert copied_on == [pipeline._copies] * 3
    assert compute.waits == 3


class _Pooled(nn.Module):
    """A collection, and a loss that trains it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(ROWS, DIM, f"t_{key}", feature_names=[key]) for key in KEYS]
        )
        apply_optimizer_in_backward(RowWiseAdagrad, self.tables.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        out = self.tables(features).values()
        return (out * out).sum(), out


def test_on_a_gpu_with_one_rank_the_host_waits_for_nothing_and_hears_of_bad_ids() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [_features(generator, size) for size in (3, 1, 4, 2, 5)]
    unsharded, expected = _Pooled(), []
    for batch in batches:
        loss, out = unsharded(batch)
        loss.backward()
        expected.append(out.detach())
    compute = _Stream()
    with (
        PretendedCuda() as cuda,
        mock.patch.multiple(
            torch.cuda,
            Stream=_Stream,
            stream=lambda stream: contextlib.nullcontext(),
            current_stream=lambda device=None: compute,
        ),
        mock.patch.object(Tensor, "record_stream"),
    ):
        model: nn.Module = _Pooled()
        tables = construct_module_sharding_plan(
            model.tables, {f"t_{key}": table_wise(rank=0) for key in KEYS}, device_type="cuda"
        )
        plan = ShardingPlan({"tables": tables})
        model = DistributedModelParallel(model, device=CUDA, plan=plan)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
        pipeline: Any = TrainPipelineSparseDist(model, optimizer, CUDA)
        outputs, source = [], iter(batches)
        for _ in batches:
            cuda.forget()
            outputs.append(pipeline.progress(source).detach())
        assert cuda.notes == []
        bad = _features(generator, 2)
        bad.values()[0] = ROWS
        source = iter([batches[0], batches[1], bad, batches[2]])
        pipeline.progress(source)
        pipeline.progress(source)
        with pytest.raises(IndexError, match=f"Id {ROWS} at .*of feature 'f'"):
            pipeline.progress(source)
    for own, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(own, wanted)
