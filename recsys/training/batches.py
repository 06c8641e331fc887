"""Batches of a training loader, with the position to resume from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, final

from recsys.base.loaders import begin_epoch
from recsys.base.logs import logger
from recsys.base.step_stages import long_section
from recsys.distributed.checkpoint import RandomState, Stateful


@final
class ResumableBatches:
    """Batches of a loader, epoch by epoch, that continue at a saved position.

    A pipeline reads batches ahead, so the position counts the batches that were trained on. A
    loader with `state_dict` and `load_state_dict` continues from its own state. Otherwise the first
    batches of the epoch are read again and skipped. Then the random generators of the process first
    return to their state at the start of the epoch, so that a loader that shuffles by them yields
    the same order.

    Args:
        loader: Any iterable of batches. `set_epoch` is called before each epoch, if the loader, its
            `sampler`, its `batch_sampler` or its `dataset` has it.
        is_saved: Function of a step number: whether the position after it may be saved. The state
            of the loader is recorded only there.

    Attributes:
        step: Number of batches that were trained on.
        epoch: Number of complete epochs.
        batch: Number of batches of the current epoch that were trained on.

    Example:
        >>> batches = ResumableBatches([10, 20, 30], is_saved=lambda step: True)
        >>> for batch in batches:
        ...     batches.trained()
        ...     if batch == 20:
        ...         break
        >>> resumed = ResumableBatches([10, 20, 30], is_saved=lambda step: True)
        >>> resumed.load_state_dict(batches.state_dict())
        >>> list(resumed)
        [30]
    """

    def __init__(self, loader: Iterable[Any], is_saved: Callable[[int], bool]) -> None:
        self._loader, self._is_saved = loader, is_saved
        self.step = self.epoch = self.batch = 0
        self._states: dict[int, Any] = {}  # of the loader, by step
        self._random: dict[str, Any] | None = None  # at the start of the epoch
        self._last: int | None = None  # step of the last batch of the epoch, once it is known
        self._restore_loader: Callable[[], None] | None = None

    @property
    def last_epoch(self) -> int:
        """Epoch of the last batch, from 1."""
        return max(1, self.epoch + (self.batch > 0))

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch.

        Raises:
            ValueError: The loader has fewer batches than were trained on before a resume.
        """
        if self._has_ended:
            return
        random = RandomState()
        now = random.state_dict()
        if self._random is None:
            self._random = now
        random.load_state_dict(self._random)
        begin_epoch(self._loader, self.epoch)
        num_skipped, restore = self.batch, self._restore_loader
        if restore is not None:
            restore()
            num_skipped, self._restore_loader = 0, None
        batches = iter(self._loader)
        with long_section("skipped batches"):
            read = sum(1 for _ in islice(batches, num_skipped))
        if read < num_skipped:
            raise ValueError(
                f"train must have the {num_skipped} batches of the epoch before the save; received "
                f"{read}. Resume with the same data and number of ranks."
            )
        if self._random is not now:
            random.load_state_dict(now)
        step = self.step
        for step, batch in enumerate(batches, start=self.step + 1):
            if isinstance(self._loader, Stateful) and self._is_saved(step):
                self._states[step] = self._loader.state_dict()
            yield batch
        self._last = step

    @property
    def _has_ended(self) -> bool:
        """True if this rank has no batch left in the epoch, and other ranks perhaps have."""
        return self._last is not None and self.step >= self._last

    def trained(self) -> None:
        """Count a batch."""
        self._states.pop(self.step, None)
        self.step += 1
        self.batch += 1

    def end_epoch(self) -> None:
        """Start the next epoch at the next iteration."""
        self.epoch, self.batch = self.epoch + 1, 0
        self._states, self._random, self._last = {}, None, None
        self._restore_loader = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank."""
        state = self._states.get(self.step)
        if state is None and self._has_ended and isinstance(self._loader, Stateful):
            state = self._loader.state_dict()  # other ranks perhaps have batches left
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batch": self.batch,
            "random": self._random,
            "loader": state,
            "has_ended": self._has_ended,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position."""
        self.step, self.epoch, self.batch = (state_dict[key] for key in ("step", "epoch", "batch"))
        self._random, state = state_dict["random"], state_dict["loader"]
        self._last = self.step if state_dict["has_ended"] else None
        if state is not None:
            self._states[self.step] = state
            self._restore_loader = lambda: self._loader.load_state_dict(state)  # type: ignore[attr-defined]
            if state_dict["has_ended"]:  # not iterated before the next epoch, and saved again
                self._restore_loader()

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from the positions of another number of ranks.

        Raises:
            ValueError: The position is within an epoch, and some ranks but not all had no batch
                left, of a loader without a state; or the loader saved a state of its own but has no
                `load_state_dicts`.
        """
        ended = [rank for rank, state in enumerate(states) if state["has_ended"]]
        loader_states = [state["loader"] for state in states]
        if 0 < len(ended) < len(states) and None in loader_states:
            raise ValueError(
                "All ranks must have batches left to resume within an epoch on another number of "
                f"ranks; received {len(states)} states, and none left on the ranks {ended}. Resume "
                f"on {len(states)} ranks."
            )
        has_ended = len(ended) == len(states)
        self.load_state_dict({**states[0], "random": None, "loader": None, "has_ended": has_ended})
        if has_ended:
            return
        if loader_states[0] is not None:
            load = getattr(self._loader, "load_state_dicts", None)
            if load is None:
                raise ValueError(
                    "train must have load_state_dicts(states) to resume within an epoch on another "
                    f"number of ranks; received a {type(self._loader).__name__} without it and "
                    f"the states of {len(states)} ranks. Resume on {len(states)} ranks."
                )
            load(loader_states)
            self._states[self.step] = self._loader.state_dict()  # type: ignore[attr-defined]
            self._restore_loader = lambda: load(loader_states)
        elif self.batch > 0:
            logger.warning(
                "Training resumes within an epoch that %d ranks began. Each rank skips %d batches: "
                "if the number of samples per step has changed, some samples of this epoch are "
                "repeated or left out.",
                len(states),
                self.batch,
            )


@final
class Pausing(Iterator[Any]):
    """Iterator that pauses after some steps, so that a pipeline trains on all it has read.

    At a pause it raises StopIteration once. Nothing is read ahead when training saves: neither ids
    that tables of hashed ids would insert, nor random numbers that a loader draws.

    Args:
        batches: Batches of an epoch.
        step: Number of steps before.
        pauses_after: Function of a step number: whether to pause after it.
        check: Function that raises for a wrong batch.

    Attributes:
        has_ended: True after the last batch.

    Example:
        >>> batches = Pausing([10, 20, 30], 0, lambda step: step == 2)
        >>> list(batches), list(batches), batches.has_ended
        ([10, 20], [30], True)
    """

    def __init__(
        self,
        batches: Iterable[Any],
        step: int = 0,
        pauses_after: Callable[[int], bool] = lambda step: False,
        check: Callable[[Any], None] = lambda batch: None,
    ) -> None:
        self._batches, self._step, self._pauses_after = iter(batches), step, pauses_after
        self._check = check
        self._is_due = self.has_ended = False

    def __next__(self) -> Any:
        """Return the next batch."""
        if self._is_due:
            self._is_due = False
            raise StopIteration
        try:
            batch = next(self._batches)
        except StopIteration:
            self.has_ended = True
            raise
        self._check(batch)
        self._step += 1
        self._is_due = self._pauses_after(self._step)
        return batch


def outputs(pipeline: Any, batches: Pausing) -> Iterator[tuple[Any, Any]]:
    """Yield the output and the batch of each step of a pipeline."""
    while not batches.has_ended:
        with suppress(StopIteration):  # at a pause, or at the end
            while True:
                yield pipeline.progress(batches)
