"""Memory and time of `python -m recsys prepare` on text like the Criteo click logs.

    python -m benchmarks.prepare FOLDER [--gigabytes 10] [--files 5] [--workers 1]
        [--out benchmarks/results/prepare-cpu.json]

Writes TSV files to FOLDER/raw: a label, 13 counts with missing values, 26 categories of 8 hex
digits with missing values, in Zipf's distribution (exponent 1) over as many values as the columns
of the Kaggle release have (3 to 10,131,227). Then one process prepares them to FOLDER/prepared by
examples/dlrm/criteo_spec.py, with vocabularies of up to a million values. Its peak memory is the
largest resident set, as the kernel reports it. FOLDER stays; a second run uses the same raw files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from recsys.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME

SPEC = Path(__file__).parents[1] / "examples/dlrm/criteo_spec.py"
SIZES = [
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
]  # fmt: skip
"""Number of values of each category."""
CHUNK = 200_000


def chunk_of(draw: np.random.Generator) -> Any:
    """Return rows as an Arrow table."""
    columns: dict[str, Any] = {DEFAULT_LABEL_NAME: pa.array((draw.random(CHUNK) < 0.25) * 1)}
    for k, name in enumerate(DEFAULT_INT_NAMES):
        counts = np.exp(draw.normal(k % 5, 1.5, CHUNK)).astype(np.int64) - 1
        columns[name] = pa.array(counts, mask=draw.random(CHUNK) < (0.0, 0.2, 0.45)[k % 3])
    offsets = pa.py_buffer(np.arange(0, 8 * CHUNK + 1, 8, np.int32))
    for k, (name, size) in enumerate(zip(DEFAULT_CAT_NAMES, SIZES, strict=True)):
        ranks = ((size + 1) ** draw.random(CHUNK) - 1).astype(np.uint32)
        values = (ranks * np.uint32(2654435761) + np.uint32(k)).astype(">u4")  # odd: distinct
        digits = pa.py_buffer(values.tobytes().hex().encode())
        texts = pa.StringArray.from_buffers(CHUNK, offsets, digits)
        is_missing = pa.array(draw.random(CHUNK) < (0.0, 0.03, 0.45)[k % 3])
        columns[name] = pc.if_else(is_missing, None, texts)
    return pa.table(columns)


def write(folder: Path, num_bytes: int, num_files: int) -> None:
    """Write the raw files; a renamed folder is complete."""
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for number in range(num_files):
        draw = np.random.default_rng(number)
        with open(partial / f"day_{number}", "wb") as file:
            while file.tell() < num_bytes // num_files:
                csv.write_csv(chunk_of(draw), file, options)
    partial.rename(folder)


def run(raw: Path, prepared: Path, workers: int) -> dict[str, Any]:
    """Prepare the files in a process, and return its peak memory and time."""
    shutil.rmtree(prepared, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "recsys", "prepare", "--spec", str(SPEC), "--format", "tsv"),
        *("--input", f"{raw}/day_*", "--output", str(prepared), "--workers", str(workers)),
    ]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed.")
    files = [*prepared.glob("*.parquet")]
    return {
        "raw_gb": sum(path.stat().st_size for path in raw.iterdir()) / 1e9,
        "prepared_gb": sum(path.stat().st_size for path in files) / 1e9,
        "rows": int(text.split()[0].replace(",", "")),
        "peak_gb": usage.ru_maxrss * 1024 / 1e9,
        "minutes": (time.monotonic() - start) / 60,
        "cpu_minutes": (usage.ru_utime + usage.ru_stime) / 60,
    }


def main() -> None:
    """Write the files, prepare them and print memory and time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--files", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="of prepare (default: %(default)s)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    raw = options.folder / "raw"
    if not raw.exists():
        write(raw, int(options.gigabytes * 1e9), options.files)
    found = run(raw, options.folder / "prepared", options.workers)
    result = {name: round(value, 2) for name, value in found.items()}
    result |= {"cores": len(os.sched_getaffinity(0)), "pyarrow": pa.__version__}
    print(result)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
