"""Reports of quantized tables, compared with float64 numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from recsys.distributed.checkpoint import save_checkpoint
from recsys.inference import quantization_report, quantize_embeddings, shard_quant_model
from recsys.inference.quant_prep import set_pruning_data
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from tests.inference.quant.test_saved import Model


def test_errors_equal_numpy(tmp_path: Path) -> None:
    model = set_pruning_data(Model("cpu", 300_000), {"b": 200})
    dtypes = {"a": torch.quint4x2, "c": torch.float16}
    quantized = quantize_embeddings(model, per_table_weight_dtype=dtypes)
    report = quantization_report(model, quantized)
    assert [(t.module, t.table, t.dtype, t.bytes_before, t.bytes_after) for t in report.tables] == [
        ("bags", "a", "INT4", 300_000 * 32, 300_000 * 16),
        ("bags", "b", "INT8", 300 * 32, 200 * 16),
        ("rows", "a", "INT4", 70 * 32, 70 * 16),
        ("weighted._embedding_bag_collection", "c", "FP16", 50 * 32, 50 * 16),
    ]
    rows = model.bags.embedding_bags["a"].weight.detach().double().numpy()
    stored = quantized.bags.embedding_bags["a"].weight.numpy()
    header = stored[:, :4].copy().view(np.float16).astype(np.float64)
    values = np.stack([stored[:, 4:8] & 15, stored[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    errors = np.abs(values * header[:, :1] + header[:, 1:] - rows)
    assert report.tables[0].largest_error == pytest.approx(errors.max(), rel=1e-5)
    assert report.tables[0].mean_error == pytest.approx(errors.mean(), rel=1e-5)
    half = model.weighted.split()[1].embedding_bags["c"].weight.detach().numpy()
    errors = np.abs(half.astype(np.float16).astype(np.float64) - half.astype(np.float64))
    assert report.tables[3].largest_error == pytest.approx(errors.max(), rel=1e-5)
    lines = str(report).splitlines()
    words = "table dtype bytes before bytes after largest error mean error"
    assert " ".join(lines[0].split()) == words
    assert lines[1].startswith("bags.a")
    assert " 9,600,000 " in lines[1]
    assert len({len(line) for line in lines}) == 1
    save_checkpoint(tmp_path, model)
    assert quantization_report(tmp_path, quantized) == report


def test_other_models_are_refused() -> None:
    tables = [EmbeddingBagConfig(9, 4, "t", feature_names=["f"])]
    model = nn.Sequential(EmbeddingBagCollection(tables=tables))
    quantized = quantize_embeddings(model)
    with pytest.raises(ValueError, match=r"quantized must have .*tables; received none"):
        quantization_report(model, model)
    with pytest.raises(ValueError, match=r"unsharded collection '0'; received QuantEmbeddingBag"):
        quantization_report(quantized, quantized)
    with pytest.raises(ValueError, match=r"must not be sharded; .*collection '0"):
        quantization_report(model, shard_quant_model(quantized, 1, "cpu")[0])
