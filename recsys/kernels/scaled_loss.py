"""`torch.amp.GradScaler` must not scale the loss of tables that are updated in backward.

It multiplies the loss and divides the gradients before the optimizer steps. A table that is updated
in backward has stepped by then, by gradients that are still multiplied. So once the process has
such a table, `GradScaler.scale` looks what the loss depends on, and refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, final

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

TABLE_UPDATES: Final = "recsys.table_updates"
"""The key of an autograd node's `metadata` under which its `TableUpdates` are."""

_NUM_SHOWN = 5


@final
class TableUpdates(NamedTuple):
    """The tables whose gradients an autograd node takes, by where they go."""

    in_backward: tuple[str, ...] = ()
    """They update the table at once."""
    kept: tuple[str, ...] = ()
    """They stay where only `recsys.optim.GradScaler` finds them, on this rank or on another."""


def watch_grad_scaler() -> None:
    """Let every `GradScaler` check the losses that it scales; more calls change nothing.

    Example:
        >>> import torch
        >>> watch_grad_scaler()
        >>> weight = torch.ones(1, requires_grad=True)
        >>> GradScaler("cpu", init_scale=4.0).scale(weight * 2)
        tensor([8.], grad_fn=<MulBackward0>)
    """
    if hasattr(GradScaler.scale, "_checks_tables"):
        return
    scale = GradScaler.scale

    @functools.wraps(scale)
    def scale_after_check(self: GradScaler, outputs: Tensor | Iterable[Tensor]) -> Any:
        if self.is_enabled():
            if not isinstance(outputs, Tensor | list | tuple):
                outputs = list(outputs)
            _check(self, [outputs] if isinstance(outputs, Tensor) else outputs)
        return scale(self, outputs)

    scale_after_check._checks_tables = True  # type: ignore[attr-defined]
    GradScaler.scale = scale_after_check  # type: ignore[method-assign]


def _check(scaler: GradScaler, outputs: Iterable[Any]) -> None:
    in_backward, kept, shapes = dict[str, None](), dict[str, None](), list[list[int]]()
    for node in _nodes_behind(outputs):
        updates = node.metadata.get(TABLE_UPDATES)
        if updates is not None:
            in_backward.update(dict.fromkeys(updates.in_backward))
            kept.update(dict.fromkeys(updates.kept))
        elif _steps_in_backward(getattr(node, "variable", None)):
            shapes.append(list(node.variable.shape))
    if (in_backward or shapes) and scaler.get_scale() != 1.0:
        what = f"tables {_shown(list(in_backward))}" if in_backward else f"parameters of {shapes}"
        raise ValueError(
            f"GradScaler multiplies the loss by {scaler.get_scale():g}, and {what} are updated in "
            "backward, before it can divide their gradients again. Train in bf16, which needs no "
            "GradScaler (torch.autocast(device_type, torch.bfloat16)); or let the tables of a "
            "sharded model keep their gradients (update_mode='deferred', or no optimizer of their "
            "own) and use recsys.optim.GradScaler."
        )
    if kept and not getattr(scaler, "handles_tables", False):
        raise ValueError(
            f"{type(scaler).__module__}.{type(scaler).__qualname__} finds neither the gradients "
            f"that tables {_shown(list(kept))} keep nor an inf or NaN on another rank. Use "
            "recsys.optim.GradScaler, which takes the same arguments."
        )


def _steps_in_backward(leaf: Tensor | None) -> bool:
    """Return whether `apply_optimizer_in_backward` gave a leaf an optimizer and a hook to call it.

    Tables have the optimizer alone.
    """
    has_optimizer = bool(getattr(leaf, "_in_backward_optimizers", None))
    return has_optimizer and bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


def _nodes_behind(outputs: Iterable[Any]) -> Iterator[Any]:
    """Each autograd node that a backward pass from the outputs reaches."""
    pending: list[Any] = [output.grad_fn for output in outputs if isinstance(output, Tensor)]
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
