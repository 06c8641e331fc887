"""The C++ core with a program of its own: requests, deltas and packages, and runs of sanitizers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.inference.packages.library import Library
from tests.inference.cpp import fake_package

SOURCE = Path(__file__).parent
MISSING = [name for name in ("cmake", "c++") if shutil.which(name) is None]
if not Path("/usr/include/openssl/evp.h").exists():
    MISSING.append("the headers of OpenSSL")

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the core is for Linux"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return fake_package.write(tmp_path / "fake" / "1")


HASHED = [*fake_package.HASHED.values(), 5, 2**62, -7]


def row_of(hashed_id: int) -> int:
    """The row of an id of table `h`; ids without a row read the first one."""
    return {one: row for row, one in fake_package.HASHED.items()}.get(hashed_id, 0)


def opened(library: Path, version: Path, **options: int) -> Library:
    return Library(library, version, options)


def tensors(**given: list[float] | list[int]) -> dict[str, torch.Tensor]:
    return {
        name.replace("_", "."): torch.tensor(
            values, dtype=torch.float32 if name in ("dense", "w_weights") else torch.int64
        )
        for name, values in given.items()
    }


@given(
    num_rows=st.lists(st.integers(0, 50), min_size=1, max_size=20), seed=st.integers(0, 2**32 - 1)
)
@settings(max_examples=100, deadline=None)
def test_merged_requests_equal_requests_one_by_one(
    library: Path, tmp_path_factory: pytest.TempPathFactory, num_rows: list[int], seed: int
) -> None:
    """Against plain Python; more than max_rows rows make several batches."""
    folder = tmp_path_factory.getbasetemp() / "merged" / "1"
    core = opened(library, folder if folder.exists() else fake_package.write(folder))
    random = np.random.default_rng(seed)
    limits = {"a": fake_package.ROWS, "b": fake_package.ROWS, "w": 100}
    requests, bags_of = [], []
    for count in num_rows:
        request = {"dense": torch.from_numpy(random.integers(-9, 10, (count, 2))).float()}
        bags = {
            name: [random.integers(0, limit, n).tolist() for n in random.integers(0, 5, count)]
            for name, limit in limits.items()
        }
        bags["h"] = [random.choice(HASHED, n).tolist() for n in random.integers(0, 5, count)]
        for name, lists in bags.items():
            request[name] = torch.tensor([*chain(*lists)], dtype=torch.int64)
            request[f"{name}.lengths"] = torch.tensor([*map(len, lists)], dtype=torch.int64)
        request["w.weights"] = torch.full((len(request["w"]),), 0.5)
        requests.append(request)
        bags_of.append(bags)
    merged = core.run(requests)
    for request, bags, found in zip(requests, bags_of, merged, strict=True):
        assert isinstance(found, dict)
        rows = zip(request["dense"].sum(1).tolist(), *bags.values(), strict=True)
        scores = [
            dense + sum(a) + 3 * sum(b) + sum(w) / 2 + 5 * sum(map(row_of, h))
            for dense, a, b, w, h in rows
        ]
        assert found["score"].flatten().tolist() == scores
        assert found["rows.lengths"].tolist() == [*map(len, bags["a"])]
        assert found["rows.values"][:, 0].tolist() == [*chain(*bags["a"])]
    core.close()


def test_a_table_above_the_limits_of_int32(library: Path, version: Path) -> None:
    """A sparse file of 16 GiB opens at once, without memory, and its last row is read."""
    rows, row_bytes = 2**31 + 8, fake_package.ROW_BYTES
    size = rows * row_bytes
    manifest = json.loads((version / "manifest.json").read_text())
    table, hashed = manifest["tables"]
    table["rows"] = manifest["inputs"][1]["features"][0]["rows"] = rows
    hashed["offset"] = -(-size // 65536) * 65536
    manifest["buffers"][0]["bytes"] = hashed["offset"] + 65536
    manifest["files"][table["file"]]["bytes"] = size
    (version / "manifest.json").write_text(json.dumps(manifest))
    with (version / table["file"]).open("r+b") as file:
        file.truncate(size)
        file.seek(size - row_bytes)
        file.write(bytes([200] * row_bytes))
    before, began = private_mib(), time.perf_counter()
    core = opened(library, version, verify_tables=0)
    assert time.perf_counter() - began < 0.5
    request = tensors(dense=[0.0, 0.0, 0.0, 0.0], a=[rows - 1, 3], a_lengths=[1, 1])
    request["dense"] = request["dense"].view(2, 2)
    [found] = core.run([request])
    assert isinstance(found, dict)
    assert found["score"].flatten().tolist() == [200.0, 3.0]
    request["a"][0] = rows
    [error] = core.run([request])
    assert f"Id {rows} at position 0 of feature 'a' must be from 0 to {rows - 1}." in str(error)
    core.update("t", torch.tensor([rows - 2]), torch.full((1, row_bytes), 7, dtype=torch.uint8))
    request["a"][0] = rows - 2
    [found] = core.run([request])
    assert isinstance(found, dict)
    assert found["score"].flatten().tolist() == [7.0, 3.0]
    assert private_mib() - before < 50
    core.close()


def private_mib() -> float:
    """Return the memory of this process alone."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    fields = dict(line.split(":") for line in lines)
    return sum(int(fields[f"Private_{kind}"].split()[0]) for kind in ("Clean", "Dirty")) / 1024


def test_libraries_without_values_are_refused(version: Path) -> None:
    with pytest.raises(ValueError, match=r"of this release; received libc\.so\.6 without"):
        opened(Path("libc.so.6"), version)


def score_of(core: Library) -> float:
    [found] = core.run([tensors(a=[0, 1])])
    assert isinstance(found, dict)
    return float(found["score"].sum())


FOLLOWER = """
import ctypes, sys, time
core, options, p = ctypes.CDLL(sys.argv[1]), (ctypes.c_int32 * 16)(), ctypes.c_void_p()
core.recsys_default_options(options)
options[4] = 1  # poll_ms
assert core.recsys_open(sys.argv[2].encode(), options, ctypes.byref(p)) == 0
print("open", flush=True)
time.sleep(60)
"""


def test_killed_followers_start_again_with_all_deltas(library: Path, version: Path) -> None:
    """A predictor that is killed while it applies deltas does not write to the version."""
    random = np.random.default_rng(0)
    expected = dict(enumerate(fake_package.TABLE[:, 0].tolist()))
    rows = [tensors(a=[row]) for row in expected]
    sequence = 0
    for _ in range(20):
        command = [sys.executable, "-c", FOLLOWER, str(library), str(version)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        for _ in range(random.integers(1, 20)):
            sequence += 1
            changed = dict(enumerate(random.integers(0, 200, 5).tolist()))
            fake_package.delta(version, sequence, changed)
            expected |= changed
        time.sleep(random.uniform(0, 0.005))
        child.kill()
        child.communicate(timeout=30)
    core = opened(library, version)
    assert core.sequence() == sequence
    found = core.run(rows)
    assert [float(one["score"]) for one in found if isinstance(one, dict)] == [*expected.values()]
    core.close()
    assert np.array_equal(
        np.fromfile(version / "tables/t.rows", np.uint8), fake_package.TABLE.ravel()
    )


def test_each_damaged_byte_of_a_delta_is_noticed(library: Path, version: Path) -> None:
    core = opened(library, version)
    good = fake_package.delta(version, 1, {0: 9})
    damaged = bytearray(good.read_bytes())
    for at in range(0, len(damaged), 7):
        damaged[at] ^= 1
        good.write_bytes(damaged)
        with pytest.raises(ValueError, match="delta"):
            core.apply(good)
        damaged[at] ^= 1
    assert core.sequence() == 0
    good.write_bytes(damaged)
    core.apply(good)
    core.close()


@pytest.mark.slow
def test_random_calls_under_address_sanitizer(build: Callable[[str], Path], version: Path) -> None:
    command = [build("fuzz"), version, "10000", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "answers" in done.stdout


@pytest.mark.slow
def test_threads_under_thread_sanitizer(
    build: Callable[[str], Path], version: Path, tmp_path: Path
) -> None:
    other = fake_package.write(tmp_path / "other" / "2")
    # ThreadSanitizer supports few layouts of memory
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    command = [*fixed, str(build("stress")), str(version), str(other), "300"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for sequence in range(1, 2000):
            if running.poll() is not None:
                break
            for folder in (version, other):
                hashed = {1 + (sequence * 7 + i) % 63: sequence % 4 + i for i in range(5)}
                fake_package.delta(folder, sequence, {4: sequence % 200}, hashed)
            time.sleep(0.01)
        printed, errors = running.communicate(timeout=280)
    finally:
        running.kill()
        running.communicate()
    assert running.returncode == 0, errors
    assert "1500 calls" in printed
    assert sequence > 5
