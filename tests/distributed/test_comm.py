"""What the remaining ranks say when one is lost."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_RANK = """
import os, sys
import torch, torch.distributed as dist
from recsys.distributed import comm
from recsys.distributed.types import ShardingEnv

rank, lost, folder, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
store = dist.TCPStore("127.0.0.1", int(sys.argv[5]), is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
env = ShardingEnv.from_process_group(dist.group.WORLD)
comm.all_reduce(env, "warm up", torch.ones(3)).wait()
if rank == lost:
    os._exit(9)
try:
    if what == "all_reduce":
        comm.all_reduce(env, "add up numbers", torch.ones(3)).wait()
    else:
        comm.all_to_all(env, "send numbers", torch.ones(3), [1] * 3, [1] * 3).wait()
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("what", "lost"), [("all_reduce", 1), ("all_to_all", 0)])
def test_a_lost_rank_is_named_with_the_stage(tmp_path: Path, what: str, lost: int) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = [str(lost), str(tmp_path), what, str(store.port)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    stage = "add up numbers" if what == "all_reduce" else "send numbers"
    for rank, (out, err) in enumerate(said):
        if rank != lost:
            start = f"Rank {rank} of 3 lost contact with the others when the ranks were to {stage}."
            found = re.match(rf"{start} Nothing is heard of ranks? ([0-9, ]+): look for", out)
            assert found, (out, err)
            assert str(lost) in found[1].split(", ")
            assert str(rank) not in found[1].split(", ")
