"""Types of an exchange of embeddings: its stage, and the rows of one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.ranks.wire import WireFormat
from recsys.kernels.scaled_loss import TableUpdates

if TYPE_CHECKING:
    from recsys.distributed.stages.column_gather import ColumnGather

Codecs: TypeAlias = tuple[WireFormat, WireFormat]
"""Wire formats of embeddings and of gradients."""
Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Ranges of columns, half open."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Backward:
    """Callbacks and facts for the backward pass of an output stage.

    Attributes:
        begins: Called in every backward pass, on every rank in the same order.
        updates: Tables that take gradients on any rank.
    """

    begins: Callable[[], None]
    updates: TableUpdates


NO_UPDATES = Backward(begins=lambda: None, updates=TableUpdates())
"""Backward pass of an exchange whose gradients go through another exchange first."""


class ExchangeStage(Protocol):
    """Properties of a stage that its exchanges use.

    Attributes:
        device: Device of the embeddings.
        codecs: Wire formats of embeddings and of gradients.
        tasks: Names of the exchanges of embeddings and of gradients.
        has_exchange: Whether any rank sends anything.
        backward: Callbacks for backward passes.
        grad_scale: Factor for the gradients of the lookups.
    """

    device: torch.device
    codecs: Codecs
    tasks: tuple[ExchangeName, ExchangeName]
    has_exchange: bool
    backward: Backward
    grad_scale: float


@final
class SentBlocks(NamedTuple):
    """Elements that a rank sends: rows of all samples, in one block or several.

    Attributes:
        group_widths: Columns of each lookup in the first block.
        widths_R: `[R]` elements per sample for each rank.
        blocks: Per block the ranks whose samples it has, and its columns.
        order: int32, the parts of the blocks (one per rank) in the order of sending; empty for the
            order in which they are.
    """

    group_widths: list[int]
    widths_R: np.ndarray
    blocks: list[tuple[np.ndarray, int]]
    order: np.ndarray


class PooledStage(ExchangeStage, Protocol):
    """A stage that exchanges columns of samples and adds up partial sums.

    Attributes:
        sent: Elements that this rank sends.
        widths: `[R]` elements per sample from each rank.
        gather: Computes the output from the received buffer.
        read_codecs: The codecs that the gathers apply themselves.
        adds_up: Whether a reduce-scatter is used for equal batch sizes.
        sums: The gather after it; `gather` if there is no reduce-scatter.
    """

    sent: SentBlocks
    widths: np.ndarray
    gather: ColumnGather
    read_codecs: Codecs
    adds_up: bool
    sums: ColumnGather


class ExchangedRows(Protocol):
    """Rows of one batch in an exchange of embeddings.

    Attributes:
        sends: Elements for each rank in the forward pass.
        receives: Elements from each rank, or of their sum.
        adds_up: Whether the exchange is a reduce-scatter.
        scales_early: Whether `scatter_grad` applies the stage's `grad_scale`.
        read_codecs: Wire formats that `gather` reads and `scatter_grad` writes by themselves.
    """

    sends: list[int]
    receives: list[int]
    adds_up: bool
    scales_early: bool
    read_codecs: Codecs

    def pack(self, lookups: Sequence[Tensor]) -> Tensor:
        """Return the send buffer, flat."""

    def gather(self, buffer: Tensor, arrived: Tensor) -> Tensor:
        """Return the output; `arrived` are the received elements in their wire format."""

    def scatter_grad(self, grad: Tensor, num_received: int) -> tuple[Tensor, Tensor]:
        """Return the gradient of the buffer, and of its `num_received` received elements."""

    def unpack(self, grad: Tensor) -> list[Tensor]:
        """Return the gradients of the lookups, given the gradient of the send buffer."""
