"""Calls of `recsys.compat`, which `tests.fuzz.calls.public` adds to the calls of the core."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recsys.compat.distributed import get_sharding_constructor_from_type
from recsys.compat.dlrm_variants import DLRM_Projection, InteractionProjectionArch
from recsys.compat.fused_params import add_params_from_parameter_sharding, merge_fused_params
from recsys.compat.inference import (
    BatchingMetadata,
    PredictModule,
    QualNameMetadata,
    quantize_dense,
    trim_torch_package_prefix_from_typename,
)
from recsys.compat.modules import (
    PositionWeightedProcessor,
    fuse_embedding_optimizer,
    pooling_type_to_pooling_mode,
    pooling_type_to_str,
)
from recsys.compat.nn_embeddingbag import EmbeddingBagSharder
from recsys.compat.optim import optimizer_type_to_emb_opt_type
from recsys.compat.planner import constants
from recsys.compat.sparse import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    KTRegroupAsDict,
    pad_vbe_kjt_lengths,
    permute_multi_embedding,
    regroup_kts,
)
from recsys.compat.state_dict_transform import state_dict_gather, state_dict_to_device
from recsys.compat.towers import EmbeddingTower, EmbeddingTowerCollection, tower_input_params
from recsys.distributed.types import ParameterSharding, ShardingType
from recsys.modules.embedding_configs import DataType, PoolingType
from tests.fuzz.argument_kinds import (
    DEVICE,
    JT,
    KJT,
    KT,
    Kind,
    anything,
    flag,
    made,
    many,
    mapping,
    maybe,
    member,
    module,
    number,
    tensor,
    text,
    texts,
    whole,
    wholes,
)
from tests.fuzz.calls import distributed, inference, modules, optim, sparse
from tests.fuzz.calls.call import Call
from tests.fuzz.calls.modules import bags


class _Interaction(nn.Module):
    def forward(self, pooled: Any) -> torch.Tensor:
        values: torch.Tensor = pooled.values()
        return values


def _tower() -> EmbeddingTower:
    return EmbeddingTower(bags(), _Interaction())


class _Predict(PredictModule):
    def predict_forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.predict_module(batch)


STATE = mapping(lambda: {"a": torch.ones(2)}, tensor(lambda: torch.ones(2)))

CALLS = [
    Call("regroup_kts", regroup_kts, sparse.REGROUP),
    Call("permute_multi_embedding", permute_multi_embedding, sparse.REGROUP),
    Call("pad_vbe_kjt_lengths", pad_vbe_kjt_lengths, {"features": KJT}),
    Call("ComputeJTDictToKJT", lambda **given: ComputeJTDictToKJT()(**given), {
        "jt_dict": mapping(lambda: {"a": JT.right()}, JT),
    }),
    Call("ComputeKJTToJTDict", lambda **given: ComputeKJTToJTDict()(**given), {
        "keyed_jagged_tensor": KJT,
    }),
    Call("optimizer_type_to_emb_opt_type", optimizer_type_to_emb_opt_type, {
        "optimizer_class": optim.TYPE,
    }),
    Call("quantize_dense", quantize_dense, {
        "predict_module": module(lambda: _Predict(nn.Linear(2, 2)), PredictModule),
        "dtype": inference.dtype_of(torch.float16),
        "additional_embedding_module_type": inference.TYPES,
    }),
    Call("PredictModule", lambda **given: _Predict(**given), {
        "module": inference.MODEL, "device": maybe(text("cpu")),
    }),
    Call("BatchingMetadata", BatchingMetadata, {
        "type": text("dense"), "device": text("cpu"), "pinned": texts(["a"]),
    }),
    Call("QualNameMetadata", QualNameMetadata, {"need_preproc": flag(True)}),
    Call("trim_torch_package_prefix_from_typename", trim_torch_package_prefix_from_typename, {
        "typename": text("a.b"),
    }),
    Call("state_dict_gather", state_dict_gather, {"src": STATE, "dst": STATE}),
    Call("state_dict_to_device", state_dict_to_device, {
        "state_dict": STATE, "pg": maybe(Kind(lambda: None, lambda value: False)),
        "device": DEVICE,
    }),
    Call("fuse_embedding_optimizer", fuse_embedding_optimizer, {
        "model": module(lambda: nn.Sequential(bags())), "device": DEVICE, **modules.FUSED,
    }),
    Call("pooling_type_to_str", pooling_type_to_str, {"pooling_type": member(PoolingType.SUM)}),
    Call("pooling_type_to_pooling_mode", pooling_type_to_pooling_mode, {
        "pooling_type": member(PoolingType.SUM),
        "sharding_type": anything(lambda: ShardingType.ROW_WISE),
    }),
    Call("EmbeddingTower", EmbeddingTower, {
        "embedding_module": module(bags), "interaction_module": module(_Interaction),
        "device": maybe(DEVICE),
    }),
    Call("EmbeddingTowerCollection", EmbeddingTowerCollection, {
        "towers": many(lambda: [_tower()], module(_tower, EmbeddingTower), 1),
        "device": maybe(DEVICE),
    }),
    modules.forward(lambda: EmbeddingTowerCollection([_tower()]), features=KJT,
             weighted_features=anything(lambda: None)),  # no tower reads them
    Call("tower_input_params", tower_input_params, {"module": module(_tower)}),
    Call("PositionWeightedProcessor", PositionWeightedProcessor, {
        "max_feature_lengths": modules.LENGTHS, "device": maybe(DEVICE),
    }),
    modules.forward(lambda: PositionWeightedProcessor({"a": 5, "b": 5}), features=KJT),
    Call("KTRegroupAsDict", KTRegroupAsDict, {
        "groups": many(lambda: [["b"], ["a", "b"]], texts([])), "keys": texts(["x", "y"]),
        "emb_dtype": maybe(member(DataType.FP32)),
    }),
    modules.forward(lambda: KTRegroupAsDict([["b"], ["a"]], ["x", "y"]),
             keyed_tensors=many(lambda: [KT.right()], KT)),
    Call("DLRM_Projection", DLRM_Projection, modules.DLRM | {
        "interaction_branch1_layer_sizes": wholes([4, 8], 1, 1),
        "interaction_branch2_layer_sizes": wholes([4, 8], 1, 1),
    }),
    Call("InteractionProjectionArch", InteractionProjectionArch, {
        "num_sparse_features": whole(2, 0), "interaction_branch1": module(lambda: nn.Linear(12, 8)),
        "interaction_branch2": module(lambda: nn.Linear(12, 8)),
    }),
    Call("EmbeddingBagSharder", EmbeddingBagSharder, distributed.SHARDER_OF | {
        "is_weighted": flag(True),
    }),
    *(
        Call(name, getattr(constants, name), {argument: number(5.0)})
        for name, argument in (
            ("bytes_to_gb", "num_bytes"), ("bytes_to_mb", "num_bytes"), ("gb_to_bytes", "gb"),
            ("mb_to_bytes", "mb"),
        )
    ),
    Call("sharder_name", constants.sharder_name, {"sharder": Kind(
        lambda: int, lambda value: None if isinstance(value, type) else False)}),
    Call("merge_fused_params", merge_fused_params, {
        "fused_params": maybe(mapping(lambda: {"learning_rate": 0.1})),
        "param_fused_params": maybe(mapping(lambda: {"eps": 0.1})),
    }),
    Call("add_params_from_parameter_sharding", add_params_from_parameter_sharding, {
        "fused_params": maybe(mapping(lambda: {"learning_rate": 0.1})),
        "parameter_sharding": made(lambda: ParameterSharding("table_wise", "fused", [0])),
    }),
    Call("get_sharding_constructor_from_type", get_sharding_constructor_from_type, {
        "sharding_type": member(ShardingType.ROW_WISE),
    }),
]  # fmt: skip
