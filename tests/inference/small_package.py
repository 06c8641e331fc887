"""A small serving package, written field by field: its TorchScript program holds all tables."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from pathlib import Path
from typing import Any

import fbgemm_gpu
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recsys.inference import export_torchscript, quantize_embeddings
from recsys.inference.packages.server_configs import config_pbtxt
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


def write_version(package: Path, version: int, seed: int, max_rows: int = 64) -> nn.Module:
    """Write a version; it appears at once, when it is complete. Return its model."""
    model = small_model(seed)
    folder = package.parent.parent / f"{package.name}-{version}.part"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sample = random_request(3, seed=0)
    export_torchscript(model, folder / "program.pt", arguments_of(sample))
    (folder / "program.pt.sha256").unlink()
    tensors = {f"request.{name}": tensor for name, tensor in sample.items()}
    save_file({**tensors, "response.output": score(model, sample)}, folder / "sample.safetensors")
    manifest = manifest_of(folder, max_rows)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    package.mkdir(parents=True, exist_ok=True)
    (package / "config.pbtxt").write_text(config_pbtxt(manifest, package.name))
    folder.rename(package / str(version))
    return model


def manifest_of(folder: Path, max_rows: int) -> dict[str, Any]:
    features = [{"name": name, "tensor": name, "rows": rows} for name, rows in ROWS.items()]
    return {
        "format": 1,
        "recsys": "0.1.0",
        "torch": torch.__version__.partition("+")[0],
        "fbgemm": fbgemm_gpu.__version__.partition("+")[0],
        "machine": platform.machine(),
        "instruction_set": "",
        "programs": [
            {"kind": "torchscript", "file": "program.pt", "device": "cpu", "constants": []}
        ],
        "inputs": [
            {
                "name": "dense_features", "kind": "dense", "dtype": "float32",
                "shape": [-1, DENSE], "default": None,
            },
            {
                "name": "sparse_features", "kind": "jagged", "dtype": "int64",
                "lengths_dtype": "int64", "weighted": False, "features": features,
            },
        ],
        "outputs": [{"name": "output", "kind": "rows", "dtype": "float32", "shape": [-1, 1]}],
        "tables": [],
        "buffers": [],
        "files": {
            path.name: {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in folder.iterdir()
        },
        "limits": {"max_rows": max_rows},
        "columns": [],
    }  # fmt: skip
