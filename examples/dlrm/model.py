"""The DLRM of the example."""

from dataclasses import replace

import torch

from recsys.features import FeatureSpec
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_modules import EmbeddingBagCollection


def build_model(spec: FeatureSpec, dim: int, device: torch.device) -> DLRM:
    """Build the model; its tables on ``meta`` take no memory until they are sharded or loaded."""
    tables = [
        replace(table, weight_init_min=-0.05, weight_init_max=0.05) for table in spec.tables(dim)
    ]
    return DLRM(
        EmbeddingBagCollection(tables=tables, device=device),
        dense_in_features=len(spec.dense_names),
        dense_arch_layer_sizes=[128, dim],
        over_arch_layer_sizes=[128, 64, 1],
    )
