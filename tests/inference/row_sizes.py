"""Sizes of quantized tables."""

from __future__ import annotations

from typing import Any


def table_bytes(quantized: Any) -> list[int]:
    """Return the bytes of each table of a quantized collection, without padding."""
    weights = quantized.quantized_weights().values()
    return [sum(part.numel() for part in parts if part is not None) for parts in weights]
