"""The logger `recsys`, which adds the rank to messages.

Messages go to stderr while the root logger has no handlers; configure `logging` to send them
elsewhere.
"""

from __future__ import annotations

import logging
import sys

import torch.distributed as dist


class _Formatter(logging.Formatter):
    """Formatter that adds the rank in distributed jobs."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"[rank {dist.get_rank()}] {text}" if dist.is_initialized() else text


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler that writes to the current `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)


logger = logging.getLogger("recsys")
_handler = _Handler()
_handler.setFormatter(_Formatter())
logger.addHandler(_handler)
