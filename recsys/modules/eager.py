"""Where a compiled model calls a collection of tables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

C = TypeVar("C", bound=Callable[..., Any])

REASON = (
    "a collection of embedding tables runs eagerly: the host reads how many ids a batch has, and "
    "backward updates the tables"
)


def eager_under_compile(forward: C) -> C:
    """Makes a module's forward pass one named graph break under ``torch.compile``.

    The dense parts before and after it are compiled. A pending output is awaited, as what follows
    needs tensors to trace.

    Args:
        forward: the forward pass of a collection.
    """

    @functools.wraps(forward)
    def whole(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output = output.wait() if hasattr(type(output), "wait") else output
        if isinstance(output, dict):  # of jagged tensors, which are cut when they are first read
            for jagged in output.values():
                jagged.values(), jagged.lengths()
        return output

    eager: Any = torch.compiler.disable(whole, reason=REASON)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return eager(*args, **kwargs)
        return forward(*args, **kwargs)

    return call  # type: ignore[return-value]
