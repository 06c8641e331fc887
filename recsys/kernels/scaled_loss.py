"""Check that a scaled loss does not reach tables that are updated in backward.

A gradient scaler multiplies the loss and divides the gradients before the optimizer step. A table
that is updated in backward has been updated by then, with gradients that are still multiplied.
`recsys.optim.GradScaler` calls `check_scaled_loss` for each loss that it scales.
`torch.amp.GradScaler` has no hook for such a check and is left as it is; fp16 autocast, which needs
a scaler, causes a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

TABLE_UPDATES: Final = "recsys.table_updates"
"""Key of the `TableUpdates` in the `metadata` of an autograd node."""

_NUM_SHOWN = 5


@final
class TableUpdates(NamedTuple):
    """Tables that an autograd node updates."""

    in_backward: tuple[str, ...] = ()
    """Names of the tables."""


def warn_of_fp16(updates: TableUpdates, device_type: str) -> None:
    """Warn under autocast in fp16, if tables of the lookup are updated in backward."""
    if updates.in_backward and torch.get_autocast_dtype(device_type) is torch.float16:
        warnings.warn(
            f"Tables {_shown(list(updates.in_backward))} are updated in backward, and the forward "
            "pass runs under autocast in float16. Their loss must not be scaled by a GradScaler. "
            "recsys.optim.GradScaler checks this, torch.amp.GradScaler does not. Use "
            "torch.autocast(device_type, torch.bfloat16), which needs no scaler.",
            UserWarning,
            stacklevel=2,
        )


def check_scaled_loss(scaler: GradScaler, outputs: Iterable[Any]) -> None:
    """Check that all tables a loss depends on can be trained with a scaler.

    Args:
        scaler: An enabled scaler that finds the gradients that tables keep.
        outputs: The losses before they are scaled.

    Raises:
        ValueError: A table or parameter is updated in backward, and the scale is not 1.
    """
    in_backward, shapes = dict[str, None](), list[list[int]]()
    for node in _nodes_behind(outputs):
        updates = node.metadata.get(TABLE_UPDATES)
        if updates is not None:
            in_backward.update(dict.fromkeys(updates.in_backward))
        elif _steps_in_backward(getattr(node, "variable", None)):
            shapes.append(list(node.variable.shape))
    # `get_scale` comes last, as it waits for the device
    if (in_backward or shapes) and scaler.get_scale() != 1.0:
        what = f"tables {_shown(list(in_backward))}" if in_backward else f"parameters of {shapes}"
        raise ValueError(
            "GradScaler.scale needs a loss whose tables keep their gradients until the step; "
            f"received a loss to multiply by {scaler.get_scale():g}, and {what} are updated in "
            "backward. Train in bf16, which needs no GradScaler (torch.autocast(device_type, "
            "torch.bfloat16)). Or let the tables of a sharded model keep their gradients "
            "(update_mode='deferred', or no optimizer of their own)."
        )


def _steps_in_backward(leaf: Tensor | None) -> bool:
    """Return whether a leaf has a hook of `apply_optimizer_in_backward`; tables have none."""
    has_optimizer = bool(getattr(leaf, "_in_backward_optimizers", None))
    return has_optimizer and bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


def _nodes_behind(outputs: Iterable[Any]) -> Iterator[Any]:
    """Yield each autograd node that a backward pass from the outputs reaches."""
    pending: list[Any] = [output.grad_fn for output in outputs if isinstance(output, Tensor)]
    # `next_functions` has None for inputs without a gradient
    seen: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending += [before for before, _ in node.next_functions]


def _shown(names: list[str]) -> str:
    more = len(names) - _NUM_SHOWN
    return f"{names[:_NUM_SHOWN]}{f' and {more} more' if more > 0 else ''}"
