"""Quantize, export and score the trained model of the example."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from data import Data
from model import build_model
from torch import nn

from recsys.datasets.utils import Batch
from recsys.distributed.checkpoint import load_checkpoint
from recsys.inference import export_torchscript, quantize_embeddings
from recsys.modules.dlrm import DLRMTrain
from recsys.training import BinaryMetrics

CPU = torch.device("cpu")


@torch.no_grad()
def score(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """Evaluate an unsharded model."""
    metrics = BinaryMetrics(CPU)
    model.eval()
    for batch in batches:
        metrics.update(model(batch)[1], batch)
    return metrics.compute()


def export(arguments: argparse.Namespace, data: Data) -> dict[str, dict[str, float]]:
    """Load the checkpoint into the unsharded model, quantize and export it, and score the file."""
    model = DLRMTrain(build_model(data.spec, arguments.embedding_dim, CPU))
    load_checkpoint(arguments.out / "best", model)
    dtype = torch.int8 if arguments.bits == 8 else torch.quint4x2
    quantized = quantize_embeddings(model.model, dtype)
    path = arguments.out / "model.pt"
    batches = list(data.whole_test)
    export_torchscript(quantized, path, (batches[0].dense_features, batches[0].sparse_features))

    inputs = [
        (b.dense_features, b.sparse_features.values(), b.sparse_features.lengths()) for b in batches
    ]
    test = {"inputs": inputs, "labels": [b.labels for b in batches]}
    torch.save(test, arguments.out / "test.pt")
    # a fresh process, in which nothing of this library can be imported by accident
    script = Path(__file__).with_name("score.py")
    files = [str(arguments.out / name) for name in ("model.pt", "test.pt", "scores.pt")]
    result = subprocess.run(
        [sys.executable, str(script), *files],
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        raise RuntimeError(f"{script} failed on {path}:\n{result.stderr}")
    rows = {"unsharded, from the checkpoint": score(model, data.whole_test)}
    rows[f"int{arguments.bits} TorchScript, fresh process"] = json.loads(result.stdout)
    return rows


def print_table(rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{'test set':34} {'AUC':>7} {'NE':>7} {'log loss':>8}")
    for name, scores in rows.items():
        print(f"{name:34} {scores['auc']:7.4f} {scores['ne']:7.4f} {scores['loss']:8.4f}")
