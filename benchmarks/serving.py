"""Servers of a package on loopback: Triton with the backend, and the usual alternatives.

    python -m benchmarks.serving --package runs/serving/models/movies

Compares, with the same program and one thread per operator: calls in this process (the floor),
Triton with the backend of recsys, Triton's Python backend, and FastAPI with uvicorn and JSON. The
clients are one C++ program, `serving_load.cpp`. Servers take turns `--rounds` times.

Two of them need packages in folders of their own, and are left out without:

    pip install --target .cache/fastapi fastapi 'uvicorn[standard]'
    pip install --target .cache/numpy1 'numpy<2'  # of Triton's Python backend

`--soak MINUTES` then loads Triton at 80% of its rate and watches its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving_calls import DTYPES, Arrays

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from serving.triton_server import HOST, find_server, free_ports, stop, triton_server

ROOT = Path(__file__).parents[1]
DATATYPES = {"float32": "FP32", "int64": "INT64"}
CASES = ((1, 1), (32, 1), (32, 32))
"""Clients, and rows of a request."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--triton", type=Path, default=ROOT / ".cache/triton")
    parser.add_argument("--predictor", type=Path, default=ROOT / "build/predictor")
    parser.add_argument("--fastapi", type=Path, default=ROOT / ".cache/fastapi")
    parser.add_argument("--numpy", type=Path, default=ROOT / ".cache/numpy1")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        results: dict[str, list[dict[str, Any]]] = {}
        for _ in range(options.rounds):
            for name, measure in bench.contestants().items():
                for (clients, rows), figures in zip(CASES, measure(), strict=True):
                    key = f"{clients} clients, {rows} rows: {name}"
                    results.setdefault(key, []).append(figures)
        for key in sorted(results):
            print(line_of(key, results[key]), flush=True)
        if options.soak > 0:
            bench.soak(options.soak)


def line_of(key: str, rounds: list[dict[str, Any]]) -> str:
    """Return medians over rounds."""
    rate = statistics.median(one["requests"] / one["seconds"] for one in rounds)
    p50, p99 = (statistics.median(one[p] for one in rounds) for p in ("p50", "p99"))
    errors = sum(one["errors"] for one in rounds)
    return f"{key:44} {rate:9.0f} requests/s, p50 {p50:8.0f} us, p99 {p99:8.0f} us, {errors} errors"


class Bench:
    """Files and programs that the measurements share."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        versions = (path for path in options.package.iterdir() if path.name.isdecimal())
        self.version = max(versions, key=lambda path: int(path.name)).resolve()
        self.manifest = json.loads((self.version / "manifest.json").read_text())
        self.library = (options.predictor / "librecsys_predictor.so").resolve()
        self.requests = {rows: random_request(self.manifest, rows) for rows in (1, 32)}
        self.dtypes = {name: array.dtype.name for name, array in self.requests[1].items()}
        self.load = folder / "serving_load"
        subprocess.run(
            [
                "g++", "-std=c++17", "-O2", str(ROOT / "benchmarks/serving_load.cpp"),
                "-o", str(self.load), f"-I{ROOT / 'recsys/inference/cpp'}", str(self.library),
                f"-Wl,-rpath,{self.library.parent}", "-Wl,--allow-shlib-undefined",
            ],
            check=True,
        )  # fmt: skip

    def contestants(self) -> dict[str, Any]:
        """The measurements that this machine can do, by name."""
        found = {"calls": self.calls, "Triton, recsys": self.triton}
        for name, measure, package in (
            ("Triton, Python", self.triton_python, self.options.numpy / "numpy"),
            ("FastAPI", self.fastapi, self.options.fastapi / "fastapi"),
        ):
            if package.is_dir():
                found[name] = measure
            else:
                print(f"{name} is left out: {package} is missing; see the docstring.")
        return found

    def run(self, *arguments: object) -> dict[str, Any]:
        seconds = self.options.seconds
        result = subprocess.run(
            [str(self.load), *map(str, arguments)],
            check=True, capture_output=True, text=True, timeout=seconds * 3 + 3600,
        )  # fmt: skip
        figures: dict[str, Any] = json.loads(result.stdout)
        return figures

    def calls(self) -> Iterator[dict[str, Any]]:
        """Call a predictor, with a runner per core, from a thread per client."""
        for clients, rows in CASES:
            path = self.folder / "tensors"
            path.write_bytes(tensor_file(self.requests[rows]))
            runners = min(clients, os.cpu_count() or 1)
            yield self.run("calls", self.version, path, clients, self.options.seconds, runners)

    def http(self, port: int, body: Any, rate: float = 0) -> Iterator[dict[str, Any]]:
        for clients, rows in CASES:
            path = self.folder / "request"
            path.write_bytes(body(self.requests[rows]))
            self.run("http", port, path, clients, 0.5)
            yield self.run("http", port, path, clients, self.options.seconds, rate)

    def triton(self) -> Iterator[dict[str, Any]]:
        with self.server("recsys", self.options.predictor / "backends") as server:
            yield from self.http(server.http_port, kserve_request)

    @contextlib.contextmanager
    def server(self, backend: str, backends: Path) -> Iterator[Any]:
        models = self.folder / f"models-{backend}"
        shutil.rmtree(models, ignore_errors=True)
        (models / "movies").mkdir(parents=True)
        config = (self.options.package / "config.pbtxt").read_text()
        lines = config.splitlines()
        lines[:2] = ['name: "movies"', f'backend: "{backend}"']
        (models / "movies/config.pbtxt").write_text("\n".join(lines) + "\n")
        version = models / "movies/1"
        if backend == "python":
            version.mkdir()
            shutil.copy(ROOT / "benchmarks/serving_model.py", version / "model.py")
        else:
            version.symlink_to(self.version)
        log = self.folder / "triton.log"
        with triton_server(find_server(self.options.triton), models, backends, log=log) as server:
            yield server

    def triton_python(self) -> Iterator[dict[str, Any]]:
        folder = self.options.triton.resolve() / "pytriton/tritonserver"
        backends = self.folder / "backends"
        shutil.rmtree(backends, ignore_errors=True)
        (backends / "python").mkdir(parents=True)
        for path in (folder / "backends/python").iterdir():
            (backends / "python" / path.name).symlink_to(path)
        stub = f"python_backend_stubs/{sys.version_info.major}.{sys.version_info.minor}"
        program = folder / stub / "triton_python_backend_stub"
        program.chmod(0o755)
        (backends / "python" / program.name).symlink_to(program)
        with (
            environment(self.variables(self.options.numpy)),
            self.server("python", backends) as server,
        ):
            yield from self.http(server.http_port, kserve_request)

    def variables(self, folder: Path) -> dict[str, str]:
        return {
            "LIBRARY": str(self.library),
            "VERSION": str(self.version),
            "DTYPES": json.dumps(self.dtypes),
            "PYTHONPATH": f"{ROOT}:{folder.resolve()}",
            "PACKAGES": str(folder.resolve()),
            "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR")),
        }

    def fastapi(self) -> Iterator[dict[str, Any]]:
        (port,) = free_ports(1)
        command = [
            sys.executable, "-m", "uvicorn", "benchmarks.serving_fastapi:app", "--host", HOST,
            "--port", str(port), "--no-access-log", "--log-level", "warning",
        ]  # fmt: skip
        process = subprocess.Popen(
            command, env={**os.environ, **self.variables(self.options.fastapi)}, cwd=ROOT
        )
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://{HOST}:{port}/ready", timeout=1).close()
                    break
                time.sleep(0.1)
            yield from self.http(port, json_request)
        finally:
            stop(process)

    def soak(self, minutes: float) -> None:
        """Load Triton at 80% of its rate; print its memory and errors ten times."""
        with self.server("recsys", self.options.predictor / "backends") as server:
            path = self.folder / "request"
            path.write_bytes(kserve_request(self.requests[1]))
            full = self.run("http", server.http_port, path, 32, 5)
            rate = 0.8 * full["requests"] / full["seconds"]
            for i in range(10):
                figures = self.run("http", server.http_port, path, 32, minutes * 6, rate)
                memory = memory_of(server.process.pid)
                print(line_of(f"soak {i + 1}/10, {memory:.1f} MiB", [figures]), flush=True)


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment for a while."""
    kept = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def memory_of(process: int) -> float:
    """Return the memory of a process alone, in MiB."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    fields = dict(line.split(":") for line in text.splitlines()[1:])
    return sum(int(fields[f"Private_{kind}"].split()[0]) for kind in ("Clean", "Dirty")) / 1024


def random_request(manifest: dict[str, Any], num_rows: int) -> Arrays:
    """Return a request for a package: random dense features, and 1 to 3 ids per bag."""
    random = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for one in manifest["inputs"]:
        if one["kind"] == "dense":
            shape = (num_rows, *one["shape"][1:])
            found[one["name"]] = random.standard_normal(shape).astype(one["dtype"])
            continue
        for feature in one["features"]:
            lengths = random.integers(1, 4, num_rows)
            ids = random.integers(0, feature["rows"] or 1000, lengths.sum())
            found |= {feature["tensor"]: ids, f"{feature['tensor']}.lengths": lengths}
            if one["weighted"]:
                found[f"{feature['tensor']}.weights"] = np.ones(len(ids), np.float32)
    return found


def http_post(path: str, headers: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def kserve_request(arrays: Arrays) -> bytes:
    """Return a request of KServe's protocol with binary tensors."""
    inputs = [
        {
            "name": name,
            "shape": array.shape,
            "datatype": DATATYPES[array.dtype.name],
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in arrays.items()
    ]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    data = b"".join(array.tobytes() for array in arrays.values())
    header = f"Inference-Header-Content-Length: {len(text)}\r\n"
    return http_post("/v2/models/movies/infer", header, text + data)


def json_request(arrays: Arrays) -> bytes:
    text = json.dumps({name: array.tolist() for name, array in arrays.items()})
    return http_post("/score", "Content-Type: application/json\r\n", text.encode())


def tensor_file(arrays: Arrays) -> bytes:
    """Return the file that serving_load.cpp reads."""
    numbers, blocks = [len(arrays)], []
    for name, array in arrays.items():
        dtype = DTYPES.index(array.dtype.name)
        numbers += [len(name.encode()), dtype, array.ndim, *array.shape, array.nbytes]
        blocks += [name.encode(), array.tobytes()]
    padded = b"".join(block + bytes(-len(block) % 8) for block in blocks)
    return struct.pack(f"<{len(numbers)}q", *numbers) + padded


if __name__ == "__main__":
    main()
