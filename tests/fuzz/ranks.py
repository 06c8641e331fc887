"""One rank differs from the others: all raise the same error, or it changes nothing.

A case trains, saves and loads a small random model. One rank does one thing otherwise: another
argument, config, batch or file. The same case without the difference is the oracle.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.checkpoint import load_checkpoint, load_table, save_checkpoint
from recsys.distributed.checkpoint import save_checkpoint_async as save_async
from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.train_pipeline.even_batches import EvenBatches
from recsys.distributed.train_pipeline.pipelines import TrainPipelineSparseDist
from recsys.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType
from recsys.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import SGD, Adam, RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.optim.clipping import GradientClipping, GradientClippingOptimizer
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import whole
from tests.ranks import RankError, RankPool

CPU = torch.device("cpu")
TIME_LIMIT_S = 20.0
STEPS = 4
KEYS = ["f", "g"]
_NAMED = (TypeError, ValueError, KeyError, IndexError, RuntimeError, OSError)


def _ones(values: Tensor) -> None:
    values.fill_(1.0)


def _twos(values: Tensor) -> None:
    values.fill_(2.0)


@dataclasses.dataclass
class Job:
    """All that one rank does; a difference changes a member."""

    configs: list[dict[str, Any]]
    types: list[str]
    owners: list[list[int]]
    pooled: bool
    weighted: bool
    optimizers: list[tuple[Any, dict[str, Any]]]
    trains: list[bool]
    half: list[bool]
    wrapper: dict[str, Any]
    batches: list[Any]
    folder: str = ""
    layers: tuple[int, ...] = (5, 3)
    dense_dtype: torch.dtype = torch.float32
    dense_trains: bool = True
    fused_params: dict[str, Any] = dataclasses.field(default_factory=dict)
    update_mode: str = "fused"
    init_data_parallel: bool = True
    init_parameters: bool = True
    in_pipeline: bool = False
    even: str | None = None
    without_grad_at: int = -1
    clipping: dict[str, Any] = dataclasses.field(default_factory=dict)
    save: dict[str, Any] = dataclasses.field(default_factory=dict)
    asynchronous: bool = False
    load: dict[str, Any] = dataclasses.field(default_factory=dict)
    load_path: str = "c"
    table: str = "t0"
    table_values: Any = None
    strict: bool = True
    lacks: str = ""
    reshard: str = ""


class _Model(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.pooled = job.pooled
        config: Any = EmbeddingBagConfig if job.pooled else EmbeddingConfig
        tables: Any = [config(**own) for own in job.configs]
        if job.pooled:
            self.tables: Any = EmbeddingBagCollection(tables=tables, is_weighted=job.weighted)
        else:
            self.tables = EmbeddingCollection(tables=tables)
        width = sum(own["embedding_dim"] * len(own["feature_names"]) for own in job.configs)
        if not job.pooled:
            width = job.configs[0]["embedding_dim"]
        sizes = [width, *job.layers, 1]
        self.over = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))).to(
            job.dense_dtype
        )
        self.over.requires_grad_(job.dense_trains)

    def forward(self, features: Any) -> tuple[Tensor, Tensor]:
        found = self.tables(features)
        if self.pooled:
            values = found.values()
        else:
            values = torch.cat([jagged.values() for jagged in dict(found.items()).values()])
        logits = self.over(values.to(self.over[0].weight.dtype))
        return logits.float().pow(2).sum(), logits


def _features(rng: random.Random, weighted: bool) -> KeyedJaggedTensor:
    lengths = [rng.randint(0, 3) for _ in range(2 * rng.randint(1, 4))]
    ids = [rng.randrange(6) for _ in range(sum(lengths))]
    weights = torch.tensor([rng.random() for _ in ids]) if weighted else None
    return KeyedJaggedTensor(
        KEYS, torch.tensor(ids, dtype=torch.int64), weights, lengths=torch.tensor(lengths)
    )


def draw(seed: int, world: int, rank: int) -> Job:
    """Draw the job of one rank; the settings that ranks must share are equal on all."""
    rng = random.Random(seed)
    pooled = rng.random() < 0.7
    weighted = pooled and rng.random() < 0.3
    dim = rng.choice((4, 8))
    configs: list[dict[str, Any]] = []
    types, owners, optimizers = [], [], []
    for number in range(rng.randint(1, 3)):
        own: dict[str, Any] = {
            "num_embeddings": rng.randint(6, 12),
            "embedding_dim": rng.choice((4, 8)) if pooled else dim,
            "name": f"t{number}",
            "feature_names": rng.sample(KEYS, rng.randint(1, 2)),
        }
        if pooled:
            own["pooling"] = rng.choice(("SUM", "MEAN"))
        configs.append(own)
        kind = rng.choice(("table_wise", "row_wise", "column_wise", "data_parallel"))
        types.append(kind)
        all_ranks = list(range(world))
        owners.append([rng.choice(all_ranks)] if kind == "table_wise" else all_ranks[:4])
        optimizers.append((rng.choice((SGD, RowWiseAdagrad)), {"lr": rng.choice((0.1, 0.5))}))
    job = Job(
        configs, types, owners, pooled, weighted, optimizers,
        trains=[True] * len(configs), half=[False] * len(configs), wrapper={}, batches=[],
        in_pipeline=rng.random() < 0.4, asynchronous=rng.random() < 0.3,
        even=rng.choice((None, None, "drop", "join")),
        reshard=rng.choice(("", "", "row_wise", "table_wise")),
    )  # fmt: skip
    if rng.random() < 0.2:  # deferred tables can be clipped
        job.update_mode = "deferred"
        job.clipping = {"clipping": GradientClipping.NORM, "max_gradient": 0.5}
    own_rng = random.Random(seed * 10 + rank)
    job.batches = [_features(own_rng, weighted) for _ in range(STEPS)]
    job.table_values = np.full(
        (configs[0]["num_embeddings"], configs[0]["embedding_dim"]), 0.25, np.float32
    )
    return job


def run(job: Job) -> dict[str, Any]:
    """Build, train, save, load and move; return the results."""
    model_ = _Model(job)
    weights = model_.tables.table_weights()
    for (name, weight), (kind, settings), trains, half in zip(
        weights.items(), job.optimizers, job.trains, job.half, strict=True
    ):
        if half:
            weight.data = weight.data.half()
        if not job.fused_params:
            apply_optimizer_in_backward(kind, [weight], settings, update_mode=job.update_mode)
        weight.requires_grad_(trains)
        del name
    plan = EmbeddingModuleShardingPlan(
        {
            own["name"]: parameter_sharding(
                ShardingType(kind), own["num_embeddings"], own["embedding_dim"], owners
            )
            for own, kind, owners in zip(job.configs, job.types, job.owners, strict=True)
        }
    )
    sharder: Any = EmbeddingBagCollectionSharder if job.pooled else EmbeddingCollectionSharder
    model = DistributedModelParallel(
        model_,
        device=CPU,
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder(fused_params=job.fused_params or None)],
        data_parallel_wrapper=DefaultDataParallelWrapper(**job.wrapper),
        init_data_parallel=job.init_data_parallel,
        init_parameters=job.init_parameters,
    )
    dense = {n: p for n, p in model.named_parameters() if n.startswith("over") and p.requires_grad}
    parts: list[Any] = [model.fused_optimizer]
    if dense:
        parts.append(KeyedOptimizerWrapper(dense, partial(torch.optim.SGD, lr=0.1)))
    both = CombinedOptimizer(parts)
    optimizer: Any = both
    if job.clipping:
        optimizer = GradientClippingOptimizer(both, enable_global_grad_clip=True, **job.clipping)
    losses = _train(job, model, optimizer)
    if job.lacks:
        state = model.state_dict()
        if job.lacks != "nothing":
            state = {name: value for name, value in state.items() if job.lacks not in name}
        model.load_state_dict(state, strict=job.strict)
    path = os.path.join(job.folder, "c")
    saving = save_async if job.asynchronous else save_checkpoint
    given = {"optimizer": both, "extra": {"a": 1}, **job.save}
    pending = saving(given.pop("path", path), model, given.pop("optimizer"), **given)
    if pending is not None:
        pending.wait()
    loaded = load_checkpoint(
        os.path.join(job.folder, job.load_path), model, **{"optimizer": both, **job.load}
    )
    load_table(model, job.table, job.table_values)
    if job.reshard:
        first = job.configs[0]
        to = parameter_sharding(
            ShardingType(job.reshard), first["num_embeddings"], first["embedding_dim"],
            [0] if job.reshard == "table_wise" else list(range(dist.get_world_size())),
        )  # fmt: skip
        model.reshard({"tables": {"t0": to}})
    found = {name: whole(value).double().numpy() for name, value in model.state_dict().items()}
    return {"losses": losses, "tables": found, "loaded": sorted(loaded)}


def _train(job: Job, model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    batches: Any = job.batches
    if job.even is not None:
        batches = EvenBatches(batches, model, job.even)
    if job.in_pipeline:
        pipeline: Any = TrainPipelineSparseDist(model, optimizer, CPU)
        source = iter(batches)
        while True:
            try:
                losses.append(float(pipeline.progress(source).detach().float().sum()))
            except StopIteration:
                return losses
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        with torch.set_grad_enabled(step != job.without_grad_at):
            loss, _ = model(batch)
        losses.append(float(loss.detach()))
        if step != job.without_grad_at:
            loss.backward()
            optimizer.step()
    return losses


# -- differences -----------------------------------------------------------------------------------


def _config(**changes: Any) -> Callable[[Job], None]:
    def change(job: Job) -> None:
        job.configs[0].update(changes)

    return change


def _set(**changes: Any) -> Callable[[Job], None]:
    def change(job: Job) -> None:
        for name, value in changes.items():
            setattr(job, name, value)

    return change


def _batch(make: Callable[[Any], Any], at: int = 2) -> Callable[[Job], None]:
    def change(job: Job) -> None:
        job.batches[at] = make(job.batches[at])

    return change


def _only_pooled(change: Callable[[Job], None]) -> Callable[[Job], None]:
    return lambda job: change(job) if job.pooled else None


def _permuted(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return kjt.permute([1, 0])


def _narrow(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        kjt.keys(), kjt.values().int(), kjt.weights_or_none(), lengths=kjt.lengths().int()
    )


def _renamed(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f", "h"], kjt.values(), kjt.weights_or_none(), lengths=kjt.lengths())


def _without_weights(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(kjt.keys(), kjt.values(), lengths=kjt.lengths())


def _empty(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights = kjt.weights_or_none()
    return KeyedJaggedTensor(
        kjt.keys(),
        kjt.values()[:0],
        None if weights is None else weights[:0],
        lengths=kjt.lengths()[:0],
    )


def _other_id(bad: int) -> Callable[[KeyedJaggedTensor], KeyedJaggedTensor]:
    def make(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        ids, lengths = torch.full((2,), bad), torch.zeros_like(kjt.lengths())
        lengths[0] = lengths[-1] = 1
        weights = None if kjt.weights_or_none() is None else torch.ones(2)
        return KeyedJaggedTensor(kjt.keys(), ids, weights, lengths=lengths)

    return make


def _swap_tables(job: Job) -> None:
    for name in ("configs", "types", "owners", "optimizers"):
        getattr(job, name).reverse()


def _shorter(job: Job) -> None:
    job.batches = job.batches[:2]


OTHER_PLACE = {"": "", "row_wise": "table_wise", "table_wise": "row_wise"}
DIFFERENCES: dict[str, Callable[[Job], None]] = {
    "rows": _config(num_embeddings=20),
    "columns": _only_pooled(_config(embedding_dim=12)),
    "a name": _config(name="other"),
    "features": _config(feature_names=["f", "h"]),
    "order of features": lambda job: job.configs[0]["feature_names"].reverse(),
    "pooling": _only_pooled(
        lambda job: job.configs[-1].update(
            pooling="MEAN" if job.configs[-1]["pooling"] == "SUM" else "SUM"
        )
    ),
    "a data type": _config(data_type=DataType.FP16),
    "an initial range": _config(weight_init_min=-2.0),
    "an init_fn": _config(init_fn=_ones),
    "weights of ids": _only_pooled(lambda job: setattr(job, "weighted", not job.weighted)),
    "order of tables": _swap_tables,
    "half weights": lambda job: setattr(job, "half", [True] * len(job.configs)),
    "a frozen table": lambda job: setattr(job, "trains", [False] * len(job.configs)),
    "an optimizer": lambda job: job.optimizers.__setitem__(0, (Adam, {"lr": 0.1})),
    "a rate": lambda job: job.optimizers.__setitem__(0, (job.optimizers[0][0], {"lr": 0.3})),
    "an update mode": lambda job: setattr(job, "update_mode", "deferred"),
    "a setting": lambda job: job.optimizers.__setitem__(
        0, (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-3})
    ),
    "a plan's type": lambda job: job.types.__setitem__(
        0, "row_wise" if job.types[0] == "data_parallel" else "data_parallel"
    ),
    "fused_params": _set(fused_params={"learning_rate": 0.7}),
    "dense sizes": _set(layers=(6, 3)),
    "dense layers": _set(layers=(5,)),
    "a dense dtype": _set(dense_dtype=torch.float64),
    "frozen dense layers": _set(dense_trains=False),
    "unused parameters": _set(wrapper={"find_unused_parameters": True}),
    "a static graph": _set(wrapper={"static_graph": True}),
    "buckets": _set(wrapper={"bucket_cap_mb": 1}),
    "ignored parameters": _set(wrapper={"params_to_ignore": ["over.0.bias"]}),
    "buffers": _set(wrapper={"broadcast_buffers": True}),
    "no replicas": _set(init_data_parallel=False),
    "no parameters": _set(init_parameters=False),
    "order of keys": _batch(_permuted),
    "int32 ids": _batch(_narrow),
    "another key": _batch(_renamed),
    "no weights": _batch(_without_weights),
    "an empty batch": _batch(_empty),
    "a large id": _batch(_other_id(99)),
    "a negative id": _batch(_other_id(-1)),
    "no batch": _batch(lambda kjt: None),
    "a number for a batch": _batch(lambda kjt: 3),
    "a tuple around a batch": _batch(lambda kjt: (kjt,)),
    "a dict around a batch": _batch(lambda kjt: {"x": kjt}),
    "no gradients": _set(without_grad_at=1),
    "a policy": lambda job: setattr(job, "even", job.even and "pad"),
    "fewer batches": lambda job: _shorter(job) if job.even == "join" else None,
    "a limit of gradients": lambda job: job.clipping and job.clipping.update(max_gradient=9.0),
    "a kind of clipping": lambda job: job.clipping
    and job.clipping.update(clipping=GradientClipping.VALUE),
    "a path to save": lambda job: job.save.update(path=os.path.join(job.folder, "other")),
    "a step to save": _set(save={"step": 7}),
    "a wrong step": _set(save={"step": 1.5}),
    "versions to keep": _set(save={"keep": None}),
    "one file too": _set(save={"consolidated": True}),
    "no optimizer to save": _set(save={"optimizer": None}),
    "extra to save": _set(save={"extra": {"a": object()}}),
    "a kind of save": lambda job: setattr(job, "asynchronous", not job.asynchronous),
    "a path to load": _set(load_path="nowhere"),
    "a partial load": _set(load={"allow_partial": True}),
    "settings to keep": _set(load={"keep_settings": True}),
    "a table to resize": _set(load={"resize": ["t0"]}),
    "no optimizer to load": _set(load={"optimizer": None}),
    "a table to load": _set(table="tx"),
    "values of a table": lambda job: setattr(job, "table_values", job.table_values[1:]),
    "values that are NaN": lambda job: setattr(job, "table_values", job.table_values * np.nan),
    "no values": _set(table_values=None),
    "a state that lacks a table": _set(lacks="t0"),
    "a place to move to": lambda job: setattr(job, "reshard", OTHER_PLACE[job.reshard]),
}  # fmt: skip
NEEDS_STATE = ("a state that lacks a table",)


def _play(seed: int, difference: str, bad_rank: int | None) -> tuple[str, dict[str, Any]]:
    """Runs on every rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    folders = [tempfile.mkdtemp(prefix="recsys-fuzz-") if rank == 0 else ""]
    dist.broadcast_object_list(folders, src=0)
    torch.manual_seed(0)
    job = draw(seed, world, rank)
    job.folder = folders[0]
    if difference in NEEDS_STATE:
        job.lacks = "nothing"
    if rank == bad_rank:
        DIFFERENCES[difference](job)
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(world)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "", run(job)
        except _NAMED as error:
            text = str(error.args[0] if error.args else error)
            return f"{type(error).__name__}: {text}", {}


def complaint_about(pool: RankPool, seed: int) -> str | None:
    """Return the error in the case of a seed, or None."""
    rng = random.Random(seed)
    difference = list(DIFFERENCES)[seed % len(DIFFERENCES)]
    world = rng.choice((2, 2, 3))
    bad_rank = rng.randrange(world)
    subject = f"{difference!r} on rank {bad_rank} of {world}"
    try:
        results = pool(world, _play, seed, difference, bad_rank, timeout=TIME_LIMIT_S)
    except RankError as error:
        silent = re.match(r"ranks without an answer: \[(.*?)\]", str(error))
        if silent is not None and silent[1]:
            return f"{subject}: hangs, no answer from ranks {silent[1]}"
        return f"{subject}: an error without a name: {str(error).strip().splitlines()[-1]}"
    errors = {text.replace(f"On rank {bad_rank}: ", "") for text, _ in results}
    if "" not in errors:
        return None if len(errors) == 1 else f"{subject}: ranks raise different errors: {errors}"
    if len(errors) > 1:
        return f"{subject}: only some ranks raise: {[text for text, _ in results]}"
    expected = pool(world, _play, seed, difference, None, timeout=TIME_LIMIT_S)
    for rank, ((_, found), (text, right)) in enumerate(zip(results, expected, strict=True)):
        if text:
            return f"{subject}: the case itself fails: {text}"
        wrong = _wrong(found, right, difference)
        if wrong:
            return f"{subject}: silently {wrong} on rank {rank}"
    return None


def _wrong(found: dict[str, Any], right: dict[str, Any], difference: str) -> str:
    if difference not in ("an empty batch", "fewer batches") and not np.allclose(
        found["losses"], right["losses"], rtol=1e-3
    ):
        return f"other losses {found['losses']} instead of {right['losses']}"
    for name, value in right["tables"].items():
        own = found["tables"].get(name)
        if own is None or own.shape != value.shape:
            return f"another shape of {name}"
        if difference not in ("an empty batch", "fewer batches") and not np.allclose(
            own, value, rtol=1e-3, atol=1e-5
        ):
            return f"other values of {name}"
    return "" if found["loaded"] == right["loaded"] else "other extra values"
