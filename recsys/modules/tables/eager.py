"""Graph break at collections of tables under `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

REASON = (
    "a collection of embedding tables runs eagerly: the host reads the number of ids of a batch, "
    "and backward updates the tables"
)


def _run(collection: nn.Module, *given: Any) -> Any:
    """Run a collection's forward pass as one named graph break under `torch.compile`.

    The dense modules before and after it are compiled. They need tensors, so this waits for a
    pending output.
    """
    output = collection.forward(*given)
    output = output.wait() if hasattr(type(output), "wait") else output
    if isinstance(output, dict):
        for jagged in output.values():  # jagged tensors are computed at the first access
            jagged.values(), jagged.lengths()
    return output


run_eagerly: Any = torch.compiler.disable(_run, reason=REASON)
