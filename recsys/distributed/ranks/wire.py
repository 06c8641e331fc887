"""Number formats of embeddings and gradients in exchanges between ranks.

By default values are sent unchanged, as fp32. Smaller formats are opt-in, per direction. fp16 and
bf16 round each value. int8 and fp8 round it relative to the largest of its block, a short range of
values that is sent with its scale. Received values are converted to fp32 before anything is added
to them, so sums of row-split tables have no further loss. On a single rank nothing is sent and
nothing is rounded.

Bounds on the error of a value x, where m is the largest magnitude of its block:

| format | error at most | bytes per value |
|---|---|---|
| fp16 | 2^-11 abs(x) (2^-25 / loss_scale below 2^-14; infinite above 65,504) | 2 |
| bf16 | 2^-8 abs(x) | 2 |
| fp8 forward (e4m3) | 2^-4 abs(x) + 2^-18 m | 1 + 4 / block |
| fp8 backward (e5m2) | 2^-3 abs(x) + 2^-32 m | 1 + 4 / block |
| int8 | m / 254 | 1 + 4 / block |

NaN and infinity stay visible: they make their value, or their whole block, NaN or infinite.

FP8 formats: Micikevicius et al., "FP8 formats for deep learning", 2022. Loss scale: Micikevicius et
al., "Mixed precision training", 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional

from recsys.base.arguments import number
from recsys.base.checked import check_fields, checked

_MIN_BLOCK = 32  # values that share a scale; fewer would spend too much on scales
_SCALE_BYTES = 4


@unique
class CommType(Enum):
    """Format of a value in an exchange."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"

    def __str__(self) -> str:
        return self.value


@unique
class CommOp(Enum):
    """Exchanges with a configurable precision."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"

    def __str__(self) -> str:
        return self.value


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class WireFormat:
    """Format of one direction.

    Args:
        precision: Format of a value.
        loss_scale: Factor before rounding, divided out after the exchange: moves small gradients
            into the range of fp16. None for 1.
        block: Number of values that share a scale, for fp8 and int8; 0 to derive it from the
            tables.
        fp8_dtype: The fp8 format.

    Example:
        >>> wire = WireFormat(precision=CommType.INT8, block=32)
        >>> sent, sizes = wire.encode(torch.linspace(-1, 1, 64), [32, 32])
        >>> sent.dtype, sizes
        (torch.uint8, [36, 36])
        >>> bool((wire.decode(sent, [32, 32]) - torch.linspace(-1, 1, 64)).abs().max() < 1 / 254)
        True
    """

    precision: CommType = CommType.FP32
    loss_scale: float | None = None
    block: int = 0
    fp8_dtype: torch.dtype = torch.float8_e4m3fn

    @property
    def bytes_per_value(self) -> float:
        """Bytes sent per value, including its share of a scale."""
        if self.precision in _CASTS:
            return _CASTS[self.precision].itemsize
        return 1 + _SCALE_BYTES / (self.block or _MIN_BLOCK)

    @property
    def cast(self) -> torch.dtype | None:
        """Dtype of values that are rounded one by one; None for shared scales or no rounding."""
        return None if self.precision is CommType.FP32 else _CASTS.get(self.precision)

    def fitted(self, chunk: int) -> WireFormat:
        """Return the format with blocks that fit values in multiples of `chunk`.

        A block size that was set is kept. `EXACT` if values are sent unchanged.
        """
        if self.precision is CommType.FP32:
            return EXACT
        return self if self.block else replace(self, block=chunk * -(-_MIN_BLOCK // chunk))

    def encoded_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return the number of encoded elements of blocks of values."""
        if self.precision in _CASTS:
            return list(sizes)
        return [-(-size // self.block) * (self.block + _SCALE_BYTES) for size in sizes]

    def encode(self, values_N: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Encode values for an exchange.

        Args:
            values_N: fp32 `[sum(sizes)]`; or of the dtype `cast`, if encoded already.
            sizes: Number of values for each rank.

        Returns:
            The encoded values, fp16, bf16 or bytes; and the number of elements for each rank.
        """
        if values_N.dtype is self.cast:
            return values_N, list(sizes)
        if self.loss_scale is not None:
            values_N = values_N * self.loss_scale
        if self.precision in _CASTS:
            return values_N.to(_CASTS[self.precision]), list(sizes)
        blocks = self._pad(values_N, sizes).view(-1, self.block)
        limit = 127.0 if self.precision is CommType.INT8 else torch.finfo(self.fp8_dtype).max
        tiny = torch.finfo(torch.float32).tiny
        scales = (blocks.abs().amax(1, keepdim=True) / limit).clamp_min_(tiny)
        scaled = blocks / scales
        if self.precision is CommType.INT8:
            small = scaled.round_().to(torch.int8)
        else:
            small = scaled.to(self.fp8_dtype)
        scale_bytes = scales.flatten().view(torch.uint8).view(len(scales), _SCALE_BYTES)
        encoded = torch.cat([small.view(torch.uint8), scale_bytes], 1)
        return encoded.view(-1), self.encoded_sizes(sizes)

    def decode(self, encoded: Tensor, sizes: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Decode received values.

        Args:
            encoded: Output of `encode` on the senders.
            sizes: Number of values from each rank.
            out: Output buffer; allocated if None.

        Returns:
            fp32 `[sum(sizes)]`.
        """
        values_N = encoded.new_empty(sum(sizes), dtype=torch.float32) if out is None else out
        if self.precision in _CASTS:
            values_N.copy_(encoded)
        else:
            rows = encoded.view(-1, self.block + _SCALE_BYTES)
            small = rows[:, : self.block]
            dtype = torch.int8 if self.precision is CommType.INT8 else self.fp8_dtype
            # a copy: within a single row the scale may start at an odd byte
            scales = rows[:, self.block :].clone(memory_format=torch.contiguous_format)
            scales = scales.view(torch.float32)
            values_N.copy_(self._unpad((small.view(dtype).float() * scales).view(-1), sizes))
        return values_N if self.loss_scale is None else values_N.div_(self.loss_scale)

    def _pad(self, values_N: Tensor, sizes: Sequence[int]) -> Tensor:
        """Pad every rank's values to whole blocks."""
        if all(size % self.block == 0 for size in sizes):
            return values_N
        pieces = values_N.split(list(sizes))
        return torch.cat([functional.pad(p, (0, -p.numel() % self.block)) for p in pieces])

    def _unpad(self, padded: Tensor, sizes: Sequence[int]) -> Tensor:
        """Remove the padding of `_pad`."""
        if all(size % self.block == 0 for size in sizes):
            return padded
        pieces = padded.split([-(-size // self.block) * self.block for size in sizes])
        return torch.cat([p[:size] for p, size in zip(pieces, sizes, strict=True)])


_CASTS = {
    CommType.FP32: torch.float32,
    CommType.FP16: torch.float16,
    CommType.BF16: torch.bfloat16,
}


EXACT = WireFormat()
"""Format of values that are sent unchanged."""

POOLED_OPS = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
"""Names of the exchange of pooled embeddings."""
SEQUENCE_OPS = (CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,)
"""Names of the exchange of sequences."""


class QuantizedCommCodecs(NamedTuple):
    """Formats of an exchange in both directions."""

    forward: WireFormat = EXACT
    backward: WireFormat = EXACT

    def fitted(self, chunk: int) -> tuple[WireFormat, WireFormat]:
        """Return the formats with blocks that fit values in multiples of `chunk`."""
        return self.forward.fitted(chunk), self.backward.fitted(chunk)


@final
@dataclass
class QCommsConfig:
    """Precision of embeddings sent to the samples, and of gradients sent back.

    Args:
        forward_precision: Precision of embeddings.
        backward_precision: Precision of gradients.
        forward_loss_scale: Factor of embeddings during the exchange; None for 1.
        backward_loss_scale: Factor of gradients during the exchange; None for 1. For fp16, choose
            it so that gradients are well within 6e-5 to 65,504.
        fp8_quantize_dim: Number of values of embeddings that share a scale, for fp8 and int8; None
            for a common divisor of all tables' columns, at least 32.
        fp8_quantize_dim_bwd: The same for gradients.
        fp8_bwd_uses_143: Whether fp8 gradients have 3 bits of mantissa (e4m3), like embeddings,
            instead of 2 (e5m2).

    Raises:
        ValueError: A precision is not a `CommType`, or a number is not positive.
        TypeError: A number of values is not an int.

    Example:
        >>> config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
        >>> registry = get_qcomm_codecs_registry(config)
        >>> registry["POOLED_EMBEDDINGS_ALL_TO_ALL"].forward.precision.name
        'FP16'
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    fp8_quantize_dim: int | None = None
    fp8_quantize_dim_bwd: int | None = None
    fp8_bwd_uses_143: bool | None = False

    def __post_init__(self) -> None:
        names = [kind.name for kind in CommType]
        for name in ("forward_precision", "backward_precision"):
            value = getattr(self, name)
            if not isinstance(value, CommType):
                raise ValueError(
                    f"QCommsConfig.{name} must be a CommType, one of {', '.join(names)}; "
                    f"received {value!r}."
                )
        for name in (
            "forward_loss_scale",
            "backward_loss_scale",
            "fp8_quantize_dim",
            "fp8_quantize_dim_bwd",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < number(f"QCommsConfig.{name}", value) < float("inf"):
                raise ValueError(
                    f"QCommsConfig.{name} must be positive and finite; received {value}. "
                    "Leave it None for the default."
                )
            if name.startswith("fp8") and not isinstance(value, int | None):
                raise TypeError(f"QCommsConfig.{name} must be an int; received {value!r}.")
        check_fields(self)


@checked
def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig,
    comm_ops: Sequence[CommOp] | None = None,
    device: torch.device | None = None,
) -> dict[str, QuantizedCommCodecs]:
    """Return the `qcomm_codecs_registry` argument of a sharder.

    Args:
        qcomms_config: The precisions.
        comm_ops: Exchanges that use them; None for all.
        device: Ignored; any device can send any format.

    Returns:
        Formats by the name of the exchange.
    """
    config = qcomms_config
    forward = WireFormat(
        precision=config.forward_precision,
        loss_scale=config.forward_loss_scale,
        block=config.fp8_quantize_dim or 0,
    )
    backward = WireFormat(
        precision=config.backward_precision,
        loss_scale=config.backward_loss_scale,
        block=config.fp8_quantize_dim_bwd or 0,
        fp8_dtype=torch.float8_e4m3fn if config.fp8_bwd_uses_143 else torch.float8_e5m2,
    )
    codecs = QuantizedCommCodecs(forward, backward)
    return {op.name: codecs for op in comm_ops or CommOp}


def codecs_for(
    registry: Mapping[str, QuantizedCommCodecs] | None, *names: CommOp
) -> QuantizedCommCodecs:
    """Return the formats of an exchange that has several names in a registry.

    Args:
        registry: Result of `get_qcomm_codecs_registry`, or None.
        names: Names of the exchange: one exchange here replaces several in TorchRec.

    Raises:
        ValueError: The registry has different formats for these names.
    """
    known = [registry[op.name] for op in names if registry and op.name in registry]
    if any(codecs != known[0] for codecs in known):
        raise ValueError(
            f"One exchange sends all pooled embeddings, so {[op.name for op in names]} must have "
            f"one precision; received {known}. Set the same for all."
        )
    return known[0] if known else QuantizedCommCodecs()
