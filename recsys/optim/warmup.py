"""Learning rate schedules in stages, such as a warm-up."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, final

import torch
from torch import Tensor

from recsys.base.arguments import MissingKeyError, choice, finite, whole
from recsys.base.checked import checked
from recsys.optim.keyed import KeyedOptimizer, OptimizerWrapper


class WarmupPolicy(enum.Enum):
    """Factor of the learning rate as a function of the step `i` (from 0).

    `value`, `max_iters`, `decay_iters` and so on are fields of the `WarmupStage`.
    """

    NONE = "none"
    """1."""
    LINEAR = "linear"
    """From `value` at step 0 to 1 at `max_iters`."""
    CONSTANT = "constant"
    """`value`."""
    POLY = "poly"
    """`(1 - i / decay_iters) ** value`; `decay_iters` is `max_iters` if not given."""
    STEP = "step"
    """`value ** (i // decay_iters)`; `decay_iters` is 1 if not given."""
    INVSQRT = "inv_sqrt"
    """`1 / sqrt(i)`."""
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"
    """From 1 to `value` along a cosine, with a restart every `sgdr_period` steps."""
    INTERPOLATE = "interpolate"
    """From `value` at `start_interpolating_iters` to `end_value` at `max_iters`."""


_LEAST_NUMBERS = {
    "max_iters": 1,
    "decay_iters": -1,
    "sgdr_period": 1,
    "start_interpolating_iters": 0,
}


@final
@dataclass
class WarmupStage:
    """One stage of a schedule.

    Args:
        policy: The policy, or its name, such as "linear".
        max_iters: The last step of the stage, counted from the start of training.
        value: See the policy.
        lr_scale: Another factor of the learning rate.
        decay_iters: See the policy; -1 for its default.
        sgdr_period: See the policy.
        start_interpolating_iters: See the policy.
        end_value: See the policy.

    Raises:
        ValueError: If the policy is unknown, a setting of the policy is missing or not positive, or
            a number is infinite or NaN.
        TypeError: If a setting is not a number, or not an integer.

    Example:
        >>> WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.5).factor(2)
        0.75
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None

    def __post_init__(self) -> None:
        self.policy = choice("WarmupStage.policy", self.policy, WarmupPolicy)
        for each in fields(self):
            value, subject = getattr(self, each.name), f"WarmupStage.{each.name}"
            if value is None and each.default is None:
                continue
            if each.name in _LEAST_NUMBERS:
                setattr(self, each.name, whole(subject, value, _LEAST_NUMBERS[each.name]))
            elif each.name != "policy":
                setattr(self, each.name, finite(subject, value))
        if self.policy is WarmupPolicy.INTERPOLATE:
            if self.start_interpolating_iters is None or self.end_value is None:
                raise ValueError(
                    "WarmupPolicy.INTERPOLATE needs start_interpolating_iters and end_value; "
                    f"received {self.start_interpolating_iters} and {self.end_value}."
                )
            if self.start_interpolating_iters >= self.max_iters:
                raise ValueError(
                    "start_interpolating_iters must be smaller than max_iters; received "
                    f"{self.start_interpolating_iters} and {self.max_iters}."
                )
        if self.decay_iters == 0:
            raise ValueError("WarmupStage.decay_iters must be positive, or -1; received 0.")

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate.

        Args:
            step: Number of previous steps.
        """
        return self.lr_scale * self._factor(whole("WarmupStage.factor: step", step, least=0))

    def _factor(self, step: int) -> float:
        value = self.value
        match self.policy:
            case WarmupPolicy.NONE:
                return 1.0
            case WarmupPolicy.LINEAR:
                return value + (1.0 - value) * step / self.max_iters
            case WarmupPolicy.CONSTANT:
                return value
            case WarmupPolicy.POLY:
                over = self.max_iters if self.decay_iters == -1 else self.decay_iters
                return float((1.0 - step / over) ** value)
            case WarmupPolicy.STEP:
                return float(value ** (step // max(self.decay_iters, 1)))
            case WarmupPolicy.INVSQRT:
                return 1.0 / math.sqrt(max(step, 1))
            case WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
                turn = math.pi * (step % self.sgdr_period) / self.sgdr_period
                return value + (1.0 - value) * (1.0 + math.cos(turn)) / 2.0
            case WarmupPolicy.INTERPOLATE:
                assert self.start_interpolating_iters is not None
                assert self.end_value is not None
                start = self.start_interpolating_iters
                share = (step - start) / (self.max_iters - start)
                return value + (self.end_value - value) * share


@final
class WarmupOptimizer(OptimizerWrapper):
    """Wrapper that sets the learning rate of an optimizer before each step, in stages.

    After the last stage the rate is `lr`. The state dict contains the number of steps under the
    name `param_name`, so training resumes at the same step.

    Args:
        optimizer: The optimizer to wrap. All groups get the same rate. Tables that are updated in
            backward use it from the next backward pass on.
        stages: The stages, by ascending `max_iters`.
        lr: The learning rate, which stages multiply by their factors.
        lr_param: Name of the setting to change.
        param_name: Name of the progress in the state dict.

    Raises:
        ValueError: If the `max_iters` of the stages do not ascend from 1.

    Example:
        >>> from recsys.optim.keyed import KeyedOptimizerWrapper
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> sgd = KeyedOptimizerWrapper({"w": weight}, lambda p: torch.optim.SGD(p, lr=0.1))
        >>> stage = WarmupStage(WarmupPolicy.LINEAR, max_iters=2, value=0.0)
        >>> optimizer, rates = WarmupOptimizer(sgd, [stage], lr=0.4), []
        >>> for _ in range(4):
        ...     rates.append(optimizer.param_groups[0]["lr"])
        ...     optimizer.step()
        >>> rates
        [0.0, 0.2, 0.4, 0.4]
    """

    @checked
    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Sequence[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        lr = finite("WarmupOptimizer.lr", lr, least=0)
        reached = 0
        for stage in stages:
            if stage.max_iters <= reached:
                raise ValueError(
                    "max_iters of warm-up stages must ascend from 1 on; received "
                    f"{[s.max_iters for s in stages]}."
                )
            reached = stage.max_iters
        super().__init__(optimizer)
        if param_name in self.params:
            raise ValueError(
                f"param_name must differ from the names of the parameters; received {param_name!r}."
            )
        self._stages = list(stages)
        self._lr = lr
        self._lr_param = lr_param
        self._param_name = param_name
        self._progress = torch.zeros(2, dtype=torch.int64)  # steps made, current stage
        self._set_rate()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer, and set the rate of the next step."""
        result = super().step(closure)
        self._progress[0] += 1
        self._set_rate()
        return result

    def _set_rate(self) -> None:
        done = int(self._progress[0])
        number = next(
            (i for i, s in enumerate(self._stages) if done <= s.max_iters), len(self._stages)
        )
        self._progress[1] = number
        factor = self._stages[number].factor(done) if number < len(self._stages) else 1.0
        for group in self.param_groups:
            group[self._lr_param] = self._lr * factor

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, and the progress."""
        result = self._optimizer.state_dict()
        result["state"] = {**result["state"], self._param_name: {"warmup": self._progress}}
        return result

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of the wrapped optimizer, and the progress.

        Raises:
            KeyError: If the state has no warm-up progress.
        """
        state = dict(state_dict["state"])
        if self._param_name not in state:
            raise MissingKeyError(
                f"The loaded state must hold the warm-up's progress as {self._param_name!r}; "
                f"received the names {sorted(state)[:10]}. To restart the warm-up, load the state "
                "into the wrapped optimizer."
            )
        progress: Tensor = state.pop(self._param_name)["warmup"]
        self._optimizer.load_state_dict({**state_dict, "state": state})
        with torch.no_grad():
            self._progress.copy_(progress)
        self._set_rate()

    def post_load_state_dict(self) -> None:
        """Set the rate of the loaded step."""
        super().post_load_state_dict()
        self._set_rate()
