"""The request to end a job, which the headers of batches exchange."""

from __future__ import annotations

from typing import final


@final
class Stop:
    """Request to end a job: all ranks see it at the same batch.

    Attributes:
        is_requested: Whether this rank was asked.
        is_agreed: Whether a header with the request of any rank was read.
    """

    def __init__(self) -> None:
        self.is_requested = self.is_agreed = False


stop = Stop()
"""The request of this process; `recsys.distributed.monitoring.preemption` sets it."""
