"""Where a compiled model calls a collection of tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

REASON = (
    "a collection of embedding tables runs eagerly: the host reads how many ids a batch has, and "
    "backward updates the tables"
)


def _run(collection: nn.Module, *given: Any) -> Any:
    """Run a collection's forward pass as one named graph break under `torch.compile`.

    The dense parts before and after it are compiled. A pending output is awaited, as what follows
    needs tensors to trace.
    """
    output = collection.forward(*given)
    output = output.wait() if hasattr(type(output), "wait") else output
    if isinstance(output, dict):  # of jagged tensors, which are made when they are first read
        for jagged in output.values():
            jagged.values(), jagged.lengths()
    return output


run_eagerly: Any = torch.compiler.disable(_run, reason=REASON)
