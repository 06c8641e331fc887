"""How embeddings and their gradients look while they travel between ranks.

By default they travel as they are, fp32. Fewer bytes are opt-in, per direction: fp16 and bf16
round each value; int8 and fp8 round it relative to the largest of its block, a short stretch of
values that travels with its scale. Whatever arrives is fp32 again before anything is added to it,
so parts of row-split tables sum without further loss. Nothing is rounded on a single rank, where
nothing travels.

The bound on the error of one value x, m being the largest magnitude of its block:

| format | error at most | bytes per value |
|---|---|---|
| fp16 | 2^-11 abs(x) (2^-25 / loss_scale below 2^-14; infinite above 65,504) | 2 |
| bf16 | 2^-8 abs(x) | 2 |
| fp8 forward (e4m3) | 2^-4 abs(x) + 2^-18 m | 1 + 4 / block |
| fp8 backward (e5m2) | 2^-3 abs(x) + 2^-32 m | 1 + 4 / block |
| int8 | m / 254 | 1 + 4 / block |

NaN and infinity stay visible: they make their value, or their whole block, NaN or infinite.

FP8 formats: Micikevicius et al., "FP8 formats for deep learning", 2022. Loss scale: Micikevicius
et al., "Mixed precision training", 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional

from recsys.kernels.arguments import number
from recsys.kernels.checked import check_fields, checked

_MIN_BLOCK = 32  # values that share a scale; fewer would spend too much on scales
_SCALE_BYTES = 4


@unique
class CommType(Enum):
    """What a value looks like while it travels."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"

    def __str__(self) -> str:
        return self.value


@unique
class CommOp(Enum):
    """The exchanges whose precision can be chosen."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"

    def __str__(self) -> str:
        return self.value


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class WireFormat:
    """One direction's format.

    Args:
        precision: of a value.
        loss_scale: multiplies before rounding, and divides after: moves small gradients into the
            range of fp16. None: 1.
        block: values that share a scale, for fp8 and int8; 0: what suits the tables.
        fp8_dtype: which of the fp8 formats.

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
        """Bytes that a value takes on its way, its share of a scale included."""
        if self.precision in _CASTS:
            return _CASTS[self.precision].itemsize
        return 1 + _SCALE_BYTES / (self.block or _MIN_BLOCK)

    @property
    def cast(self) -> torch.dtype | None:
        """What each value becomes by itself; None: values share scales, or stay as they are."""
        return None if self.precision is CommType.FP32 else _CASTS.get(self.precision)

    def fitted(self, chunk: int) -> WireFormat | None:
        """Return the format whose blocks fit values that come in multiples of `chunk`.

        A block that was chosen is kept. None: values travel as they are.
        """
        if self.precision is CommType.FP32:
            return None
        return self if self.block else replace(self, block=chunk * -(-_MIN_BLOCK // chunk))

    def encoded_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return how many elements of the encoded tensor stand for stretches of values."""
        if self.precision in _CASTS:
            return list(sizes)
        return [-(-size // self.block) * (self.block + _SCALE_BYTES) for size in sizes]

    def encode(self, values_N: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Make values ready to travel.

        Args:
            values_N: fp32 `[sum(sizes)]`; or of the dtype `cast`, if they are ready.
            sizes: of the stretches that go to each rank.

        Returns:
            The encoded values, fp16, bf16 or bytes; and the sizes of the stretches in it.
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
        """Turn what arrived into values.

        Args:
            encoded: as `encode` made it on the senders.
            sizes: values in the stretch from each rank.
            out: what to fill; allocated if None.

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
            values_N.copy_(self._cut((small.view(dtype).float() * scales).view(-1), sizes))
        return values_N if self.loss_scale is None else values_N.div_(self.loss_scale)

    def _pad(self, values_N: Tensor, sizes: Sequence[int]) -> Tensor:
        """Let every rank's stretch end with a whole block."""
        if all(size % self.block == 0 for size in sizes):
            return values_N
        pieces = values_N.split(list(sizes))
        return torch.cat([functional.pad(p, (0, -p.numel() % self.block)) for p in pieces])

    def _cut(self, padded: Tensor, sizes: Sequence[int]) -> Tensor:
        """Drop what `_pad` added."""
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

POOLED_OPS = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
"""The names of the exchange of pooled embeddings."""
SEQUENCE_OPS = (CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,)
"""The names of the exchange of sequences."""


class QuantizedCommCodecs(NamedTuple):
    """The formats of an exchange, there and back."""

    forward: WireFormat = EXACT
    backward: WireFormat = EXACT

    def fitted(self, chunk: int) -> tuple[WireFormat | None, WireFormat | None]:
        """Return the formats whose blocks fit values that come in multiples of `chunk`."""
        return self.forward.fitted(chunk), self.backward.fitted(chunk)


@final
@dataclass
class QCommsConfig:
    """The precision of embeddings on their way to the samples, and of gradients on their way back.

    Args:
        forward_precision: of embeddings.
        backward_precision: of gradients.
        forward_loss_scale: multiplies embeddings while they travel; None: 1.
        backward_loss_scale: multiplies gradients while they travel; None: 1. Choose it for fp16 so
            that gradients are well within 6e-5 to 65,504.
        fp8_quantize_dim: embeddings' values that share a scale, for fp8 and int8; None: as many as
            every table's columns are a multiple of, at least 32.
        fp8_quantize_dim_bwd: the same for gradients.
        fp8_bwd_uses_143: whether fp8 gradients have 3 bits of mantissa (e4m3), as embeddings do, in
            place of 2 (e5m2).

    Raises:
        ValueError: if a precision is no `CommType`, or a number is not positive.
        TypeError: if a number of values is no int.

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
    """Return what a sharder takes as `qcomm_codecs_registry`.

    Args:
        qcomms_config: the precisions.
        comm_ops: the exchanges that use them; None: all.
        device: Ignored; any device can send any format.

    Returns:
        By the name of the exchange its formats.
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
    """Return the formats of an exchange that goes by several names in a registry.

    Args:
        registry: of `get_qcomm_codecs_registry`, or None.
        names: the exchange's names: here one exchange serves what others do by several.

    Raises:
        ValueError: if the registry says different things for those names.
    """
    found = [registry[op.name] for op in names if registry and op.name in registry]
    if any(codecs != found[0] for codecs in found):
        raise ValueError(
            f"One exchange carries all pooled embeddings, so {[op.name for op in names]} must have "
            f"one precision; received {found}. Give them the same."
        )
    return found[0] if found else QuantizedCommCodecs()
