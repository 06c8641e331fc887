"""Plays a case on the ranks, and checks their results."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.checkpoint import save_checkpoint
from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.train_pipeline.even_batches import EvenBatches
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recsys.kernels.types import EmbOptimType, UpdateMode
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import GradScaler
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import whole_state
from tests.fuzz import oracle
from tests.fuzz.cases import Batch, Case
from tests.fuzz.faults import FAULTS
from tests.fuzz.undo import UNDONE
from tests.ranks import RankError, RankPool

CPU = torch.device("cpu")
TIME_LIMIT_S = 40.0
_NAMED = (TypeError, ValueError, KeyError, IndexError, RuntimeError)
_KINDS = {
    "sgd": EmbOptimType.SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}


class Result(NamedTuple):
    """The results of one rank."""

    outputs: list[list[np.ndarray]]
    tables: dict[str, np.ndarray]
    error: str
    """Type and text; empty if there was none."""


class _Model(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, features: Any) -> list[torch.Tensor]:
        found = self.tables(features)
        if hasattr(found, "wait"):
            found = found.wait()
        return [x.values() for x in found.values()] if isinstance(found, dict) else [found.values()]


def features_of(batch: Batch) -> KeyedJaggedTensor:
    """The batch as the library takes it."""
    dtype = torch.int32 if batch.narrow else torch.int64
    keys = list(batch.bags)
    lengths = [len(bag) for key in keys for bag in batch.bags[key]]
    values = [row for key in keys for bag in batch.bags[key] for row in bag]
    weights = None
    if batch.weights is not None:
        flat = [w for key in keys for bag in batch.weights[key] for w in bag]
        weights = torch.tensor(flat, dtype=torch.float32)
    bags = {"lengths": torch.tensor(lengths, dtype=dtype)}
    if batch.by_offsets:
        bags = {"offsets": torch.tensor([0, *np.cumsum(lengths, dtype=int)], dtype=dtype)}
    inverse = None
    if batch.inverse is not None:
        rows = torch.tensor([batch.inverse[key] for key in keys], dtype=torch.int64)
        inverse = keys, rows.view(len(keys), -1)
    return KeyedJaggedTensor(
        keys,
        torch.tensor(values, dtype=dtype),
        weights,
        **bags,
        stride_per_key=[len(batch.bags[k]) for k in keys] if inverse is not None else None,
        inverse_indices=inverse,
    )


class _Player:
    """One rank of a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.rank = case, dist.get_rank()
        self.fault = None if case.fault is None else FAULTS[case.fault]

    def is_faulty(self, stage: str) -> bool:
        """Return True if this rank makes the fault at this stage."""
        here = self.fault is not None and self.fault.stage == stage
        return here and (self.fault.on_all or self.rank == self.case.bad_rank)  # type: ignore[union-attr]

    def _make(self, stage: str, *given: Any) -> Any:
        return self.fault.make(*given) if self.is_faulty(stage) else None  # type: ignore[union-attr]

    def collection(self) -> EmbeddingBagCollection | EmbeddingCollection:
        """The tables, with the oracle's weights."""
        case = self.case
        settings: list[dict[str, Any]] = []
        for table in case.tables:
            own: dict[str, Any] = {
                "num_embeddings": table.rows,
                "embedding_dim": table.dim,
                "name": table.name,
                "feature_names": list(table.features),
            }
            if not case.sequence:
                own["pooling"] = PoolingType.MEAN if table.mean else PoolingType.SUM
            settings.append(own)
        config = EmbeddingConfig if case.sequence else EmbeddingBagConfig
        given: Any = settings
        if self.is_faulty("configs") and case.fault != "tables by a generator":
            given = self._make("configs", settings)
        configs: Any = [config(**own) for own in given]
        if case.fault == "tables by a generator":
            configs = self._make("configs", configs)
        if case.sequence:
            return EmbeddingCollection(tables=configs, device=CPU)
        return EmbeddingBagCollection(tables=configs, device=CPU, is_weighted=case.weighted)

    def sharded(self) -> DistributedModelParallel:
        """The model on the ranks."""
        case = self.case
        collection = self.collection()
        tables: Any = getattr(collection, "embeddings" if case.sequence else "embedding_bags")
        for table in case.tables:
            if tables[table.name].weight.shape == (table.rows, table.dim):
                tables[table.name].weight.data.copy_(torch.from_numpy(oracle.initial(table)))
        plan = EmbeddingModuleShardingPlan(
            {
                table.name: parameter_sharding(
                    ShardingType(case.plan[table.name][0]),
                    collection.configs()[i].num_embeddings,
                    table.dim,
                    list(case.plan[table.name][1]),
                )
                for i, table in enumerate(case.tables)
            }
        )
        model = _Model(collection)
        self._make("model", model, tables)
        self._make("plan", plan)
        fused: dict[str, Any] = {"optimizer": _KINDS[case.optimizer], "learning_rate": case.rate}
        if case.optimizer != "sgd":
            fused["eps"] = oracle.EPS
        if case.deferred:
            fused["update_mode"] = UpdateMode.DEFERRED
        sharder: Any = EmbeddingBagCollectionSharder(fused_params=fused)
        if case.sequence:
            sharder = EmbeddingCollectionSharder(fused, use_index_dedup=case.distinct)
        return DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CPU,
            plan=ShardingPlan({"tables": plan}),
            sharders=[sharder],
        )

    def steps(self, model: DistributedModelParallel) -> Iterable[tuple[int, Any]]:
        """The features of each step."""
        batches: Any = [features_of(of_rank[self.rank]) for of_rank in self.case.steps]
        if self.is_faulty("batch"):
            batches[-1] = self._make("batch", batches[-1])
        if self.fault is not None and self.fault.stage == "data":
            empty = self.is_faulty("data")
            return enumerate(EvenBatches([] if empty else batches, model, "join"))
        return enumerate(batches)

    def play(self) -> Result:
        """Trains, and returns all there is to compare."""
        model = self.sharded()
        self._make("rates", model.fused_optimizer.param_groups)
        outputs = []
        for step, features in self.steps(model):
            found = model(features)
            outputs.append([values.detach().double().numpy() for values in found])
            loss = torch.zeros((), requires_grad=True)
            for values in found:
                factors = oracle.factors(tuple(values.shape), self.rank, step)
                loss = loss + (values * torch.from_numpy(factors).float()).sum()
            if self.is_faulty("scaler"):
                loss = GradScaler("cpu", init_scale=1024.0).scale(loss)
            loss.backward()
            model.fused_optimizer.step()
            model.fused_optimizer.zero_grad()
        if self.fault is not None and self.fault.stage == "save":
            extra = {"step": 1}
            self._make("save", extra)
            folders = [tempfile.mkdtemp() if self.rank == 0 else ""]
            dist.broadcast_object_list(folders, src=0)
            save_checkpoint(folders[0], model, extra=extra)
        tables = {
            name.split(".")[-2]: value.double().numpy()
            for name, value in whole_state(model).items()
        }
        return Result(outputs, tables, "")


def play(case: Case, undone: str | None = None) -> Result:
    """Runs on every rank."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(case.world)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if undone is not None:
            for patch in UNDONE[undone]():
                stack.enter_context(patch)
        try:
            return _Player(case).play()
        except _NAMED as error:
            text = str(error.args[0] if error.args else error)
            return Result([], {}, f"{type(error).__name__}: {text}")


def complaint_about(pool: RankPool, case: Case, undone: str | None = None) -> str | None:
    """Play a case; return the error in its results, or None if they are right."""
    says = None if case.fault is None else FAULTS[case.fault].says
    try:
        results = pool(case.world, play, case, undone, timeout=TIME_LIMIT_S)
    except RankError as error:
        silent = re.match(r"ranks without an answer: \[(.*?)\]", str(error))
        last = str(error).strip().splitlines()[-1]
        if silent is not None and silent[1]:
            return f"hangs: no answer from ranks {silent[1]}; {last}"
        return f"an error without a name: {last}"
    errors = [result.error for result in results]
    if any(errors):
        if says is None:
            return f"an error of sound input: {errors[0]}"
        if len(set(errors)) > 1:
            return f"ranks say different things: {errors}"
        return None if re.search(says, errors[0], re.DOTALL) else f"an unclear error: {errors[0]}"
    if says is not None:
        return "passes silently"
    return _difference(case, results)


def _difference(case: Case, results: list[Result]) -> str | None:
    if case.fault == "no batch on one rank":
        case = _without_batches(case)
    outputs, tables = oracle.train(case)
    for step, by_rank in enumerate(outputs):
        for rank, expected in enumerate(by_rank):
            found = results[rank].outputs[step]
            for number, (own, right) in enumerate(zip(found, expected, strict=True)):
                wrong = _wrong(own, right)
                if wrong:
                    return f"output {number} of rank {rank}, step {step}: {wrong}"
    for rank, result in enumerate(results):
        for name, right in tables.items():
            wrong = _wrong(result.tables[name], right)
            if wrong:
                return f"table {name} on rank {rank}: {wrong}"
    return None


def _without_batches(case: Case) -> Case:
    """The case as it is where the bad rank takes part with empty batches."""
    from dataclasses import replace

    def empty(batch: Batch) -> Batch:
        none: dict[str, list[Any]] = {key: [] for key in batch.bags}
        return replace(
            batch,
            bags=none,
            weights=None if batch.weights is None else none,
            inverse=None if batch.inverse is None else none,
        )

    steps = tuple(
        tuple(empty(b) if rank == case.bad_rank else b for rank, b in enumerate(batches))
        for batches in case.steps
    )
    return replace(case, steps=steps)


def _wrong(found: np.ndarray, right: np.ndarray) -> str:
    if found.shape != right.shape:
        return f"shape {found.shape} in place of {right.shape}"
    if not np.allclose(found, right, rtol=1e-3, atol=1e-4):
        place = np.unravel_index(np.abs(found - right).argmax(), right.shape)
        return f"{found[place]} in place of {right[place]}"
    return ""
