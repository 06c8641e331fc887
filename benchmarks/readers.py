"""Rate of the Parquet reader, beside bare decoding by pyarrow and Hugging Face datasets.

    python -m benchmarks.readers [--rows 400000] [--rounds 5] [--datasets FOLDER]
        [--out benchmarks/results/readers-cpu.json]

One file of prepared columns: 26 id lists of 0 to 5 ids (Zipf's law), 13 dense features, a label;
int32 ids, snappy, row groups of 65,536 rows. In each round every reader reads the file once, in
turns, so that other load on the machine affects all of them:

- floor: `pyarrow.parquet.ParquetFile.read_row_group` of all columns, by as many threads as the
  reader has workers (1 without workers).
- reader: `recsys.datasets.parquet`, batches of 1,024 rows, in order and shuffled. Also its CPU time
  relative to the CPU time of the floor, which other load affects less.
- Hugging Face: the same file as a `Dataset` in torch format, `iter(batch_size=1024)`; each batch
  becomes a KeyedJaggedTensor by `torch.cat` of the tensors of its bags. One tenth of the rows.

--datasets is a folder with the package `datasets` (pip install --target), if it is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys import datasets as recsys_datasets
from recsys.datasets.utils import Batch
from recsys.features import FeatureSpec, Ids, Label, Numeric
from recsys.sparse import KeyedJaggedTensor

NUM_LISTS, NUM_DENSE, MOST_IDS, TABLE_ROWS, BATCH = 26, 13, 5, 1_000_000, 1024
IDS = [f"list_{i}" for i in range(NUM_LISTS)]
DENSE = [f"dense_{i}" for i in range(NUM_DENSE)]


def write(path: Path, rows: int) -> None:
    """Write the file."""
    draw = np.random.default_rng(0)
    columns: dict[str, Any] = {}
    for name in IDS:
        lengths = draw.integers(0, MOST_IDS + 1, rows)
        offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        ids = draw.zipf(1.2, offsets[-1]) % TABLE_ROWS
        columns[name] = pa.ListArray.from_arrays(offsets, ids.astype(np.int32))
    for name in DENSE:
        columns[name] = draw.standard_normal(rows).astype(np.float32)
    columns["label"] = draw.integers(0, 2, rows).astype(np.float32)
    pq.write_table(pa.table(columns), path, row_group_size=1 << 16)


def spec_of() -> FeatureSpec:
    """Return the spec of the file."""
    columns = [
        *(Ids(name, rows=TABLE_ROWS, is_list=True) for name in IDS),
        *map(Numeric, DENSE),
        Label("label"),
    ]
    return FeatureSpec(columns).fit({name: [0.0] for name in DENSE})


def read_floor(path: Path, num_workers: int) -> int:
    """Decode all row groups, and return the number of rows."""
    count = pq.read_metadata(path).num_row_groups

    def read(first: int, step: int) -> int:
        file = pq.ParquetFile(path)
        groups = range(first, count, step)
        return sum(file.read_row_group(i, use_threads=False).num_rows for i in groups)

    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        parts = [pool.submit(read, i, max(1, num_workers)) for i in range(max(1, num_workers))]
        return sum(part.result() for part in parts)


def read_ours(path: Path, spec: FeatureSpec, num_workers: int, *, shuffle: bool) -> int:
    """Read all batches, and return the number of rows."""
    reader = recsys_datasets.parquet(path, spec, BATCH, num_workers=num_workers, shuffle=shuffle)
    return sum(len(batch.labels) for batch in reader)


def read_hugging_face(data: Any) -> int:
    """Read all batches of a `Dataset` in torch format, and return the number of rows."""
    rows = 0
    for columns in data.iter(batch_size=BATCH):
        bags = [bag for name in IDS for bag in columns[name]]
        lengths = torch.tensor([len(bag) for bag in bags])
        ids = KeyedJaggedTensor(IDS, torch.cat(bags).long(), lengths=lengths)
        dense = torch.stack([columns[name] for name in DENSE], 1)
        rows += len(Batch(dense, ids, columns["label"]).labels)
    return rows


def measure(read: Callable[[], int]) -> tuple[float, float]:
    """Return seconds and seconds of CPU time per million rows."""
    start, cpu = time.perf_counter(), time.process_time()
    rows = read()
    return (
        (time.perf_counter() - start) * 1e6 / rows,
        (time.process_time() - cpu) * 1e6 / rows,
    )


def main() -> None:
    """Measure, print the ratios and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--datasets", metavar="FOLDER")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.datasets:
        sys.path.append(arguments.datasets)
    try:
        import datasets as hugging_face
    except ImportError:
        hugging_face = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.parquet")
        write(path, arguments.rows)
        spec = spec_of()
        cases: dict[str, Callable[[], int]] = {}
        for workers in (0, 1, 2):
            cases[f"floor, {workers} workers"] = lambda n=workers: read_floor(path, n)
            for order in ("in order", "shuffled"):
                cases[f"reader {order}, {workers} workers"] = (
                    lambda n=workers, s=order == "shuffled": read_ours(path, spec, n, shuffle=s)
                )
        if hugging_face is not None:
            table = pq.read_table(path).slice(0, max(BATCH, arguments.rows // 10))
            data = hugging_face.Dataset(table.combine_chunks()).with_format("torch")
            cases["Hugging Face"] = lambda: read_hugging_face(data)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for _ in range(arguments.rounds + 1):
            for name, read in cases.items():
                times[name].append(measure(read))
    rounds = {name: found[1:] for name, found in times.items()}  # without the first
    result: dict[str, Any] = {
        "rows": arguments.rows,
        "rounds": arguments.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "pyarrow": pa.__version__,
        "datasets": getattr(hugging_face, "__version__", None),
        "seconds_per_million_rows": {
            name: [round(seconds, 3) for seconds, _ in found] for name, found in rounds.items()
        },
        "ratios": {},
    }
    for name, found in rounds.items():
        if name.startswith("floor"):
            continue
        workers = name.partition(", ")[2] or "0 workers"
        floor = rounds[f"floor, {workers}"]
        pairs = list(zip(found, floor, strict=True))
        ratios = {
            "time": statistics.median(one[0] / base[0] for one, base in pairs),
            "cpu": statistics.median(one[1] / base[1] for one, base in pairs),
        }
        result["ratios"][name] = {kind: round(value, 2) for kind, value in ratios.items()}
        print(
            f"{name:<32} {ratios['time']:6.2f} x the time of the floor, "
            f"{ratios['cpu']:6.2f} x its CPU time"
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
