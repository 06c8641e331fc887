"""A small serving package."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from recsys.inference import package, quantize_embeddings
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor

ROWS = {"film": 1000, "tag": 50}
DENSE = 3

Request = dict[str, Tensor]


def small_model(seed: int) -> nn.Module:
    """A quantized DLRM of two tables."""
    torch.manual_seed(seed)
    tables = [
        EmbeddingBagConfig(
            name=f"{name}s", embedding_dim=8, num_embeddings=rows, feature_names=[name]
        )
        for name, rows in ROWS.items()
    ]
    model = DLRM(EmbeddingBagCollection(tables=tables), DENSE, [8, 8], [8, 1])
    return quantize_embeddings(model.eval(), torch.int8)


def random_request(num_rows: int, seed: int) -> Request:
    """Ids, lengths and dense features of some rows."""
    random = torch.Generator().manual_seed(seed)
    request = {"dense_features": torch.randn(num_rows, DENSE, generator=random)}
    for name, rows in ROWS.items():
        lengths = torch.randint(0, 4, (num_rows,), generator=random)
        request[name] = torch.randint(0, rows, (int(lengths.sum()),), generator=random)
        request[f"{name}.lengths"] = lengths
    return request


@torch.no_grad()
def score(model: nn.Module, request: Request) -> Tensor:
    """Scores of the Python model, [rows, 1]."""
    dense, features = arguments_of(request)
    scores: Tensor = model(dense, features)
    return scores


def arguments_of(request: Request) -> tuple[Tensor, KeyedJaggedTensor]:
    values = torch.cat([request[name] for name in ROWS])
    lengths = torch.cat([request[f"{name}.lengths"] for name in ROWS])
    return request["dense_features"], KeyedJaggedTensor(list(ROWS), values, lengths=lengths)


def write_version(folder: Path, version: int, seed: int, program: str = "torchscript") -> nn.Module:
    """Write a version of a package, of at most 64 rows, and return its model."""
    model = small_model(seed)
    inputs = arguments_of(random_request(3, seed=0))
    package(model, folder, inputs, version=version, programs=[program], max_rows=64)
    return model
