"""The `triton` backend on CUDA: deterministic updates by SGD and row-wise Adagrad."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from recsys.kernels import ops
from recsys.kernels.backend import Limits
from recsys.kernels.lookup_batch import LookupBatch
from recsys.kernels.ops import upload
from recsys.kernels.row_gradients import WIDEST, RowGradients, RowStatistics, sort_rows
from recsys.kernels.tbe_layout import DimGroup
from recsys.kernels.tbe_torch import TorchKernel
from recsys.kernels.types import EmbOptimType, WeightDecayMode

if TYPE_CHECKING:
    from recsys.kernels.update_triton import RowUpdate

_UPDATES = (EmbOptimType.SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)


@final
class TritonKernel(TorchKernel):
    """Updates in a fixed order, in one or two launches after the sort; other backends look up.

    An update in backward stores no row gradients. If all ids of a row are in one block of sorted
    ids, the row is updated by the launch that adds them up.
    """

    name = "triton"
    device_types = ("cuda",)
    lookup_limits: ClassVar[Limits] = {"it updates only": lambda s: True}
    update_limits: ClassVar[Limits] = {
        ops.WHY_TRITON_FAILS or "Triton is not installed, or RECSYS_KERNELS=torch": (
            lambda s: not ops.HAS_TRITON
        ),
        "it updates by SGD and row-wise Adagrad only": lambda s: (
            s.owned is None or s.owned.algorithm not in _UPDATES
        ),
        "it does not round stochastically": lambda s: (
            s.owned is not None and s.owned.stochastic_rounding
        ),
        "it updates tables of fp32, fp16 and bf16 only": lambda s: (
            s.weights_dtype not in (torch.float32, torch.float16, torch.bfloat16)
        ),
        f"its rows have at most {WIDEST} columns": lambda s: max(s.dims, default=0) > WIDEST,
        "rows in a cache are FBGEMM's": lambda s: "MANAGED" in str(s.location),
    }

    def update(self, grad: Tensor, batch: LookupBatch) -> None:
        """Make one optimizer step in place, from the gradient of the output."""
        from recsys.kernels.update_triton import sum_and_update

        # row gradients are not stored; docs/decisions/triton.md, "Updates in two passes"
        for group, part in self._sorted_parts(grad, batch):
            sum_and_update(self._update_of(group), *part)

    def row_statistics(
        self, grad: Tensor, batch: LookupBatch
    ) -> tuple[list[RowStatistics], list[RowGradients] | None] | None:
        """Return the statistics of each dim group, and the row gradients of the same kernel."""
        assert self.optimizer is not None
        # with L2 decay a statistic contains the weights, which the kernel does not read
        if self.optimizer.decay(WeightDecayMode.L2) or not batch.indices.numel():
            return None
        reduced = self._by_group(_sums_and_squares, grad, batch)
        sums = [(rows, sums) for rows, sums, _ in reduced]
        return [(rows, squares) for rows, _, squares in reduced], sums

    def _apply_to(
        self,
        group: DimGroup,
        rows: Tensor,
        grads: Tensor,
        moment: Tensor | None = None,
        *,
        repeats: bool = False,
    ) -> None:
        from recsys.kernels.update_triton import update_entries

        # `repeats` is not read: the kernel updates a row at its first entry in any case
        update_entries(self._update_of(group), rows, grads, moment)

    def _update_of(self, group: DimGroup) -> RowUpdate:
        from recsys.kernels.update_triton import RowUpdate

        assert self.optimizer is not None
        matrix, states = self._views(group)
        rate = self._rate_of_tables(group)
        if isinstance(rate, Tensor):
            rate = upload(rate, matrix.device)
        return RowUpdate(self.optimizer, matrix, states.get("sum"), rate, group.row_starts)


def _sums_and_squares(
    row_ids: Tensor, num_rows: int, gradients: Tensor, source: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    from recsys.kernels.update_triton import sum_by_row

    return sum_by_row(*sort_rows(row_ids, num_rows), gradients, source, scale, True)
