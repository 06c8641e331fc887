"""Calls of `recsys.modules`: configs, collections, feature processors, models and their parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from recsys.kernels.types import BoundsCheckMode, EmbeddingLocation
from recsys.modules import deepfm_model, dlrm, dlrm_variants, losses
from recsys.modules.activation import SwishLayerNorm
from recsys.modules.crossnet import (
    CrossNet,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    VectorCrossNet,
)
from recsys.modules.deepfm import DeepFM, FactorizationMachine
from recsys.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    QuantConfig,
    data_type_to_dtype,
    dtype_to_data_type,
)
from recsys.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from recsys.modules.feature_processor import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessorDictWrapper,
)
from recsys.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from recsys.modules.item_index import ItemIndex
from recsys.modules.mlp import MLP, Perceptron
from recsys.sparse import JaggedTensor
from tests.fuzz.argument_kinds import (
    DEVICE,
    DTYPE,
    JT,
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
    subclass,
    tensor,
    text,
    texts,
    whole,
    wholes,
)
from tests.fuzz.calls.call import Call, method


def bag_config() -> EmbeddingBagConfig:
    """The config of a pooled table."""
    return EmbeddingBagConfig(10, 4, "t", feature_names=["a", "b"])


def config() -> EmbeddingConfig:
    """The config of a table that is not pooled."""
    return EmbeddingConfig(10, 4, "t", feature_names=["a", "b"])


def bags() -> EmbeddingBagCollection:
    """A pooled collection."""
    return EmbeddingBagCollection(tables=[bag_config()])


def sequences() -> EmbeddingCollection:
    """A collection without pooling."""
    return EmbeddingCollection(tables=[config()])


def dlrm_model() -> dlrm.DLRM:
    """A DLRM."""
    return dlrm.DLRM(bags(), 2, [4], [4, 1])


def processed() -> FeatureProcessedEmbeddingBagCollection:
    """A collection whose weights are positions'."""
    tables = EmbeddingBagCollection(tables=[bag_config()], is_weighted=True)
    processors = PositionWeightedModuleCollection({"a": 5, "b": 5})
    return FeatureProcessedEmbeddingBagCollection(tables, processors)


def forward(make: Callable[[], nn.Module], **arguments: Kind) -> Call:
    """A forward pass of a module."""
    return Call(f"{type(make()).__name__}.forward", lambda **given: make()(**given), arguments)


BAGS = module(bags, EmbeddingBagCollection)
SIZE, SIZES = whole(4), wholes([4, 2], 1)
CONFIG = {
    "num_embeddings": whole(10),
    "embedding_dim": whole(4),
    "name": text("t"),
    "data_type": member(DataType.FP32),
    "feature_names": texts(["a"]),
    "weight_init_max": maybe(number(0.5)),
    "weight_init_min": maybe(number(-0.5)),
    "num_embeddings_post_pruning": maybe(whole(5, 0)),
    "init_fn": maybe(function(lambda weight: weight)),
    "need_pos": flag(False),
    "input_dim": maybe(whole(10)),
    "total_num_buckets": maybe(whole(2)),
    "use_virtual_table": flag(False),
    "virtual_table_eviction_policy": anything(lambda: None),
    "enable_embedding_update": flag(False),
}
WHERE = {
    "device": maybe(DEVICE), "bounds_check_mode": member(BoundsCheckMode.FATAL),
}  # fmt: skip
BAG_TABLES = many(lambda: [bag_config()], made(bag_config), 1)
TABLES = many(lambda: [config()], made(config), 1)
FUSED = {
    "optimizer_type": subclass(torch.optim.SGD, torch.optim.Optimizer),
    "optimizer_kwargs": mapping(lambda: {"lr": 0.1}),
    "location": maybe(member(EmbeddingLocation.HOST)),
}
NET = {"in_features": SIZE, "num_layers": whole(2)}
INPUT = {"input": tensor(lambda: torch.ones(2, 4))}
ACTIVATION = either(function(torch.relu), module(lambda: nn.ReLU()))
LAYERS = {
    "bias": flag(True), "device": maybe(DEVICE),
    "dtype": DTYPE, "batch_norm": flag(False), "dropout": number(0.0, 0, 1),
}  # fmt: skip
DENSE = {
    "in_features": whole(4, 0), "layer_sizes": SIZES, "device": maybe(DEVICE),
    "batch_norm": flag(False), "dropout": number(0.0, 0, 1),
}  # fmt: skip
DLRM = {
    "embedding_bag_collection": maybe(BAGS),
    "dense_in_features": whole(4, 0),
    "dense_arch_layer_sizes": wholes([4], 1, 1),
    "over_arch_layer_sizes": wholes([4, 1], 1, 1),
    "dense_device": maybe(DEVICE),
    "batch_norm": flag(False),
    "dropout": number(0.0, 0, 1),
}
PARTS = {
    "dense_features": tensor(lambda: torch.ones(2, 4)),
    "sparse_features": tensor(lambda: torch.ones(2, 2, 4)),
}
BATCH = {"dense_features": tensor(lambda: torch.ones(2, 2)), "sparse_features": KJT}
LENGTHS = mapping(lambda: {"a": 5, "b": 5}, whole(5))
EMBEDDINGS = {"embeddings": many(lambda: [torch.ones(2, 4), torch.ones(2, 4)], INPUT["input"], 1)}
MODELS = module(lambda: nn.Linear(4, 2))


def item_index() -> ItemIndex:
    """An index of two items."""
    return ItemIndex(torch.eye(2))


CALLS = [
    Call("ItemIndex.rank", method(item_index, "rank"), {
        "queries": tensor(lambda: torch.ones(1, 2)),
        "targets": tensor(lambda: torch.tensor([1])),
        "offsets": tensor(lambda: torch.tensor([0, 1])),
        "seen": maybe(made(lambda: JaggedTensor(torch.tensor([0]), lengths=torch.tensor([1])),
                           JaggedTensor)),
    }),
    Call("ItemIndex.without", method(item_index, "without"), {
        "ids": tensor(lambda: torch.tensor([1])),
    }),
    *(Call(kind.__name__, kind, CONFIG) for kind in (EmbeddingConfig,)),
    Call("EmbeddingBagConfig", EmbeddingBagConfig, CONFIG | {"pooling": member(PoolingType.SUM)}),
    Call("EmbeddingBagCollection", EmbeddingBagCollection, {
        "tables": BAG_TABLES, "is_weighted": flag(False), **WHERE,
    }),
    Call("EmbeddingCollection", EmbeddingCollection, {
        "tables": TABLES, "need_indices": flag(False), **WHERE,
    }),
    forward(bags, features=KJT),
    forward(sequences, features=KJT),
    Call("FusedEmbeddingBagCollection", FusedEmbeddingBagCollection, {
        "tables": BAG_TABLES, "is_weighted": flag(False), **WHERE, **FUSED,
    }),
    Call("FusedEmbeddingCollection", FusedEmbeddingCollection, {
        "tables": TABLES, "need_indices": flag(False), **WHERE, **FUSED,
    }),
    Call("get_embedding_names_by_table", get_embedding_names_by_table, {
        "tables": many(TABLES.right, made(lambda: TABLES.right()[0]))}),
    Call("data_type_to_dtype", data_type_to_dtype, {"data_type": made(lambda: DataType.FP16)}),
    Call("dtype_to_data_type", dtype_to_data_type, {"dtype": DTYPE}),
    Call("QuantConfig", QuantConfig, {
        "activation": function(lambda: None), "weight": function(lambda: None),
        "per_table_weight_dtype": maybe(mapping(lambda: {"t": torch.int8}, DTYPE)),
    }),
    Call("PositionWeightedModule", PositionWeightedModule, {
        "max_feature_length": whole(5), "device": maybe(DEVICE),
    }),
    forward(lambda: PositionWeightedModule(5), features=JT),
    Call("PositionWeightedModuleCollection", PositionWeightedModuleCollection, {
        "max_feature_lengths": LENGTHS, "device": maybe(DEVICE),
    }),
    forward(lambda: PositionWeightedModuleCollection({"a": 5, "b": 5}), features=KJT),
    Call("FeatureProcessedEmbeddingBagCollection", FeatureProcessedEmbeddingBagCollection, {
        "embedding_bag_collection": module(
            lambda: EmbeddingBagCollection(tables=[bag_config()], is_weighted=True),
            EmbeddingBagCollection),
        "feature_processors": either(
            module(lambda: PositionWeightedModuleCollection({"a": 5, "b": 5})),
            mapping(dict, module(lambda: PositionWeightedModule(5)))),
    }),
    forward(processed, features=KJT),
    Call("FeatureProcessorDictWrapper", FeatureProcessorDictWrapper, {
        "feature_processors": mapping(
            lambda: {"a": PositionWeightedModule(5), "b": PositionWeightedModule(5)},
            module(lambda: PositionWeightedModule(5))),
    }),
    Call("SwishLayerNorm", SwishLayerNorm, {
        "input_dims": either(SIZE, SIZES), "device": maybe(DEVICE),
    }),
    forward(lambda: SwishLayerNorm(4), **INPUT),
    Call("Perceptron", Perceptron, {
        "in_size": whole(4, 0), "out_size": SIZE, "activation": ACTIVATION, **LAYERS,
    }),
    Call("MLP", MLP, {
        "in_size": whole(4, 0), "layer_sizes": SIZES, "activation_on_last": flag(True),
        "activation": either(ACTIVATION, text("relu")), **LAYERS,
    }),
    forward(lambda: MLP(4, [2]), **INPUT),
    Call("CrossNet", CrossNet, NET),
    Call("VectorCrossNet", VectorCrossNet, NET),
    Call("LowRankCrossNet", LowRankCrossNet, NET | {"low_rank": whole(1)}),
    Call("LowRankMixtureCrossNet", LowRankMixtureCrossNet, NET | {
        "num_experts": whole(2), "low_rank": whole(1), "activation": ACTIVATION,
    }),
    forward(lambda: CrossNet(4, 1), **INPUT),
    forward(lambda: VectorCrossNet(4, 1), **INPUT),
    forward(lambda: LowRankCrossNet(4, 1), **INPUT),
    forward(lambda: LowRankMixtureCrossNet(4, 1), **INPUT),
    Call("DeepFM", DeepFM, {"dense_module": MODELS}),
    forward(lambda: DeepFM(nn.Linear(8, 2)), **EMBEDDINGS),
    forward(FactorizationMachine, **EMBEDDINGS),
    Call("deepfm_model.DenseArch", deepfm_model.DenseArch, {
        "in_features": whole(4, 0), "hidden_layer_size": SIZE, "embedding_dim": SIZE,
    }),
    Call("deepfm_model.FMInteractionArch", deepfm_model.FMInteractionArch, {
        "fm_in_features": whole(12), "sparse_feature_names": texts(["a", "b"]),
        "deep_fm_dimension": SIZE,
    }),
    Call("deepfm_model.OverArch", deepfm_model.OverArch, {"in_features": SIZE}),
    Call("deepfm_model.SparseArch", deepfm_model.SparseArch, {"embedding_bag_collection": BAGS}),
    Call("SimpleDeepFMNN", deepfm_model.SimpleDeepFMNN, {
        "num_dense_features": whole(2, 0), "embedding_bag_collection": BAGS,
        "hidden_layer_size": SIZE, "deep_fm_dimension": SIZE,
    }),
    forward(lambda: deepfm_model.SimpleDeepFMNN(2, bags(), 4, 4), **BATCH),
    Call("DLRM", dlrm.DLRM, DLRM),
    Call("DLRM.compile_dense_path", method(dlrm_model, "compile_dense_path"), {
        "compile_mode": text("default"),
    }),
    forward(dlrm_model, **BATCH),
    Call("DLRMTrain", dlrm.DLRMTrain, {"dlrm_module": module(dlrm_model)}),
    Call("dlrm.DenseArch", dlrm.DenseArch, DENSE),
    Call("dlrm.InteractionArch", dlrm.InteractionArch, {
        "num_sparse_features": whole(2, 0), "device": maybe(DEVICE),
    }),
    forward(lambda: dlrm.InteractionArch(2), **PARTS),
    Call("dlrm.OverArch", dlrm.OverArch, DENSE),
    Call("dlrm.SparseArch", dlrm.SparseArch, {"embedding_bag_collection": BAGS}),
    Call("mean_loss", losses.mean_loss, {
        "logits": tensor(lambda: torch.ones(2)), "labels": tensor(lambda: torch.ones(2)),
        "weights": maybe(tensor(lambda: torch.ones(2))),
        "mask": maybe(tensor(lambda: torch.ones(2, dtype=torch.bool))),
    }, words={"weights": ("sample_weights",), "mask": ("label_mask",)}),
    Call("DLRM_DCN", dlrm_variants.DLRM_DCN, DLRM | {
        "dcn_num_layers": whole(1), "dcn_low_rank_dim": whole(2),
    }, words={"dcn_num_layers": ("num_layers",), "dcn_low_rank_dim": ("low_rank",)}),
    Call("InteractionDCNArch", dlrm_variants.InteractionDCNArch, {
        "num_sparse_features": whole(2, 0), "crossnet": module(lambda: CrossNet(12, 1)),
    }),
]  # fmt: skip
