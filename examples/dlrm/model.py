"""The DLRM of the example."""

import argparse

import torch
from data import Data

from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection


def build_model(data: Data, arguments: argparse.Namespace, device: torch.device) -> DLRM:
    """Build the model; its tables on ``meta`` take no memory until they are sharded or loaded."""
    dim = arguments.embedding_dim
    tables = [
        EmbeddingBagConfig(
            name=f"t_{features[0]}",
            embedding_dim=dim,
            num_embeddings=data.num_embeddings[features[0]],
            feature_names=features,
            pooling=PoolingType.MEAN,
            weight_init_min=-0.05,
            weight_init_max=0.05,
        )
        for features in data.tables
    ]
    return DLRM(
        EmbeddingBagCollection(tables=tables, device=device),
        dense_in_features=data.num_dense,
        dense_arch_layer_sizes=[128, dim],
        over_arch_layer_sizes=[128, 64, 1],
    )
