"""GPU benchmarks on one device: lookups beside FBGEMM alone, nn.EmbeddingBag and a copy; steps.

    python -m benchmarks.gpu              # `make gpu` runs it after the GPU tests; some ten minutes
    python -m benchmarks.gpu --smoke      # all of it, tiny, on a CPU: its figures mean nothing

Writes benchmarks/results/<gpu>.json, and a plot beside it where matplotlib is installed. Contenders
take turns in one process; times are of CUDA events around calls with one batch after the other of
eight, so that no cache holds what the next call reads. GB/s count each row that is read or
written, also one that comes up again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import dlrm
from examples.dlrm.graphed import graph_dense
from recsys.kernels import ops
from recsys.kernels.self_check import digest_of_kernels
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
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
NUM_BATCHES = 8
Call = Callable[[int], Any]  # with the number of a batch


@dataclass(frozen=True)
class Bench:
    """Where and how long it is measured; `smoke` stands for sizes that a CPU does in seconds."""

    device: torch.device
    rounds: int
    smoke: bool

    def rows(self, rows: list[int]) -> list[int]:
        """Return the rows of tables."""
        return [min(r, 1_000) for r in rows] if self.smoke else rows

    def batch_size(self, size: int) -> int:
        """Return the samples of a batch."""
        return min(size, 16) if self.smoke else size

    def in_turns(self, contenders: dict[str, Call], repeats: int) -> dict[str, list[float]]:
        """Return per contender the milliseconds of one call, per round."""
        for run in contenders.values():
            for batch in range(3):
                run(batch)
        result: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(self.rounds):
            for name, run in contenders.items():
                result[name].append(self._time(run, 1 if self.smoke else repeats))
        return result

    def _time(self, run: Call, repeats: int) -> float:
        if self.device.type == "cpu":
            began = time.perf_counter()
            for i in range(repeats):
                run(i % NUM_BATCHES)
            return 1e3 * (time.perf_counter() - began) / repeats
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(repeats):
            run(i % NUM_BATCHES)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / repeats

    def launches(self, step: Call) -> dict[str, float] | None:
        """Return kernels and copies of a step, and the share of time without any; None on a CPU."""
        if self.device.type == "cpu":
            step(0)
            return None
        steps = 5
        torch.cuda.synchronize()
        with torch.profiler.profile(acc_events=True) as seen:
            for i in range(steps):
                step(i % NUM_BATCHES)
            torch.cuda.synchronize()
        on_device = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        spans = sorted((e.time_range.start, e.time_range.end) for e in on_device)
        busy, until = 0.0, spans[0][0]
        for start, end in spans:
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        copies = sum(e.name.startswith(("Memcpy", "Memset")) for e in on_device)
        return {
            "kernels": (len(on_device) - copies) / steps,
            "copies": copies / steps,
            "idle": 1 - busy / (until - spans[0][0]),
        }


def make_batches(
    bench: Bench, rows: list[int], batch_size: int, pooling: int
) -> list[KeyedJaggedTensor]:
    """Return batches of ids drawn evenly."""
    generator = torch.Generator(device=bench.device).manual_seed(0)
    keys = [f"f{i}" for i in range(len(rows))]
    size = batch_size * pooling
    lengths = torch.full((len(rows) * batch_size,), pooling, dtype=torch.int32).to(bench.device)
    return [
        KeyedJaggedTensor(
            keys,
            torch.cat(
                [
                    torch.randint(0, r, (size,), device=bench.device, generator=generator)
                    for r in rows
                ]
            ),
            lengths=lengths,
        )
        for _ in range(NUM_BATCHES)
    ]


def collection_of(
    rows: list[int], dim: int, device: torch.device, *, pooled: bool = True
) -> nn.Module:
    """Build an unsharded collection that updates itself in backward."""
    config, kind = (
        (EmbeddingBagConfig, EmbeddingBagCollection)
        if pooled
        else (EmbeddingConfig, EmbeddingCollection)
    )
    tables = [config(r, dim, f"t{i}", feature_names=[f"f{i}"]) for i, r in enumerate(rows)]
    collection = kind(tables=tables, device=device)
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.01})
    return collection


def fbgemm_of(rows: list[int], dim: int, device: torch.device, *, pooled: bool) -> nn.Module | None:
    """Build FBGEMM's own module, or nothing where it is not installed."""
    try:
        from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
    except ImportError:
        return None
    on_cpu = device.type == "cpu"
    place = common.EmbeddingLocation.HOST if on_cpu else common.EmbeddingLocation.DEVICE
    compute = training.ComputeDevice.CPU if on_cpu else training.ComputeDevice.CUDA
    return training.SplitTableBatchedEmbeddingBagsCodegen(  # type: ignore[no-any-return]
        [(r, dim, place, compute) for r in rows],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        pooling_mode=common.PoolingMode.SUM if pooled else common.PoolingMode.NONE,
        bounds_check_mode=common.BoundsCheckMode.NONE,
        device=device,
    )


def against_embedding_bags(bench: Bench, dim: int, batch_size: int) -> dict[str, Any]:
    """Compare one fused collection with one nn.EmbeddingBag and a torch optimizer per table."""
    rows, batch_size = bench.rows(CRITEO_ROWS), bench.batch_size(batch_size)
    collection = collection_of(rows, dim, bench.device)
    batches = make_batches(bench, rows, batch_size, pooling=1)
    bags = nn.ModuleList(
        nn.EmbeddingBag(r, dim, mode="sum", sparse=True, device=bench.device) for r in rows
    )
    sgd = torch.optim.SGD(bags.parameters(), lr=0.01)
    parts = [
        [(jt.values(), jt.offsets()[:-1].long()) for jt in batch.to_dict().values()]
        for batch in batches
    ]
    grad = torch.randn(batch_size, len(rows) * dim, device=bench.device)

    def ours(i: int) -> None:
        collection(batches[i]).values().backward(grad)

    def tables(i: int) -> None:
        out = torch.cat([bag(*part) for bag, part in zip(bags, parts[i], strict=True)], dim=1)
        out.backward(grad)
        sgd.step()
        sgd.zero_grad()

    times = bench.in_turns({"ours": ours, "embedding_bags": tables}, repeats=8)
    return {
        "dim": dim,
        "batch_size": batch_size,
        "optimizer": "ours row-wise Adagrad, theirs SGD",
        "times_ms": times,
    }


def bandwidth(bench: Bench, dim: int, batch_size: int, pooling: int, kind: str) -> dict[str, Any]:
    """Compare bytes per second of lookup and update with FBGEMM's, and with a copy's."""
    pooled = kind == "pooled"
    rows, batch_size = bench.rows([1_000_000] * 26), bench.batch_size(batch_size)
    batches = make_batches(bench, rows, batch_size, pooling)
    num_ids, row_bytes = batches[0].values().numel(), 4 * dim
    num_rows_out = batch_size * len(rows) if pooled else num_ids
    forward_bytes = (num_ids + num_rows_out) * row_bytes
    backward_bytes = (num_rows_out + 2 * num_ids) * row_bytes
    source = torch.empty(forward_bytes // 8, device=bench.device)
    target = torch.empty_like(source)
    shape = (batch_size, len(rows) * dim) if pooled else (num_ids, dim)
    grad = torch.randn(shape, device=bench.device)
    contenders: dict[str, Call] = {"copy": lambda i: target.copy_(source)}

    def add(name: str, look_up: Callable[[int], list[Tensor]]) -> None:
        def forward(i: int) -> None:
            with torch.no_grad():
                look_up(i)

        grads = grad.split([part.shape[0] for part in look_up(0)])
        contenders[f"{name} forward"] = forward
        contenders[f"{name} both"] = lambda i: torch.autograd.backward(look_up(i), grads)

    ours = collection_of(rows, dim, bench.device, pooled=pooled)
    if pooled:
        add("ours", lambda i: [ours(batches[i]).values()])
    else:
        add("ours", lambda i: [jt.values() for jt in ours(batches[i]).values()])
    alone = fbgemm_of(rows, dim, bench.device, pooled=pooled)
    if alone is not None:
        offsets = batches[0].offsets().long()
        add("fbgemm", lambda i: [alone(batches[i].values(), offsets)])
    times = bench.in_turns(contenders, repeats=16)
    median = {name: statistics.median(values) for name, values in times.items()}
    copy_rate = source.numel() * 8 / median["copy"]
    shares = {}
    for name in ("ours", "fbgemm"):
        if f"{name} both" in median:
            forward, both = median[f"{name} forward"], median[f"{name} both"]
            shares[name] = {
                "forward": forward_bytes / forward / copy_rate,
                "backward": backward_bytes / max(both - forward, 1e-9) / copy_rate,
            }
    return {
        "kind": kind,
        "dim": dim,
        "batch_size": batch_size,
        "pooling": pooling,
        "copy_GBps": copy_rate / 1e6,
        "share_of_copy": shares,
        "times_ms": times,
    }


def offsets(bench: Bench, num_bags: int) -> dict[str, Any]:
    """Compare the running sum of lengths with FBGEMM's and PyTorch's."""
    lengths = torch.randint(0, 5, (num_bags,), dtype=torch.int32, device=bench.device)
    contenders: dict[str, Call] = {
        "ours": lambda i: ops.complete_cumsum(lengths),
        "torch": lambda i: nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
    }
    if bench.device.type in ops.FBGEMM_DEVICES:
        kernel = torch.ops.fbgemm.asynchronous_complete_cumsum
        contenders["fbgemm"] = lambda i: kernel(lengths)
    return {"bags": num_bags, "times_ms": bench.in_turns(contenders, repeats=64)}


def dlrm_step(bench: Bench, plan: str, batch_size: int) -> dict[str, Any]:
    """Compare a DLRM step with one whose dense parts are CUDA graphs, and with TorchRec's."""
    batch_size = bench.batch_size(batch_size)

    def step_of(model: nn.Module, features: Any) -> Call:
        lengths = torch.ones(dlrm.NUM_TABLES * batch_size, dtype=torch.int32)
        batches = [
            dlrm.Batch(
                torch.randn(batch_size, dlrm.NUM_DENSE, device=bench.device),
                features(
                    keys=dlrm.FEATURES,
                    values=torch.randint(0, dlrm.NUM_ROWS, (lengths.numel(),)),
                    lengths=lengths,
                ).to(bench.device),
                (torch.rand(batch_size, device=bench.device) < 0.5).float(),
            )
            for _ in range(NUM_BATCHES)
        ]
        step = dlrm.Step(model, dlrm.dense_parameters(model))
        return lambda i: step(batches[i])

    own = dlrm.shard_ours(dlrm.own_dlrm(), plan, dlrm.MIX, bench.device)
    contenders = {"ours": step_of(own, KeyedJaggedTensor)}
    if bench.device.type == "cuda":
        train = dlrm.own_dlrm()
        graphed = dlrm.shard_ours(train, plan, dlrm.MIX, bench.device)
        graph_dense(train.model, torch.zeros(batch_size, dlrm.NUM_DENSE, device=bench.device))
        contenders["ours, dense parts graphed"] = step_of(graphed, KeyedJaggedTensor)
    try:
        from torchrec import KeyedJaggedTensor as PeerJagged
    except ImportError:
        pass
    else:
        contenders["peer"] = step_of(dlrm.peer_model(plan, bench.device), PeerJagged)
    times = bench.in_turns(contenders, repeats=8)
    seen = {name: bench.launches(step) for name, step in contenders.items()}
    return {"plan": plan, "batch_size": batch_size, "times_ms": times, "on_device": seen}


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the shares of the copy's bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    bars = [
        (f"{case['kind']} {case['pooling']} x {case['dim']}\n{name} {way}", share)
        for case in result["bandwidth"]
        for name, ways in case["share_of_copy"].items()
        for way, share in ways.items()
    ]
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(bars) + 1))
    axes.barh([label for label, _ in bars][::-1], [share for _, share in bars][::-1])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"bytes per second, as a share of a copy's; {result['gpu']}")
    axes.tick_params(labelsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    """Run all, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU")
    arguments = parser.parse_args()
    if not (torch.cuda.is_available() or arguments.smoke):
        raise SystemExit("benchmarks.gpu needs a CUDA device; torch sees none.")
    if arguments.smoke:
        bench, gpu = Bench(torch.device("cpu"), 1, smoke=True), "none"
    else:
        bench = Bench(torch.device("cuda", 0), arguments.rounds, smoke=False)
        gpu = torch.cuda.get_device_name()
    backend = "gloo" if arguments.smoke else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    out = arguments.out or RESULTS / f"{gpu.lower().replace(' ', '-')}.json"
    out.parent.mkdir(exist_ok=True)
    result: dict[str, Any] = {"gpu": gpu, "torch": torch.__version__}
    if ops.HAS_TRITON:  # to copy to `self_check.COVERED`, as tests/kernels/test_self_check.py asks
        result |= {"triton": version("triton"), "kernels": digest_of_kernels()}
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "bandwidth": lambda: [
            bandwidth(bench, dim, 8_192, pooling, kind)
            for kind, pooling in (("pooled", 1), ("pooled", 20), ("sequence", 20))
            for dim in (64, 128)
        ],
        "offsets": lambda: [
            offsets(bench, 26 * bench.batch_size(size)) for size in (64, 8_192, 8_192 * 64)
        ],
        "dlrm_step": lambda: [
            dlrm_step(bench, plan, size) for plan in dlrm.PLANS for size in (8_192, 64)
        ],
        "against_embedding_bags": lambda: [
            against_embedding_bags(bench, dim, 16_384) for dim in (64, 128)
        ],
    }
    for name, measure in parts.items():
        try:
            result[name] = measure()
        except Exception as error:  # what the others found is kept
            result[name] = []
            result[f"{name} failed"] = f"{type(error).__name__}: {error}"
        out.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()
    print(out.read_text())
    try:
        plot(result, out.with_suffix(".png"))
    except ImportError:
        print("No plot: matplotlib is not installed.")
    failed = [text for name, text in result.items() if name.endswith("failed")]
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
