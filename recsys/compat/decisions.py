"""Record of decisions of a user's planner components, under TorchRec's names."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field
from typing import Any

_LOG = logging.getLogger(__name__)


class DecisionCategory(enum.Enum):
    """Subject of a decision: a cache load factor, a compute kernel or a proposer."""

    CLF = "clf"
    KERNEL = "kernel"
    PROPOSER = "proposer"


@dataclass
class EMODecision:
    """A decision of a planner component.

    Args:
        category: Subject.
        description: Text for the log.
        table_name: Name of the table, if the decision concerns one table.
        metadata: Other values, by name.
    """

    category: DecisionCategory
    description: str
    table_name: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class EMOSummary:
    """Decisions in the order in which they were made."""

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
        """Remove all decisions."""
        self.decisions.clear()


class EMOLogger:
    """Logs and stores decisions. `get_logger` returns the logger of this process."""

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
        """Log a decision at a level of `logging` and store it; see `EMODecision`."""
        self._summary.add(category, description, table_name, **metadata)
        _LOG.log(level, "%s", self._summary.decisions[-1])

    def get_summary(self) -> EMOSummary:
        """Return the stored decisions."""
        return self._summary

    def reset(self) -> None:
        """Remove all stored decisions."""
        self._summary.clear()


_LOGGER = EMOLogger()
get_logger = EMOLogger.get_instance
log_emo_decision = _LOGGER.log
