"""Queries for models that torch traces, compiles or exports, and an assertion for fx."""

from __future__ import annotations

import torch
import torch.fx

__all__ = [
    "assert_fx_safe",
    "is_non_strict_exporting",
    "is_pt2_compiling",
    "is_torchdynamo_compiling",
]


def is_torchdynamo_compiling() -> bool:
    """Return whether `torch.compile` or a strict `torch.export` traces this call.

    Example:
        >>> is_torchdynamo_compiling()
        False
    """
    return torch.compiler.is_dynamo_compiling()


def is_non_strict_exporting() -> bool:
    """Return whether `torch.export` with `strict=False` traces this call.

    Example:
        >>> is_non_strict_exporting()
        False
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def is_pt2_compiling() -> bool:
    """Return whether `is_torchdynamo_compiling()` or `is_non_strict_exporting()` is true.

    Example:
        >>> is_pt2_compiling()
        False
    """
    return is_torchdynamo_compiling() or is_non_strict_exporting()


def assert_fx_safe(condition: bool | torch.fx.Proxy, message: str) -> None:
    """Raise AssertionError if a condition is false; `torch.fx` ignores it.

    A plain `assert` would end a trace, because the value of a proxy is unknown.

    Args:
        condition: The condition.
        message: Message of the error.

    Raises:
        AssertionError: The condition is false.

    Example:
        >>> def double(x: torch.Tensor) -> torch.Tensor:
        ...     assert_fx_safe(x.dim() == 2, "x must have two dims")
        ...     return x * 2
        >>> torch.fx.symbolic_trace(double)(torch.ones(1, 1))
        tensor([[2.]])
    """
    if isinstance(condition, torch.fx.Proxy):
        return
    if not condition:
        raise AssertionError(message)
