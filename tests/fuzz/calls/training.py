"""Calls of train pipelines and of what watches a training, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recsys.distributed.monitoring.loss_guard import LossGuard
from recsys.distributed.monitoring.step_report import StepReport
from recsys.distributed.monitoring.watchdog import Watchdog
from recsys.distributed.train_pipeline.even_batches import EvenBatches, UnevenPolicy, empty_batch
from recsys.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from recsys.distributed.train_pipeline.pipelines import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from recsys.distributed.train_pipeline.staged import (
    PipelineStage,
    SparseDataDistUtil,
    StagedTrainPipeline,
)
from recsys.training import BinaryMetrics, NamedMetrics, Trainer
from tests.fuzz.argument_kinds import (
    DEVICE,
    KJT,
    Kind,
    anything,
    flag,
    function,
    made,
    many,
    maybe,
    member,
    module,
    number,
    path,
    tensor,
    text,
    whole,
)
from tests.fuzz.calls.call import Call, method
from tests.fuzz.calls.distributed import sharded


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(batch)
        return out.square().mean(), out


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(_Model().parameters(), lr=0.1)


def _batches() -> Any:
    return iter([torch.ones(3, 2), torch.ones(5, 2)])


def _pipeline(
    kind: Callable[..., TrainPipelineBase[Any, Any]] = TrainPipelineBase,
) -> TrainPipelineBase[Any, Any]:
    model = _Model()
    return kind(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))


def _accumulating() -> GradientAccumulationWrapper[Any, Any]:
    pipeline = _pipeline()
    return GradientAccumulationWrapper(
        pipeline, _optimizer(), _Model(), GradientAccumulationConfig(True, 2)
    )


def _in_report(**given: Any) -> None:
    with StepReport() as report:
        report.step(**given)


def _trainer(**given: Any) -> Trainer:
    model = _Model()
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)


OPTIMIZER = made(_optimizer, torch.optim.Optimizer)
BASE = {
    "model": module(_Model), "optimizer": OPTIMIZER, "device": DEVICE,
}  # fmt: skip
FORWARD = {"custom_model_fwd": maybe(Kind(
    lambda: None, lambda value: None if callable(value) else False))}  # fmt: skip
FEATURES = {"features": maybe(Kind(
    lambda: None, lambda value: None if isinstance(value, dict) and all(
        isinstance(key, str) and callable(one) for key, one in value.items()) else False,
))}  # fmt: skip
SPARSE = {
    **BASE, **FORWARD, **FEATURES, "execute_all_batches": flag(True), "apply_jit": flag(False),
    "pipeline_postproc": flag(True),
}  # fmt: skip
INTERVAL = {"dmp_collection_sync_interval_batches": maybe(whole(1))}
BATCHES = {"dataloader_iter": Kind(_batches, lambda value: None if hasattr(
    value, "__next__") else False)}  # fmt: skip
STREAM = maybe(Kind(lambda: None, lambda value: False))
STAGE = {"name": text("one"), "runnable": maybe(function(lambda batch: batch))}

CALLS = [
    Call("TrainPipelineBase", TrainPipelineBase, BASE | FORWARD),
    Call("TrainPipelineSparseDist", TrainPipelineSparseDist, SPARSE | INTERVAL | {
        "context_type": anything(lambda: None),
    }),
    Call("PrefetchTrainPipelineSparseDist", PrefetchTrainPipelineSparseDist, SPARSE),
    Call("TrainPipelineFusedSparseDist", TrainPipelineFusedSparseDist, SPARSE),
    Call("TrainPipelineSemiSync", TrainPipelineSemiSync, SPARSE | INTERVAL | {
        "start_batch": whole(3, 0), "stash_gradients": flag(False), "strict": flag(False),
    }),
    Call("EvalPipelineSparseDist", EvalPipelineSparseDist, {
        **BASE, **FEATURES, "apply_jit": flag(False), "pipeline_postproc": flag(False),
        "optimizer": anything(lambda: None),
    }),
    *(
        Call(f"{kind.__name__}.progress", method(lambda kind=kind: _pipeline(kind), "progress"),
             BATCHES)
        for kind in (TrainPipelineBase, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist)
    ),
    Call("TrainPipelineSparseDist.attach", method(
        lambda: _pipeline(TrainPipelineSparseDist), "attach"), {
        "model": maybe(module(_Model)), "sparse_dist": flag(True),
    }),
    Call("PipelineStage", PipelineStage, {
        "name": text("one"), "runnable": function(lambda batch: batch), "stream": STREAM,
        "fill_callback": maybe(function(lambda: None)),
        "data_exhausted_callback": maybe(function(lambda: None)),
    }),
    Call("StagedTrainPipeline", StagedTrainPipeline, {
        "pipeline_stages": many(lambda: [PipelineStage("one", str)], made(
            lambda: PipelineStage("one", str)), 1),
        "debug_mode": flag(False), "compute_stream": STREAM,
        "on_flush_end": maybe(function(lambda: None)),
    }),
    Call("StagedTrainPipeline.progress", method(
        lambda: StagedTrainPipeline([PipelineStage("one", str)]), "progress"), BATCHES),
    Call("StagedTrainPipeline.set_flush", method(
        lambda: StagedTrainPipeline([PipelineStage("one", str)]), "set_flush"), {
        "flush": flag(True),
    }),
    Call("SparseDataDistUtil", SparseDataDistUtil, {
        "model": module(sharded), "data_dist_stream": STREAM, "apply_jit": flag(False),
        "prefetch_stream": STREAM, "pipeline_postproc": flag(False),
        "embedding_lookup_stream": STREAM,
    }),
    Call("SparseDataDistUtil.start_sparse_data_dist_stage", method(
        lambda: SparseDataDistUtil(sharded(), None), "start_sparse_data_dist_stage"), STAGE),
    Call("GradientAccumulationConfig", GradientAccumulationConfig, {
        "is_enabled": flag(True), "num_steps": whole(2), "num_warmup_steps": whole(1),
    }),
    Call("GradientAccumulationWrapper", GradientAccumulationWrapper, {
        "pipeline": made(_pipeline), "optimizer": OPTIMIZER, "model": module(_Model),
        "config": made(lambda: GradientAccumulationConfig(True, 2)),
    }),
    Call("GradientAccumulationWrapper.progress", method(_accumulating, "progress"), BATCHES | {
        "is_last_batch": maybe(flag(False)),
    }),
    Call("GradientAccumulationWrapper.set_step", method(_accumulating, "set_step"), {
        "step": whole(1, 0),
    }),
    Call("EvenBatches", lambda **given: [given["model"](b) for b in EvenBatches(**given)], {
        "batches": many(lambda: [KJT.right()], anything(lambda: None)), "model": module(sharded),
        "policy": member(UnevenPolicy.DROP),
    }),
    Call("empty_batch", empty_batch, {"batch": anything(KJT.right)}),
    Call("StepReport", StepReport, {
        "writer": maybe(Kind(lambda: None, lambda value: None if hasattr(
            value, "add_scalar") else False)),
        "every": whole(3), "trace": maybe(path(lambda: "trace.json")), "traced_steps": whole(3),
    }),
    Call("StepReport.step", _in_report, {"samples": whole(3, 0)}),
    Call("StepReport.data", lambda **given: list(StepReport().data(**given)), {
        "batches": many(lambda: [torch.ones(1)], anything(lambda: None)),
    }),
    Call("Watchdog", Watchdog, {
        "warn_after": number(3.0, 0, is_finite=False),
        "abort_after": maybe(number(3.0, 0, is_finite=False)),
    }),
    Call("Watchdog.pause", method(Watchdog, "pause"), {"name": text("evaluation")}),
    Call("LossGuard", LossGuard, {
        "folder": path(lambda: "bad"), "spike": maybe(number(10.0, 1)), "window": whole(10),
        "skip": flag(False), "most": whole(10),
    }),
    Call("LossGuard.check", method(lambda: LossGuard("bad"), "check"), {
        "loss": tensor(lambda: torch.tensor(0.5)), "batch": anything(lambda: torch.ones(2)),
        "step": maybe(whole(1, 0)),
    }),
    Call("Trainer", _trainer, {
        "folder": path(lambda: "run"), "epochs": whole(2), "evaluate_every": maybe(whole(2)),
        "metrics": function(BinaryMetrics), "monitor": text("loss"), "maximize": maybe(flag(False)),
        "patience": maybe(whole(2)), "load_best": flag(True), "save_every": maybe(whole(2)),
        "resume": flag(False), "overwrite": flag(False), "clip_norm": maybe(number(1.0, 0)),
        "pipeline": flag(True), "uneven": maybe(member(UnevenPolicy.DROP)),
        "log_every": maybe(whole(2)), "shows_bar": flag(True),
    }),
    Call("BinaryMetrics", BinaryMetrics, {
        "device": DEVICE, "tasks": many(lambda: ["click"], text("click")), "auc": flag(True),
    }),
    Call("NamedMetrics", NamedMetrics, {
        "metrics": many(lambda: ["auc"], text("auc")), "device": DEVICE,
        "tasks": many(lambda: ["click"], text("click")),
    }),
    Call("LossGuard.around", method(lambda: LossGuard("bad"), "around"), {
        "model": module(_Model),
    }),
]  # fmt: skip
