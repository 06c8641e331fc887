"""What every backend says of itself: whether it serves given settings, or why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, TypeAlias

import torch

from recsys.kernels import ops
from recsys.kernels.types import LookupSettings, PoolingType

Role: TypeAlias = Literal["lookup", "update"]
"""What a backend may serve: values of ids; or gradients, and what is done with them."""


Limits: TypeAlias = Mapping[str, Callable[[LookupSettings], bool]]
"""What a backend cannot do: in words, and whether it is asked for."""


class Backend:
    """A way to serve lookups. `support.BACKENDS` has all in the order in which they are asked.

    Attributes:
        name: What users call it.
        device_types: Where it runs; None: everywhere.
        reads_quantized: Whether its tables are quantized rows; else they are of a floating dtype.
        lookup_limits: What it cannot look up.
        update_limits: Of what it cannot compute gradients, or update.
    """

    name: ClassVar[str] = "torch"
    device_types: ClassVar[tuple[str, ...] | None] = None
    reads_quantized: ClassVar[bool] = False
    lookup_limits: ClassVar[Limits] = {}
    update_limits: ClassVar[Limits] = {}

    @classmethod
    def refusal(cls, settings: LookupSettings, role: Role) -> str | None:
        """Why the backend does not serve a role; None: it does."""
        limits = cls.lookup_limits if role == "lookup" else cls.update_limits
        return next((reason for reason, applies in limits.items() if applies(settings)), None)


OUTPUT_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 5}
"""FBGEMM's numbers for the dtypes of a lookup's output."""
POOLING_CODES = {PoolingType.SUM: 0, PoolingType.MEAN: 1, PoolingType.NONE: 2}
"""FBGEMM's numbers."""
FBGEMM_LIMITS: Limits = {
    "fbgemm_gpu is not installed, or RECSYS_KERNELS=torch": lambda s: not ops.FBGEMM_DEVICES,
    "it has no kernels of this pooling": lambda s: s.pooling not in POOLING_CODES,
}
"""What none of its kernels do."""
