"""A pipeline as a client writes it, by the stages that TorchRec documents, for either library.

While one batch trains, the ids of the next are on their way, and the one after that is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Pipelined:
    """Takes the place of a sharded module's forward: its batch has started already.

    Args:
        module: the sharded module.
        in_one_call: whether it looks up and sends back in one call, or in two.
    """

    def __init__(self, module: Any, in_one_call: bool) -> None:
        self.module, self.in_one_call = module, in_one_call
        self.under_way: deque[tuple[Any, Any]] = deque()

    def start(self, features: Any) -> None:
        """Starts a batch."""
        context = self.module.create_context()
        self.under_way.append((context, self.module.input_dist(context, features)))

    def send(self) -> None:
        """Sends the ids of the batch that started last."""
        context, counts = self.under_way.pop()
        self.under_way.append((context, counts.wait()))

    def __call__(self, features: Any) -> Any:
        """Looks up the batch that started first."""
        context, ids = self.under_way.popleft()
        if self.in_one_call:
            return self.module.compute_and_output_dist(context, ids.wait())
        return self.module.output_dist(context, self.module.compute(context, ids.wait()))


def train_pipelined(
    model: nn.Module,
    sharded_module: type,
    batches: Iterable[Any],
    step: Callable[[nn.Module, Any], float],
    in_one_call: bool = True,
) -> list[float]:
    """Train on the batches; all sharded modules read every batch.

    Args:
        model: whose sharded modules are pipelined.
        sharded_module: the library's class.
        batches: this rank's.
        step: calls the model, trains it, and returns the loss.
        in_one_call: as for `Pipelined`.
    """
    stages = []
    for module in model.modules():
        if isinstance(module, sharded_module):
            stages.append(Pipelined(module, in_one_call))
            module.forward = stages[-1]

    def start(batch: Any) -> None:
        for stage in stages:
            stage.start(batch)
        for stage in stages:
            stage.send()

    copies = (batch.to(torch.device("cpu")) for batch in batches)
    losses = []
    current, following = next(copies), next(copies, None)
    start(current)
    while current is not None:
        if following is not None:
            start(following)
        coming = next(copies, None)
        losses.append(step(model, current))
        current, following = following, coming
    return losses


def _values(output: Any) -> Tensor:
    if isinstance(output, dict):
        return torch.cat([jagged.values() for jagged in output.values()])
    values: Tensor = output if isinstance(output, Tensor) else output.values()
    return values


def interleave(module: Any, first: tuple[Any, ...], second: tuple[Any, ...]) -> list[Tensor]:
    """Look up two batches; the exchanges of both start before the first lookup."""
    one, other = module.create_context(), module.create_context()
    counts_of_one = module.input_dist(one, *first)
    counts_of_other = module.input_dist(other, *second)
    ids_of_other, ids_of_one = counts_of_other.wait(), counts_of_one.wait()
    found = module.compute(other, ids_of_other.wait())
    output = module.compute_and_output_dist(one, ids_of_one.wait())
    return [_values(output.wait()), _values(module.output_dist(other, found).wait())]


def in_turn(module: Any, first: tuple[Any, ...], second: tuple[Any, ...]) -> list[Tensor]:
    """The same by forward passes, in the same order."""
    other = module(*second)
    return [_values(module(*first).wait()), _values(other.wait())]
