"""Rules and bias terms of attention inside each bag of a jagged tensor.

Shapes: `M` bags, `N` values of all bags, `H` heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

__all__ = ["AttentionRules", "Bias", "time_buckets"]

Kind: TypeAlias = Literal["softmax", "silu"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRules:
    """The conversion of scores to shares, and the keys that a query reads."""

    kind: Kind
    """softmax over the keys; or SiLU of each score, divided by `divisor` (Zhai et al., "Actions
    speak louder than words", ICML 2024)."""
    causal: bool
    """True: a query reads its own key and earlier ones."""
    scale: float
    """Factor of the scores, before the bias."""
    divisor: float
    """Divisor of SiLU."""
    max_length: int
    """Most values of a bag. `torch.compile` and `torch.export`, which cannot read lengths, pad to
    it."""


@final
class Bias(NamedTuple):
    """Terms that are added to the scores of a query and a key, and positions that are targets."""

    position: Tensor | None
    """[H, 2P - 1]: entry `P - 1 + d` for a key that is `d` positions earlier, at most `P - 1`."""
    time: Tensor | None
    """[H, T]: entry `time_buckets` of the distance in time, at most `T - 1`."""
    query_times: Tensor | None
    """int64 [N]."""
    key_times: Tensor | None
    """int64 [N]."""
    num_targets: Tensor | None
    """int64 [M]: the last positions of a bag, whose keys are read by their own queries alone. All
    of a bag have the same distances from other keys, the first target's distances."""


def time_buckets(distances: Tensor) -> Tensor:
    """Return the number of bits of distances in time: 0, 1, 2 to 3, 4 to 7, and so on.

    Args:
        distances: int64, of any sign.

    Returns:
        int64 from 0 to 63.

    Example:
        >>> time_buckets(torch.tensor([0, -1, 2, 3, 4, 2**62])).tolist()
        [0, 1, 2, 2, 3, 63]
    """
    # float64 comes first: `abs` of int64 overflows for -2^63
    lengths = distances.double().abs()
    if torch.compiler.is_compiling():  # Inductor of torch 2.13 cannot compile vectors of frexp
        powers = 1 << torch.arange(63, device=distances.device)
        return torch.bucketize(lengths, powers.double(), right=True)
    # the largest distances are 2^63 in float64, which has one bit more
    return torch.frexp(lengths).exponent.long().clamp(max=63)
