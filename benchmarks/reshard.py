"""What it costs to move tables to other ranks: MB/s beside a bare all-to-all, and a checkpoint.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.reshard --out result.json

The tables are those of `benchmarks.dlrm`, 26 of 100,000 x 64 with row-wise Adagrad. They go from
table_wise to row_wise and back, which moves every other byte to another rank. Beside it: an
all-to-all of as many bytes, in rounds of the same size, and a save and load by files.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from itertools import cycle

import torch
import torch.distributed as dist

from benchmarks import dlrm, ranks
from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.state.moves import ROUND_BYTES


def main() -> None:
    """Prints medians; writes all rounds."""
    arguments = ranks.begin(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    model = dlrm.shard_ours(dlrm.own_dlrm(), "table_wise", dlrm.MIX)
    world, tables = dist.get_world_size(), model.fused_optimizer
    plans = cycle(
        dlrm.our_plan(kind, dlrm.COLLECTION_PATH, dlrm.MIX, world)
        for kind in ("row_wise", "table_wise")
    )
    # of each rank's half of the tables, what is another's under the other plan
    own = dlrm.NUM_TABLES * dlrm.NUM_ROWS // world * (dlrm.DIM + 1) * 4
    leaves = own * (world - 1) // world
    sent, received = torch.ones(own, dtype=torch.uint8), torch.empty(own, dtype=torch.uint8)
    per_round = min(ROUND_BYTES // (world - 1), leaves // (world - 1))
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)

    def bare() -> None:
        sizes = [0 if rank == dist.get_rank() else per_round for rank in range(world)]
        for _ in range(-(-leaves // (per_round * (world - 1)))):
            out, into = sent[: sum(sizes)], received[: sum(sizes)]
            dist.all_to_all_single(into, out, sizes, sizes)
        received.copy_(sent)  # and every byte is put in its place once

    def by_files() -> None:
        save_checkpoint(folders[0], model, tables, keep=1)
        load_checkpoint(folders[0], model, tables)

    contenders = {
        "reshard": lambda: model.reshard(next(plans)),
        "bare": bare,
        "checkpoint": by_files,
    }
    times = ranks.measure(contenders, arguments.rounds, arguments.repeats)
    medians = {name: statistics.median(of_rounds) for name, of_rounds in times.items()}
    rates = {name: leaves / 1e3 / median for name, median in medians.items()}  # MB/s
    ranks.show("ms", times)
    if dist.get_rank() == 0:
        print(
            f"{leaves >> 20} MiB leave each rank: "
            + ", ".join(f"{name} {rate:.0f} MB/s" for name, rate in rates.items())
        )
    ranks.end({"times_ms": times, "bytes_per_rank": leaves, "mb_per_s": rates}, arguments.out)


if __name__ == "__main__":
    main()
