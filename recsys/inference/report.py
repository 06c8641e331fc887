"""Report of the errors of quantized tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from recsys.base.arguments import path_of
from recsys.base.checked import checked_but
from recsys.inference.quant.collection import QuantizedCollection
from recsys.inference.quant.options import rows_left
from recsys.inference.quant.sources import SavedTables
from recsys.kernels.quantize import BLOCK_VALUES
from recsys.kernels.quantized import dequantize_rows, row_bytes
from recsys.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.modules.tables.embedding_tables import TableCollection

__all__ = ["QuantizationReport", "QuantizedTableReport", "quantization_report"]


@final
@dataclass(frozen=True)
class QuantizedTableReport:
    """Size and errors of one quantized table."""

    module: str
    """The path of the table's collection in the model."""
    table: str
    """The name of the table."""
    dtype: str
    """The element type, such as "INT8"."""
    bytes_before: int
    """The bytes of all trained rows."""
    bytes_after: int
    """The bytes of the stored rows that are left after pruning, with padding."""
    largest_error: float
    """The largest absolute difference between a quantized and a trained value."""
    mean_error: float
    """The mean absolute difference."""


@final
@dataclass(frozen=True)
class QuantizationReport:
    """Size and errors of the tables of a quantized model; as text, a table."""

    tables: tuple[QuantizedTableReport, ...]

    def __str__(self) -> str:
        head = ("table", "dtype", "bytes before", "bytes after", "largest error", "mean error")
        lines = [
            (
                f"{t.module}.{t.table}".lstrip("."),
                t.dtype,
                f"{t.bytes_before:,}",
                f"{t.bytes_after:,}",
                f"{t.largest_error:.3g}",
                f"{t.mean_error:.3g}",
            )
            for t in self.tables
        ]
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in (head, *lines)
        )


@checked_but("trained")
def quantization_report(
    trained: nn.Module | str | Path, quantized: nn.Module
) -> QuantizationReport:
    """Compare the tables of a quantized model with the trained tables, block by block.

    Args:
        trained: The unsharded trained model, or a checkpoint of it, as `path` of `read_checkpoint`.
        quantized: The model of `quantize_embeddings` or `quantize_inference_model`, before
            `shard_quant_model`.

    Raises:
        CheckpointError: The checkpoint cannot be read, or lacks a table.
        ValueError: `quantized` has no quantized tables or is sharded, or `trained` has no such
            collection.

    Example:
        >>> from recsys.inference import quantize_embeddings
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [EmbeddingBagConfig(100, 64, "films", feature_names=["film"])]
        >>> model = nn.Sequential(EmbeddingBagCollection(tables=tables))
        >>> report = quantization_report(model, quantize_embeddings(model))
        >>> report.tables[0].bytes_before, report.tables[0].bytes_after
        (25600, 8000)
    """
    entries = []
    saved = None
    if not isinstance(trained, nn.Module):
        saved = SavedTables(path_of("quantization_report.trained", trained))
    for path, collection in quantized.named_modules():
        if not isinstance(collection, QuantizedCollection):
            continue
        if collection.is_placed:
            raise ValueError(
                f"quantization_report.quantized must not be sharded; received the sharded "
                f"collection {path!r}. Report before shard_quant_model."
            )
        stored = [rows for [rows] in collection.lookups().stored_rows()]
        for config, rows in zip(collection.configs(), stored, strict=True):
            if saved is not None:
                name = saved.find(config.name, path)
                blocks = saved.blocks(name, rows_left(config))
            else:
                assert isinstance(trained, nn.Module)
                blocks = _blocks_of(trained, path, config)
            entries.append(_report(path, config, rows, blocks))
    if not entries:
        raise ValueError(
            "quantization_report.quantized must have quantized tables; received none. Call "
            "quantize_embeddings first."
        )
    return QuantizationReport(tuple(entries))


def _blocks_of(
    trained: nn.Module, path: str, config: BaseEmbeddingConfig
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first row of each block of a trained table, and the rows."""
    module = dict(trained.named_modules()).get(path)
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        module = module.split()[1]
    if not isinstance(module, TableCollection):
        raise ValueError(
            f"quantization_report.trained must have an unsharded collection {path!r}; received "
            f"{type(module).__name__}. Pass the model before it is quantized in place, or its "
            "checkpoint."
        )
    weight = module.table_weights()[config.name].detach()
    step = max(BLOCK_VALUES // config.embedding_dim, 1)
    for start in range(0, rows_left(config), step):
        yield start, weight[start : min(start + step, rows_left(config))]


def _report(
    path: str, config: BaseEmbeddingConfig, stored: Tensor, blocks: Iterator[tuple[int, Tensor]]
) -> QuantizedTableReport:
    bits = DATA_TYPE_NUM_BITS[config.data_type]
    size, step = row_bytes(config.embedding_dim, bits), max(BLOCK_VALUES // config.embedding_dim, 1)
    largest = total = 0.0
    bytes_per_value = 4
    for first, block in blocks:
        bytes_per_value = block.element_size()
        for start, part in zip(
            range(first, first + len(block), step), block.split(step), strict=True
        ):
            rows = stored[start : start + len(part), :size]
            errors = (dequantize_rows(rows, bits) - part.to(rows.device).float()).abs()
            largest = max(largest, float(errors.max()))
            total += float(errors.sum(dtype=torch.float64))
    num_values = stored.shape[0] * config.embedding_dim
    return QuantizedTableReport(
        path,
        config.name,
        config.data_type.name,
        config.num_embeddings * config.embedding_dim * bytes_per_value,
        stored.numel(),
        largest,
        total / num_values if num_values else 0.0,
    )
