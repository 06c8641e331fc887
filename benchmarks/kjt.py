"""Host time of KeyedJaggedTensor at 26, 200 and 1,000 features, beside TorchRec where installed.

Run from the repository root; both are timed in one process, in turns:

    PYTHONPATH=. python benchmarks/kjt.py

Prints microseconds per call, the median ratio ours/peer of the rounds and its spread, and writes
benchmarks/results/kjt-cpu.json.
"""

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

import recsys.sparse as ours

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchrec
        import torchrec.sparse.jagged_tensor as peer
except ModuleNotFoundError:
    torchrec = peer = None

BATCH = 64
NUM_FEATURES = (26, 200, 1000)


def build_cases(api: ModuleType, num_features: int) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    keys = [f"feature_{i}" for i in range(num_features)]
    lengths = torch.randint(0, 3, (num_features * BATCH,), generator=generator)
    values = torch.randint(0, 100_000, (int(lengths.sum()),), generator=generator)
    order = list(range(num_features))
    random.Random(0).shuffle(order)
    half = num_features // 2

    def build() -> object:
        return api.KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)

    def build_sync() -> object:
        return api.KeyedJaggedTensor.from_lengths_sync(keys=keys, values=values, lengths=lengths)

    def read_all() -> None:
        for jt in build_sync().to_dict().values():
            jt.values()
            jt.lengths()

    fresh = build_sync
    left, right = build_sync().split([half, num_features - half])
    # Every case starts from a new object: both sides keep what they derive.
    return {
        "construct": build,
        "from_lengths_sync": build_sync,
        "permute": lambda: fresh().permute(order),
        "split in 2": lambda: fresh().split([half, num_features - half]),
        "split in F": lambda: fresh().split([1] * num_features),
        "concat of 2": lambda: api.KeyedJaggedTensor.concat([left, right]),
        "to_dict": lambda: fresh().to_dict(),
        "to_dict, read all": read_all,
    }


def time_us(function: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls * 1e6


def measure(rounds: int) -> list[dict[str, object]]:
    rows = []
    for num_features in NUM_FEATURES:
        our_cases = build_cases(ours, num_features)
        peer_cases = build_cases(peer, num_features) if peer else {}
        for name, our_case in our_cases.items():
            peer_case = peer_cases.get(name)
            calls = max(3, int(20_000 / max(1.0, time_us(our_case, 3))))
            ours_us, peer_us = [], []
            for _ in range(rounds):
                ours_us.append(time_us(our_case, calls))
                if peer_case:
                    peer_us.append(time_us(peer_case, max(3, calls // 4)))
            row: dict[str, object] = {
                "case": f"{name} at {num_features} features",
                "ours_us": round(statistics.median(ours_us), 1),
            }
            line = f"{row['case']:38s} ours {row['ours_us']:9.1f} us"
            if peer_case:
                ratios = sorted(a / b for a, b in zip(ours_us, peer_us, strict=True))
                row["peer_us"] = round(statistics.median(peer_us), 1)
                row["ratio"] = round(statistics.median(ratios), 3)
                row["ratio_min"], row["ratio_max"] = round(ratios[0], 3), round(ratios[-1], 3)
                line += (
                    f"   peer {row['peer_us']:9.1f} us   ratio {row['ratio']:.2f}"
                    f" ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
                )
            print(line, flush=True)
            rows.append(row)
    return rows


def describe_machine() -> dict[str, object]:
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
        processor = models[0].split(":")[1].strip()
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchrec": torchrec.__version__ if torchrec else None,
        "garbage_collector": "on" if gc.isenabled() else "off",
        "batch": BATCH,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-gc", action="store_true", help="switch the garbage collector off")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "kjt-cpu.json"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.no_gc:
        gc.disable()
    machine = describe_machine()
    print(*(f"{name}: {value}" for name, value in machine.items()), sep="\n")
    results = measure(arguments.rounds)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
