"""Messages go to stderr with the rank, unless the user has configured logging."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys, torch.distributed as dist
from recsys.base.logs import logger
logger.warning("alone")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
logger.warning("a batch is %s", "late")
logging.getLogger("recsys.sparse").warning("of a child")
logging.basicConfig(stream=sys.stdout, format="mine: %(message)s")
logger.warning("once")
"""


def test_messages_begin_with_the_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=60
    )
    assert done.stderr.splitlines() == [
        "alone",
        "[rank 0] a batch is late",
        "[rank 0] of a child",
    ]
    assert done.stdout == "mine: once\n"


def test_they_reach_handlers_of_the_root_logger(caplog: pytest.LogCaptureFixture) -> None:
    from recsys.base.logs import logger

    logger.warning("received")
    assert caplog.messages == ["received"]
