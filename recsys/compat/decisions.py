"""A record of what a user's own planner parts decide, by TorchRec's names."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field
from typing import Any

_LOG = logging.getLogger(__name__)


class DecisionCategory(enum.Enum):
    """What a decision is about: a cache's load factor, a kernel, a proposal."""

    CLF = "clf"
    KERNEL = "kernel"
    PROPOSER = "proposer"


@dataclass
class EMODecision:
    """A decision.

    Args:
        category: what it is about.
        description: in words.
        table_name: of the table, if it is about one.
        metadata: what else is to be known.
    """

    category: DecisionCategory
    description: str
    table_name: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class EMOSummary:
    """Decisions, in order."""

    decisions: list[EMODecision] = field(default_factory=list)

    def add(
        self,
        category: DecisionCategory,
        description: str,
        table_name: str | None = None,
        **metadata: Any,
    ) -> None:
        """Append a decision; see `EMODecision`."""
        self.decisions.append(EMODecision(category, description, table_name, metadata))

    def clear(self) -> None:
        """Forget all."""
        self.decisions.clear()


class EMOLogger:
    """Logs decisions, and keeps them; `get_logger` returns the one of this process."""

    def __init__(self) -> None:
        self._summary = EMOSummary()

    @staticmethod
    def get_instance() -> EMOLogger:
        """Return the logger of this process."""
        return _LOGGER

    def log(
        self,
        category: DecisionCategory,
        level: int,
        description: str,
        table_name: str | None = None,
        **metadata: Any,
    ) -> None:
        """Log a decision with a level of `logging`, and keep it; see `EMODecision`."""
        self._summary.add(category, description, table_name, **metadata)
        _LOG.log(level, "%s", self._summary.decisions[-1])

    def get_summary(self) -> EMOSummary:
        """Return the decisions that are kept."""
        return self._summary

    def reset(self) -> None:
        """Forget all decisions."""
        self._summary.clear()


_LOGGER = EMOLogger()
get_logger = EMOLogger.get_instance
log_emo_decision = _LOGGER.log
