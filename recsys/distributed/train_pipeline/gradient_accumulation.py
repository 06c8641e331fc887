"""One optimizer's step for the gradients of several batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, cast, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recsys.distributed.train_pipeline.pipelines import In, Out, TrainPipelineBase
from recsys.kernels.arguments import flag, whole
from recsys.kernels.checked import check_fields, checked


@final
@dataclass
class GradientAccumulationConfig:
    """How many batches share a step.

    Args:
        is_enabled: whether they do.
        num_steps: batches of one optimizer's step, 1 at least.
        num_warmup_steps: batches at the start whose dense gradients are averaged over ranks one by
            one, as DistributedDataParallel with `static_graph` needs; 1 at least.

    Raises:
        ValueError: if a number is below 1.
    """

    is_enabled: bool = False
    num_steps: int = 1
    num_warmup_steps: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("num_steps", "num_warmup_steps"):
            whole(f"GradientAccumulationConfig.{name}", getattr(self, name), least=1)


@final
class GradientAccumulationWrapper(Generic[In, Out]):
    """Steps the optimizer of a pipeline once in several batches.

    Gradients add up; divide the loss by `num_steps` for their mean. Dense gradients travel with the
    last of the batches only. Tables that update themselves in backward do so with every batch:
    attach their optimizer with `update_mode="deferred"` to accumulate theirs, too.

    Args:
        pipeline: makes the steps; it uses the wrapped optimizer from now on.
        optimizer: the pipeline's.
        model: the pipeline's; its DistributedDataParallel is told when to wait with gradients.
        config: how many batches share a step.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> pipeline = TrainPipelineBase(
        ...     model, optimizer, torch.device("cpu"), lambda x: (model(x).sum(), model.bias.item())
        ... )
        >>> config = GradientAccumulationConfig(is_enabled=True, num_steps=2)
        >>> accumulating = GradientAccumulationWrapper(pipeline, optimizer, model, config)
        >>> batches = iter(torch.ones(3, 1))
        >>> first, second, third = (accumulating.progress(batches) for _ in range(3))
        >>> first == second, second == third
        (True, False)
    """

    @checked
    def __init__(
        self,
        pipeline: TrainPipelineBase[In, Out],
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        config: GradientAccumulationConfig,
    ) -> None:
        self._pipeline, self._config = pipeline, config
        self._replicated = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        self._steps = _Steps(optimizer)
        self._at = self._seen = 0
        if config.is_enabled:
            pipeline._optimizer = self._steps  # type: ignore[assignment]

    def progress(self, dataloader_iter: Iterator[In], is_last_batch: bool | None = None) -> Out:
        """Train on one batch.

        Args:
            dataloader_iter: where batches come from.
            is_last_batch: whether the optimizer steps with this batch anyway.

        Raises:
            StopIteration: when all batches were trained on.
        """
        if is_last_batch is not None and not isinstance(cast(object, is_last_batch), bool):
            flag("GradientAccumulationWrapper.progress.is_last_batch", is_last_batch)
        if not self._config.is_enabled:
            return self._pipeline.progress(dataloader_iter)
        steps = self._steps
        steps.begins = self._at == 0
        steps.ends = bool(is_last_batch) or self._at + 1 >= self._config.num_steps
        with ExitStack() as stack:
            if not steps.ends and self._seen >= self._config.num_warmup_steps:
                for module in self._replicated:
                    stack.enter_context(module.no_sync())
            output = self._pipeline.progress(dataloader_iter)
        self._at = 0 if steps.ends else self._at + 1
        self._seen += 1
        return output

    def reset(self) -> None:
        """Begin anew; gradients that no step was made of are dropped with the next batch."""
        self._at = 0
        self._pipeline.reset()

    @checked
    def set_step(self, step: int) -> None:
        """Go on as if this many batches of the next step were seen."""
        self._at = (
            whole("GradientAccumulationWrapper.set_step: step", step, least=0)
            % self._config.num_steps
        )


class _Steps:
    """An optimizer that clears gradients when a step begins, and steps when it ends."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.begins = self.ends = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.begins:
            self._optimizer.zero_grad(set_to_none)

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self.ends:
            self._optimizer.step(*args, **kwargs)
