"""The current stage of this process, which its watchdog sends to other ranks."""

from __future__ import annotations

from time import monotonic
from typing import Any, final

from recsys.base.step_stages import Stage

_AFTER = {
    Stage.DATA: "the pipeline after data",
    Stage.OUTPUT_DIST: "the forward pass after output_dist",
    Stage.OPTIMIZER: "the loop between two steps (data, logs)",
}
"""Names of the code that runs after a stage. After other stages their own name stays."""

_BY_HOOKS = {Stage.TABLE_UPDATE, Stage.OPTIMIZER}
"""Stages without an end if they raise: hooks of torch report them."""


@final
class Position:
    """Observer that keeps the current stage.

    Another thread reads it. An exception does not change the position, which error messages name.

    Attributes:
        place: Name of the stage or of the code after it, the path of its module ("" for none), and
            the time of entering it (`monotonic`, in seconds). Replaced as a whole.
        waiting_for: Purpose of the exchange that the process waits for; "" while it does not wait.
        exchanges: Number of exchanges started. It is the same on every rank at the same place.
        long_section: Name of the long section that the process is in; "" outside.
    """

    def __init__(self) -> None:
        self.place = "the time before its first step", "", monotonic()
        self.waiting_for = self.long_section = ""
        self.exchanges = 0
        self._outer: list[tuple[str, str, str]] = []  # places, and long sections, to return to

    def enter(self, stage: Stage, subject: str) -> None:
        """Move to a stage."""
        if stage is Stage.WAIT:
            self.waiting_for = subject
            return
        if stage not in _BY_HOOKS:
            self._outer.append((*self.place[:2], self.long_section))
        if stage is Stage.LONG_SECTION:
            self.long_section = subject
            self._move(subject, "")
        else:
            self._move(stage.value, subject)

    def leave(self, stage: Stage, subject: str, *, failed: bool) -> None:
        """Move out of a stage: to the stage around it, or to the code after it."""
        if stage is Stage.WAIT:
            self.waiting_for = self.waiting_for if failed else ""
            return
        if stage not in _BY_HOOKS:
            outer, path, self.long_section = self._outer.pop()
            if failed:
                return
            if self._outer or stage is Stage.LONG_SECTION:
                self._move(outer, path)
                return
        if stage in _AFTER:
            self._move(_AFTER[stage], subject)

    def exchange_started(self, pending: Any) -> None:
        """Count an exchange."""
        self.exchanges += 1

    def exchange_finished(self, pending: Any) -> None:
        """Do nothing: `leave` records the end of the wait."""

    def _move(self, name: str, path: str) -> None:
        self.place = name, path, monotonic()
