"""Start of a script on one process or, by torchrun, on several; its result."""

import os
from collections.abc import Callable, Mapping

import torch.distributed as dist


def run(job: Callable[[], Mapping[str, float]]) -> None:
    """Initialize a process group under torchrun, run a job, and print its scores on rank 0.

    Args:
        job: returns the scores by name, without arguments.
    """
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    scores = job()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print({name: round(value, 4) for name, value in scores.items()})
    if dist.is_initialized():
        dist.destroy_process_group()
