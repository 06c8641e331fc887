"""Batches of another structure: an error on every rank if one rank has one, fine if all have."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.train_pipeline.even_batches import EvenBatches
from recsys.distributed.train_pipeline.pipelines import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from recsys.distributed.train_pipeline.staged import SparseDataDistUtil, StagedTrainPipeline
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import CPU
from tests.distributed.train_pipeline.test_pipelines import (
    Samples,
    build,
    drain,
    plain,
    samples,
)
from tests.ranks import RankPool

STRUCTURES: dict[str, Callable[[Samples], Any]] = {
    "none": lambda batch: None,
    "number": lambda batch: 5,
    "tuple": lambda batch: (batch,),
    "keys": lambda batch: {"a": batch.first, "b": batch.second},
    "field": lambda batch: dataclasses.replace(batch, second=None),  # type: ignore[arg-type]
    "tensor": lambda batch: batch.dense,
}
TRAINING = [
    TrainPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
]
STEPS, ODD = 6, 3


def _one_odd_batch(make: Any, structure: str) -> tuple[list[int], str, bool]:
    """Return the steps that raised, the last message, and True if outputs equal a plain loop's."""
    rank = dist.get_rank()
    batches: list[Any] = [samples(rank, step) for step in range(STEPS)]
    good = [batch for step, batch in enumerate(batches) if step != ODD]
    if rank == 1:
        batches[ODD] = STRUCTURES[structure](batches[ODD])
    model, optimizer = build("towers")
    expected = plain(model, optimizer, good)
    model, optimizer = build("towers")
    pipeline: Any = make(model, optimizer, CPU)
    source, outputs, failed, message = iter(batches), [], [], ""
    for step in range(STEPS):
        try:
            outputs.append(pipeline.progress(source).detach())
        except ValueError as error:
            failed.append(step)
            message = str(error)
    return failed, message, all(map(torch.equal, outputs, expected))


class Lenient(nn.Module):
    """Reads features, or makes them of ids."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(50, 4, name, feature_names=["f"]) for name in "ab"]
        self.first, self.second = (EmbeddingBagCollection(tables=[table]) for table in tables)

    def forward(self, ids: Tensor | KeyedJaggedTensor) -> tuple[Tensor, None]:
        features = ids if isinstance(ids, KeyedJaggedTensor) else _features(ids)
        return self.first(features).values().mean() + self.second(features).values().mean(), None


def _features(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids))


def _odd_first_batch(make: Any) -> tuple[list[int], str]:
    """Steps that raised, and the last message, where one rank's first batch is odd."""
    model = DistributedModelParallel(Lenient(), device=CPU)
    pipeline: Any = make(model, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), CPU)
    batches: list[Any] = [_features(torch.tensor([step, step + 1])) for step in range(STEPS)]
    if dist.get_rank() == 1:
        batches[0] = batches[0].values()
    source, failed, message = iter(batches), [], ""
    for step in range(STEPS):
        try:
            pipeline.progress(source)
        except ValueError as error:
            failed.append(step)
            message = str(error)
    return failed, message


@pytest.mark.parametrize("make", TRAINING)
def test_a_first_batch_of_another_structure_is_named_on_every_rank(
    ranks: RankPool, make: Any
) -> None:
    for failed, message in ranks(2, _odd_first_batch, make, timeout=30.0):
        assert failed == [0]
        assert message == (
            "Batches must have the same structure on all ranks. All ranks must read the first "
            "batch from the same arguments; module 'first' differs: rank 0 has one that reads "
            "argument 0, rank 1 has one that reads features that the model computes. Pass the same "
            "on every rank."
        )


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("make", TRAINING)
def test_one_rank_with_another_structure_is_named_on_every_rank(
    ranks: RankPool, make: Any, structure: str
) -> None:
    for failed, message, is_same in ranks(2, _one_odd_batch, make, structure, timeout=30.0):
        assert failed == [ODD]  # when its turn comes, and not when it is read
        assert message.startswith("On rank 1: Batches must have the same structure on all ranks.")
        assert re.search(
            r"Module '(a|b)' reads its features from argument 0\['(first|second)'\]", message
        )
        assert is_same  # training continues without it


def _one_odd_batch_in_evaluation(how: str) -> list[int]:
    rank = dist.get_rank()
    batches: list[Any] = [samples(rank, step) for step in range(STEPS)]
    if rank == 1:
        batches[ODD] = None
    model, optimizer = build("towers")
    failed = []
    if how == "evaluation":
        pipeline: Any = EvalPipelineSparseDist(model.eval(), optimizer, CPU)
        step_of: Callable[[Any], object] = pipeline.progress
    else:
        ids: Any = SparseDataDistUtil(model, None)
        staged: Any = StagedTrainPipeline([ids.start_sparse_data_dist_stage()])
        step_of = lambda source: model(staged.progress(source))  # noqa: E731
    source = iter(batches)
    for step in range(STEPS):
        try:
            step_of(source)
        except ValueError as error:
            failed += [step] * ("same structure" in str(error))
    return failed


@pytest.mark.parametrize("how", ["evaluation", "stages"])
def test_also_in_other_pipelines(ranks: RankPool, how: str) -> None:
    assert ranks(2, _one_odd_batch_in_evaluation, how, timeout=30.0) == [[ODD]] * 2


def _all_odd(make: Any, even: bool) -> bool:
    """Return True if a model that accepts both structures trains as in a plain loop."""
    batches: list[Any] = [samples(dist.get_rank(), step) for step in range(STEPS)]
    for step in (2, ODD):
        batches[step] = (batches[step],)

    def build_lenient() -> Any:
        model, optimizer = build("towers")
        inner = model.module.forward
        model.module.forward = lambda batch: inner(batch[0] if isinstance(batch, tuple) else batch)
        return model, optimizer

    model, optimizer = build_lenient()
    expected = plain(model, optimizer, batches)
    model, optimizer = build_lenient()
    source = iter(EvenBatches(batches, model)) if even else iter(batches)
    outputs: list[Tensor] = drain(make(model, optimizer, CPU), source)
    return len(outputs) == STEPS and all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("make", TRAINING[:3])
def test_all_ranks_may_change_the_structure(ranks: RankPool, make: Any) -> None:
    assert ranks(2, _all_odd, make, False) == [True, True]


def test_the_end_of_the_data_is_known_without_the_features(ranks: RankPool) -> None:
    assert ranks(2, _all_odd, TrainPipelineSparseDist, True) == [True, True]
