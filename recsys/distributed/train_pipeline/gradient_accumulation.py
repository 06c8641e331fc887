"""Gradient accumulation: one optimizer step for several batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recsys.base.arguments import flag, whole
from recsys.base.checked import check_fields, checked
from recsys.distributed.train_pipeline.pipelines import In, Out, TrainPipelineBase


@final
@dataclass
class GradientAccumulationConfig:
    """Settings of gradient accumulation.

    Args:
        is_enabled: Whether to accumulate gradients.
        num_steps: Number of batches per optimizer step, at least 1.
        num_warmup_steps: Number of first batches whose dense gradients are averaged over ranks one
            by one, as DistributedDataParallel with `static_graph` needs; at least 1.

    Raises:
        ValueError: If a number is below 1.
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
    """Pipeline wrapper that steps the optimizer once for several batches.

    Gradients are summed; divide the loss by `num_steps` for their mean. Dense gradients are
    exchanged with the last of the batches only. Tables with an optimizer in backward are updated
    with every batch; attach it with `update_mode="deferred"` to accumulate their gradients too.

    Args:
        pipeline: The pipeline; it steps `optimizer` from then on.
        optimizer: Optimizer of the pipeline.
        model: Model of the pipeline; its DistributedDataParallel defers the exchange of gradients.
        config: Settings.

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
        self._at = self._seen = 0
        if config.is_enabled:
            pipeline._optimizer = optimizer

    def progress(self, dataloader_iter: Iterator[In], is_last_batch: bool | None = None) -> Out:
        """Train on one batch.

        Args:
            dataloader_iter: Iterator of batches.
            is_last_batch: Whether the optimizer steps after this batch in any case.

        Raises:
            StopIteration: After the last batch.
        """
        if is_last_batch is not None:
            flag("GradientAccumulationWrapper.progress.is_last_batch", is_last_batch)
        if not self._config.is_enabled:
            return self._pipeline.progress(dataloader_iter)
        pipeline = self._pipeline
        pipeline.starts_step = self._at == 0
        pipeline.ends_step = bool(is_last_batch) or self._at + 1 >= self._config.num_steps
        with ExitStack() as stack:
            if not pipeline.ends_step and self._seen >= self._config.num_warmup_steps:
                for module in self._replicated:
                    stack.enter_context(module.no_sync())
            output = pipeline.progress(dataloader_iter)
        self._at = 0 if pipeline.ends_step else self._at + 1
        self._seen += 1
        return output

    def reset(self) -> None:
        """Start a new step; accumulated gradients are cleared with the next batch."""
        self._at = 0
        self._pipeline.reset()

    @checked
    def set_step(self, step: int) -> None:
        """Set the number of batches of the next step that count as processed."""
        whole("GradientAccumulationWrapper.set_step: step", step, least=0)
        self._at = step % self._config.num_steps
