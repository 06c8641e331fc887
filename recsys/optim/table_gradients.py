"""Gradients of embedding tables, as clipping and scaling see them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class TableGradients(Protocol):
    """Gradients of embedding tables outside of `.grad`: see `UpdateMode.DEFERRED`."""

    @property
    def device(self) -> torch.device:
        """Device of the gradients."""

    @property
    def process_group(self) -> torch.distributed.ProcessGroup | None:
        """Ranks with the other shards; None for one rank."""

    def power_sum(self, norm_type: float) -> Tensor:
        """Return the sum of `|g| ** norm_type` on this rank, or the maximum of `|g|` for inf."""

    def scale_(self, factor: Tensor) -> None:
        """Multiply the gradients by a scalar, in place."""

    def clamp_(self, limit: float) -> None:
        """Clamp the gradients to `[-limit, limit]`, in place."""

    def zero_grad(self) -> None:
        """Drop the gradients."""
