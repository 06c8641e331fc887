"""GPU benchmarks on one device: fused lookups beside nn.EmbeddingBag, bandwidth, and a DLRM step.

    python -m benchmarks.gpu            # `make gpu` runs it after the GPU tests

Writes benchmarks/results/<gpu>.json. Contenders take turns in one process; times are of CUDA events
around `repeats` calls, medians of rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor

RESULTS = Path(__file__).parent / "results"
# Rows of the 26 tables of the Criteo Terabyte data, each capped at 10 million as MLPerf's DLRM
# benchmark does.
CRITEO_ROWS = [
    *(10_000_000, 36_084, 17_217, 7_378, 20_134, 3, 7_112, 1_442, 61, 9_758_201, 1_333_352),
    *(313_829, 10, 2_208, 11_156, 122, 4, 970, 14, 9_994_222, 7_267_859, 9_946_608, 415_421),
    *(12_420, 101, 36),
]


def time_in_turns(
    contenders: dict[str, Callable[[], Any]], rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Return per contender the milliseconds of one call, per round."""
    for run in contenders.values():
        for _ in range(3):
            run()
    result: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                run()
            end.record()
            torch.cuda.synchronize()
            result[name].append(begin.elapsed_time(end) / repeats)
    return result


def make_batch(rows: list[int], batch_size: int, pooling: int) -> KeyedJaggedTensor:
    generator = torch.Generator(device="cuda").manual_seed(0)
    values = [
        torch.randint(0, r, (batch_size * pooling,), device="cuda", generator=generator)
        for r in rows
    ]
    lengths = torch.full((len(rows) * batch_size,), pooling, dtype=torch.int32, device="cuda")
    return KeyedJaggedTensor(
        [f"f{i}" for i in range(len(rows))], torch.cat(values), lengths=lengths
    )


def fused_collection(rows: list[int], dim: int) -> EmbeddingBagCollection:
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(r, dim, f"t{i}", feature_names=[f"f{i}"]) for i, r in enumerate(rows)
        ],
        device=torch.device("cuda"),
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.01})
    return collection


def against_embedding_bags(dim: int, batch_size: int, rounds: int) -> dict[str, Any]:
    """Compare one fused collection with one nn.EmbeddingBag and a torch optimizer per table."""
    collection = fused_collection(CRITEO_ROWS, dim)
    batch = make_batch(CRITEO_ROWS, batch_size, pooling=1)
    bags = nn.ModuleList(
        nn.EmbeddingBag(r, dim, mode="sum", sparse=True, device="cuda") for r in CRITEO_ROWS
    )
    sgd = torch.optim.SGD(bags.parameters(), lr=0.01)
    parts = [(jt.values(), jt.offsets()[:-1].long()) for jt in batch.to_dict().values()]
    grad = torch.randn(batch_size, len(CRITEO_ROWS) * dim, device="cuda")

    def ours() -> None:
        collection(batch).values().backward(grad)

    def tables() -> None:
        out = torch.cat([bag(*part) for bag, part in zip(bags, parts, strict=True)], dim=1)
        out.backward(grad)
        sgd.step()
        sgd.zero_grad()

    times = time_in_turns({"ours": ours, "embedding_bags": tables}, rounds, repeats=10)
    return {
        "dim": dim,
        "batch_size": batch_size,
        "optimizer": "ours row-wise Adagrad, theirs SGD",
        **times,
    }


def bandwidth(dim: int, batch_size: int, pooling: int, rounds: int) -> dict[str, Any]:
    """Compare bytes per second of lookup and update with those of a copy of as many bytes."""
    rows = [1_000_000] * 26
    collection = fused_collection(rows, dim)
    batch = make_batch(rows, batch_size, pooling)
    num_ids = batch.values().numel()
    row_bytes = 4 * dim
    out_bytes = batch_size * len(rows) * row_bytes
    forward_bytes = num_ids * row_bytes + out_bytes
    backward_bytes = out_bytes + 2 * num_ids * row_bytes
    source = torch.empty(forward_bytes // 8, device="cuda")
    target = torch.empty_like(source)
    grad = torch.randn(batch_size, len(rows) * dim, device="cuda")

    def forward() -> None:
        with torch.no_grad():
            collection(batch)

    def both() -> None:
        collection(batch).values().backward(grad)

    times = time_in_turns(
        {"forward": forward, "both": both, "copy": lambda: target.copy_(source)}, rounds, 20
    )
    median = {name: statistics.median(values) for name, values in times.items()}
    backward_ms = median["both"] - median["forward"]
    return {
        "dim": dim,
        "batch_size": batch_size,
        "pooling": pooling,
        "copy_GBps": source.numel() * 8 / median["copy"] / 1e6,
        "forward_GBps": forward_bytes / median["forward"] / 1e6,
        "backward_GBps": backward_bytes / backward_ms / 1e6,
        "times_ms": times,
    }


def dlrm_step(batch_size: int, rounds: int) -> dict[str, Any]:
    """Compare a DLRM step under DistributedModelParallel with TorchRec's, on one rank."""
    import torch.distributed as dist

    from benchmarks import dlrm

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda")
    own = dlrm.shard_ours(dlrm.own_dlrm(), "table_wise", dlrm.MIX, device)
    contenders: dict[str, Callable[[], Any]] = {}
    dense = torch.randn(batch_size, dlrm.NUM_DENSE, device=device)
    labels = (torch.rand(batch_size, device=device) < 0.5).float()
    batch = dlrm.Batch(dense, dlrm.ids(batch_size, KeyedJaggedTensor).to(device), labels)
    own_step = dlrm.Step(own, dlrm.dense_parameters(own))
    contenders["ours"] = lambda: own_step(batch)
    try:
        from torchrec import KeyedJaggedTensor as PeerJagged
    except ImportError:
        pass
    else:
        peer = dlrm.peer_model("table_wise", device)
        peer_batch = dlrm.Batch(dense, dlrm.ids(batch_size, PeerJagged).to(device), labels)
        peer_step = dlrm.Step(peer, dlrm.dense_parameters(peer))
        contenders["peer"] = lambda: peer_step(peer_batch)
    times = time_in_turns(contenders, rounds, repeats=10)
    dist.destroy_process_group()
    return {"batch_size": batch_size, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device; torch sees none.")
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "against_embedding_bags": [
            against_embedding_bags(dim, 16_384, arguments.rounds) for dim in (64, 128)
        ],
        "bandwidth": [
            bandwidth(dim, 8_192, pooling, arguments.rounds)
            for dim in (64, 128)
            for pooling in (1, 20)
        ],
        "dlrm_step": [dlrm_step(size, arguments.rounds) for size in (8_192, 64)],
    }
    out = arguments.out or RESULTS / f"{name}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main()
