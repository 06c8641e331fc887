"""Calls of sharders, sharded modules, `DistributedModelParallel` and checkpoints, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from recsys.distributed import (
    DistributedModelParallel,
    NoWait,
    ShardingEnv,
    get_local_rank,
    get_local_size,
)
from recsys.distributed.checkpoint import (
    RandomState,
    export_safetensors,
    load_checkpoint,
    load_table,
    newest_version,
    read_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
)
from recsys.distributed.default_sharders import add_default_sharder, sharder_of
from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from recsys.distributed.fully_sharded import FullyShardWrapper
from recsys.distributed.fused_embedding import FusedEmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DefaultDataParallelWrapper, get_unwrapped_module
from recsys.distributed.planner import EmbeddingShardingPlanner, Topology
from recsys.distributed.ranks.wire import (
    CommOp,
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from recsys.distributed.shard import exclude_sharded_from_ddp, shard, shard_modules
from recsys.distributed.sharding_plan import row_wise
from recsys.distributed.types import LazyAwaitable, ParameterSharding, copy_to_device
from recsys.optim import SGD, KeyedOptimizer, apply_optimizer_in_backward
from tests.fuzz.argument_kinds import (
    DEVICE,
    KJT,
    Kind,
    anything,
    either,
    flag,
    function,
    made,
    many,
    mapping,
    maybe,
    member,
    module,
    number,
    path,
    text,
    texts,
    whole,
)
from tests.fuzz.calls.call import Call, method
from tests.fuzz.calls.modules import bags, processed
from tests.fuzz.calls.optim import keyed
from tests.fuzz.calls.planner import SHARDER, SHARDERS, plan, table_plan

CPU = torch.device("cpu")


def _trained() -> nn.Module:
    tables = bags()
    apply_optimizer_in_backward(SGD, tables.parameters(), {"lr": 0.1})
    return nn.Sequential(tables)


def sharded() -> DistributedModelParallel:
    """A sharded model of one rank."""
    return DistributedModelParallel(_trained(), device=CPU)


def _saved() -> str:
    save_checkpoint("saved", nn.Linear(2, 2), extra={"epoch": 1})
    return "saved"


def _registry() -> Any:
    return get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16))


def _waits(save: Callable[..., Any]) -> Callable[..., object]:
    return lambda **given: save(**given).wait()


ENV = maybe(made(lambda: ShardingEnv(1, 0)))
FUSED = maybe(mapping(lambda: {"learning_rate": 0.1}))
REGISTRY = maybe(Kind(_registry, lambda value: None if isinstance(value, dict) and all(
    isinstance(key, str) for key in value) and all(
    type(one).__name__ == "QuantizedCommCodecs" for one in value.values()) else False))  # fmt: skip
SHARDER_OF = {"fused_params": FUSED, "qcomm_codecs_registry": REGISTRY}
MODEL = module(lambda: nn.Linear(2, 2))
OPTIMIZER = maybe(made(keyed, KeyedOptimizer))
DATA_PARALLEL = Kind(
    DefaultDataParallelWrapper, lambda value: None if hasattr(value, "wrap") else False
)
STATEFUL = Kind(RandomState, lambda value: None if hasattr(value, "load_state_dict") else False)
PATH = path(lambda: "saved")
PLANNER = maybe(made(lambda: EmbeddingShardingPlanner(Topology(1, "cpu"))))
SAVE = {
    "path": PATH, "model": MODEL, "optimizer": OPTIMIZER,
    "extra": maybe(made(lambda: {"epoch": 1})), "step": maybe(whole(3, 0)),
    "keep": maybe(whole(2)),
    "progress": maybe(mapping(lambda: {"random": RandomState()}, STATEFUL)),
    "consolidated": flag(False),
}  # fmt: skip
STATE = Kind(lambda: sharded().state_dict(), lambda value: None if isinstance(value, dict) and all(
    isinstance(key, str) for key in value) else False)  # fmt: skip
QCOMMS = {
    "forward_precision": member(CommType.FP16), "backward_precision": member(CommType.FP16),
    "forward_loss_scale": maybe(number(2.0)), "backward_loss_scale": maybe(number(2.0)),
    "fp8_quantize_dim": maybe(whole(4)), "fp8_quantize_dim_bwd": maybe(whole(4)),
    "fp8_bwd_uses_143": maybe(flag(False)),
}  # fmt: skip
PLACE = {
    "module": module(lambda: nn.Sequential(bags())), "env": ENV, "device": maybe(DEVICE),
    "plan": maybe(Kind(lambda: None, made(plan).is_legal)), "sharders": maybe(SHARDERS),
    "planner": PLANNER,
}  # fmt: skip

CALLS = [
    Call("ShardingEnv", ShardingEnv, {
        "world_size": whole(1), "rank": whole(0, 0, 0),
        "pg": maybe(Kind(lambda: None, lambda value: False)),
    }),
    Call("ShardingEnv.from_process_group", lambda pg: (
        None if pg is None else ShardingEnv.from_process_group(pg)), {
        "pg": Kind(lambda: None, lambda value: value is None),
    }),
    Call("ShardingEnv.from_local", ShardingEnv.from_local, {
        "world_size": whole(1), "rank": whole(0, 0, 0),
    }),
    Call("get_local_size", get_local_size, {"world_size": maybe(whole(2))}),
    Call("get_local_rank", get_local_rank, {
        "world_size": maybe(whole(2)), "rank": maybe(whole(1, 0)),
    }),
    Call("EmbeddingBagCollectionSharder", EmbeddingBagCollectionSharder, SHARDER_OF),
    Call("FusedEmbeddingBagCollectionSharder", FusedEmbeddingBagCollectionSharder, SHARDER_OF),
    Call("EmbeddingCollectionSharder", EmbeddingCollectionSharder, SHARDER_OF | {
        "use_index_dedup": flag(False),
    }),
    Call("FeatureProcessedEmbeddingBagCollectionSharder",
         FeatureProcessedEmbeddingBagCollectionSharder, {
        "ebc_sharder": maybe(made(EmbeddingBagCollectionSharder)),
    }),
    *(
        Call(f"{name}.{way}", method(make, way), {
            "module": module(of), "params": mapping(
                table_plan, made(lambda: ParameterSharding("table_wise", "fused", [0]))),
            "env": made(lambda: ShardingEnv(1, 0)), "device": maybe(DEVICE),
            "module_fqn": maybe(text("tables")),
        })
        for name, way, make, of in (
            ("EmbeddingBagCollectionSharder", "shard", EmbeddingBagCollectionSharder, bags),
            ("FeatureProcessedEmbeddingBagCollectionSharder", "shard",
             FeatureProcessedEmbeddingBagCollectionSharder, processed),
        )
    ),
    Call("EmbeddingBagCollectionSharder.shardable_parameters", method(
        EmbeddingBagCollectionSharder, "shardable_parameters"), {"module": module(bags)}),
    Call("EmbeddingBagCollectionSharder.sharding_types", method(
        EmbeddingBagCollectionSharder, "sharding_types"), {"compute_device_type": text("cpu")}),
    Call("EmbeddingBagCollectionSharder.compute_kernels", method(
        EmbeddingBagCollectionSharder, "compute_kernels"), {
        "sharding_type": text("row_wise"), "compute_device_type": text("cpu"),
    }),
    Call("sharder_of", sharder_of, {"module": module(bags)}),
    Call("add_default_sharder", lambda make: None if make is row_wise else add_default_sharder(
        make), {"make": function(row_wise)}),
    Call("shard", shard, {
        "module": module(bags), "env": ENV, "device": maybe(DEVICE), "sharder": maybe(SHARDER),
        "plan": either(mapping(table_plan, made(lambda: ParameterSharding(
            "table_wise", "fused", [0]))), function(row_wise())),
    }),
    Call("shard_modules", shard_modules, PLACE | {"init_params": flag(False)}),
    Call("exclude_sharded_from_ddp", exclude_sharded_from_ddp, {
        "module": module(sharded), "params_to_ignore": texts(["0.bias"]),
    }),
    Call("DistributedModelParallel", DistributedModelParallel, PLACE | {
        "init_data_parallel": flag(True), "init_parameters": flag(True),
        "data_parallel_wrapper": maybe(DATA_PARALLEL),
    }),
    Call("DistributedModelParallel.forward", lambda **given: sharded()(**given).values(), {
        "input": KJT,
    }, words={"input": ("features",)}),
    Call("DistributedModelParallel.reshard", method(sharded, "reshard"), {"plan": either(
        made(lambda: plan().__class__({"0": table_plan()})), mapping(lambda: {}, made(
            table_plan, dict)))}),
    Call("DistributedModelParallel.load_state_dict", method(sharded, "load_state_dict"), {
        "state_dict": STATE, "strict": flag(True), "assign": flag(False),
    }),
    Call("DistributedModelParallel.copy", method(sharded, "copy"), {"device": DEVICE}),
    Call("get_unwrapped_module", get_unwrapped_module, {"module": module(sharded)}),
    Call("copy_to_device", copy_to_device, {
        "module": MODEL, "current_device": DEVICE, "to_device": DEVICE,
    }),
    Call("DefaultDataParallelWrapper", DefaultDataParallelWrapper, {
        "bucket_cap_mb": whole(25), "static_graph": flag(True),
        "find_unused_parameters": flag(False), "params_to_ignore": maybe(texts(["bias"])),
        "broadcast_buffers": maybe(flag(False)),
    }),
    Call("FullyShardWrapper", FullyShardWrapper, {
        "modules": maybe(texts(["over"])), "mesh": maybe(Kind(lambda: None, lambda value: False)),
        "options": mapping(dict),
    }),
    Call("NoWait", NoWait, {"obj": anything(lambda: 1)}),
    Call("LazyAwaitable", LazyAwaitable, {"finish": maybe(function(lambda: 1))}),
    Call("QCommsConfig", QCommsConfig, QCOMMS),
    Call("get_qcomm_codecs_registry", get_qcomm_codecs_registry, {
        "qcomms_config": made(lambda: QCommsConfig(forward_precision=CommType.FP16)),
        "comm_ops": maybe(many(
            lambda: [CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL],
            made(lambda: CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL))),
        "device": maybe(DEVICE),
    }),
    # checkpoints
    Call("save_checkpoint", save_checkpoint, SAVE),
    Call("save_checkpoint_async", _waits(save_checkpoint_async), SAVE),
    Call("load_checkpoint", load_checkpoint, {
        "path": path(_saved), "model": MODEL, "optimizer": maybe(Kind(
            lambda: None, OPTIMIZER.is_legal)), "allow_partial": flag(False),
        "keep_settings": flag(False), "progress": maybe(Kind(
            lambda: None, mapping(dict, STATEFUL).is_legal)),
        "resize": Kind(list, lambda value: None if isinstance(
            value, list | tuple | set | dict) and all(isinstance(
                one, str) for one in value) else False),
        "spec": maybe(Kind(lambda: None, lambda value: False)),
        "saved_spec": maybe(Kind(lambda: None, lambda value: False)),
        "new_rows": text("init"),
    }),
    Call("read_checkpoint", read_checkpoint, {
        "path": path(_saved), "tables": maybe(either(
            texts(["weight"]), mapping(dict, made(lambda: slice(0, 1))))),
        "optimizer": flag(False),
    }),
    Call("newest_version", newest_version, {"path": path(_saved)}),
    Call("export_safetensors", export_safetensors, {
        "path": path(_saved), "file": path(lambda: "weights.safetensors"),
    }),
    Call("load_table", load_table, {
        "model": module(lambda: nn.ModuleDict({"t": nn.Embedding(3, 2)})), "table": text("t"),
        "values": Kind(lambda: np.ones((3, 2), np.float32), lambda value: None if isinstance(
            value, np.ndarray) or PATH.is_legal(value) is None else False),
    }),
    Call("RandomState.load_state_dict", method(RandomState, "load_state_dict"), {
        "state_dict": Kind(lambda: RandomState().state_dict(), lambda value: False),
    }),
]  # fmt: skip
