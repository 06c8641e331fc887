"""Base class of backends, with the reasons for which a backend does not serve settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, TypeAlias

import torch

from recsys.kernels import ops
from recsys.kernels.types import LookupSettings, PoolingType

Role: TypeAlias = Literal["lookup", "update"]
"""Part of a lookup that a backend serves: the forward pass, or gradients and updates."""


Limits: TypeAlias = Mapping[str, Callable[[LookupSettings], bool]]
"""Unsupported features of a backend: a text, and a check whether settings need the feature."""


class Backend:
    """Implementation of lookups. `support.BACKENDS` lists all, the preferred first.

    Attributes:
        name: Name for users.
        device_types: Supported types of devices; None: all.
        reads_quantized: Whether tables are quantized; else they have a floating dtype.
        lookup_limits: Limits of the forward pass.
        update_limits: Limits of gradients and updates.
    """

    name: ClassVar[str] = "torch"
    device_types: ClassVar[tuple[str, ...] | None] = None
    reads_quantized: ClassVar[bool] = False
    lookup_limits: ClassVar[Limits] = {}
    update_limits: ClassVar[Limits] = {}

    @classmethod
    def refusal(cls, settings: LookupSettings, role: Role) -> str | None:
        """Return the reason for which the backend does not serve a role; None if it does."""
        limits = cls.lookup_limits if role == "lookup" else cls.update_limits
        return next((reason for reason, applies in limits.items() if applies(settings)), None)


OUTPUT_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 5}
"""FBGEMM's codes of output dtypes."""
POOLING_CODES = {PoolingType.SUM: 0, PoolingType.MEAN: 1, PoolingType.NONE: 2}
"""FBGEMM's codes of poolings."""
FBGEMM_LIMITS: Limits = {
    "fbgemm_gpu is not installed, or RECSYS_KERNELS=torch": lambda s: not ops.FBGEMM_DEVICES,
    "it has no kernels of this pooling": lambda s: s.pooling not in POOLING_CODES,
}
"""Limits of all FBGEMM kernels."""
