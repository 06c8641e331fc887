"""Row updates: files that are whole, in order, and hold the rows of a quantization of the whole."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recsys.distributed.checkpoint import CheckpointError, save_checkpoint
from recsys.inference import read_delta, write_delta, write_delta_between
from recsys.inference.packages.deltas import read_deltas
from recsys.kernels.quantize import quantize_rows
from recsys.kernels.quantized import row_bytes
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from tests.base.test_checksums import flip

ROWS, DIM = 50, 8
DTYPES = {"a": ("int8", 8), "b": ("int4", 4), "c": ("float16", 16)}


def version(folder: Path, rows: int = ROWS) -> Path:
    """A version with a manifest only."""
    folder.mkdir(parents=True)
    tables = [
        {
            "name": name,
            "rows": rows,
            "dim": DIM,
            "dtype": dtype,
            "row_bytes": row_bytes(DIM, bits),
            "index": None,
        }
        for name, (dtype, bits) in DTYPES.items()
    ]
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "tables": tables}))
    return folder


def _rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def test_float_rows_equal_the_quantization_of_the_whole(tmp_path: Path) -> None:
    folder, whole = version(tmp_path / "1"), _rows(ROWS)
    ids = torch.tensor([49, 0, 7], dtype=torch.int32)
    file = write_delta(folder, {name: (ids, whole[ids.long()].double()) for name in DTYPES})
    assert file == folder / "deltas" / "000000000001.delta"
    found = read_delta(file)
    for name, (_, bits) in DTYPES.items():
        assert found.tables[name][0].tolist() == [0, 7, 49]
        assert torch.equal(found.tables[name][1], quantize_rows(whole, bits)[[0, 7, 49]])
    quantized = quantize_rows(whole, 8)
    file = write_delta(folder, {"a": (torch.arange(ROWS), quantized), "b": (ids[:0], whole[:0])})
    found = read_delta(file)
    assert found.sequence == 2
    assert torch.equal(found.tables["a"][1], quantized)
    assert found.tables["b"][1].shape == (0, row_bytes(DIM, 4))
    assert [delta.sequence for delta in read_deltas(folder)] == [1, 2]
    assert [delta.sequence for delta in read_deltas(folder, 1)] == [2]


def test_files_are_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    file = write_delta(version(tmp_path / "1"), {"a": (torch.tensor([3]), _rows(1))})
    found = safetensors.load_file(file)
    assert found["a.ids"].tolist() == [3]
    # float64: a value is q * scale + bias
    scale, bias = found["a.rows"][0, :4].copy().view(np.float16).astype(np.float64)
    values = found["a.rows"][0, 4:].astype(np.float64) * scale + bias
    error = np.abs(values - _rows(1)[0].double().numpy()).max()
    assert error < np.ptp(_rows(1).numpy()) / 255


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "one table or more"),
        ({"x": (torch.tensor([0]), _rows(1))}, r"tables of the .*'b', 'c'\]; rec"),
        ({"a": (torch.tensor([50]), _rows(1))}, "table 'a' must .*received 50"),
        ({"a": (torch.tensor([-1]), _rows(1))}, "from 0 to 49; received -1"),
        ({"a": (torch.tensor([3, 1, 3]), _rows(3))}, "must not repeat; received 3 twice"),
        ({"a": (torch.tensor([3.0]), _rows(1))}, "must be int64 or int32"),
        ({"a": (torch.tensor([3]), _rows(2))}, "or uint8 .*received torch.float32 of"),
        ({"a": (torch.tensor([3]), _rows(1).byte())}, r"received torch.uint8 of \[1, 8\]"),
        ({"a": (torch.tensor([3]), _rows(1).long())}, "received torch.int64"),
        ({"a": (torch.tensor([3]), _rows(1) / 0)}, "Table 'a': .* finite weights"),
    ],
)
def test_wrong_rows_are_refused(
    tmp_path: Path, tables: dict[str, tuple[Tensor, Tensor]], message: str
) -> None:
    folder = version(tmp_path / "1")
    with pytest.raises(ValueError, match=message):
        write_delta(folder, tables)
    assert not list(folder.glob("deltas/*"))
    with pytest.raises(FileNotFoundError, match=r"there is no manifest.json"):
        write_delta(tmp_path, tables)


def test_each_flipped_bit_is_refused(tmp_path: Path) -> None:
    file = write_delta(version(tmp_path / "1"), {"a": (torch.tensor([1, 3]), _rows(2))})
    for bit in range(8 * file.stat().st_size):
        flip(file, bit)
        with pytest.raises(ValueError, match=f"{file} is damaged: "):
            read_delta(file)
        flip(file, bit)
    data = file.read_bytes()
    for size in (0, 7, 20, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(ValueError, match="is damaged"):
            read_delta(file)


def test_gaps_repeats_and_other_bases_are_refused(tmp_path: Path) -> None:
    folder, other = version(tmp_path / "1"), version(tmp_path / "2", rows=9)
    first, second, third = (
        write_delta(folder, {"a": (torch.tensor([i]), _rows(1))}) for i in range(3)
    )
    foreign = write_delta(other, {"a": (torch.tensor([1]), _rows(1))})
    data = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=r"0002.delta must be named .* 000000000001.delta"):
        list(read_deltas(folder))
    second.unlink()
    for use in (
        lambda: list(read_deltas(folder)),
        lambda: write_delta(folder, {"a": (torch.tensor([1]), _rows(1))}),
    ):
        with pytest.raises(ValueError, match=r"deltas 1 to 3; 000000000002\.delta is"):
            use()
    second.write_bytes(data)
    assert len(list(read_deltas(folder))) == 3
    first.write_bytes(foreign.read_bytes())
    with pytest.raises(ValueError, match=r"must be a delta.*1, .*[0-9a-f]{64}"):
        read_delta(first)
    with pytest.raises(FileNotFoundError, match="must be a delta"):
        read_delta(third.with_name("000000000009.delta"))


def test_two_writers_take_turns(tmp_path: Path) -> None:
    folder = version(tmp_path / "1")

    def write(first: int) -> None:
        for i in range(10):
            write_delta(folder, {"a": (torch.tensor([first + i]), _rows(1))})

    threads = [threading.Thread(target=write, args=(10 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = [int(delta.tables["a"][0]) for delta in read_deltas(folder)]
    assert sorted(found) == list(range(30))


KILLED = """
import os, random, signal, sys, time
import torch
from recsys.inference import write_delta
from recsys.inference.packages.deltas import read_deltas
torch.set_num_threads(1)
folder, kills = sys.argv[1], int(sys.argv[2])
rng = random.Random(0)
rows = torch.randint(0, 256, (50, 12), dtype=torch.uint8)
for _ in range(kills):
    before = len(list(read_deltas(folder)))
    child = os.fork()
    if child == 0:
        while True:
            write_delta(folder, {"a": (torch.arange(50), rows)})
    time.sleep(rng.uniform(0.001, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(read_deltas(folder))) >= before
write_delta(folder, {"a": (torch.arange(50), rows)})
found = list(read_deltas(folder))
assert [delta.sequence for delta in found] == list(range(1, len(found) + 1))
assert all(torch.equal(delta.tables["a"][1], rows) for delta in found)
assert not [name for name in os.listdir(folder + "/deltas") if not name.endswith(".delta")]
print(len(found))
"""


def test_killed_writers_leave_whole_deltas(tmp_path: Path) -> None:
    folder = version(tmp_path / "1")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), "20"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1


class Model(nn.Module):
    """Three tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(ROWS, DIM, name, feature_names=[name]) for name in DTYPES]
        )
        self.over = nn.Linear(DIM, 1)


def test_differences_between_checkpoints(tmp_path: Path) -> None:
    folder, model = version(tmp_path / "1", rows=40), Model()
    save_checkpoint(tmp_path / "runs", model, step=1)
    weights = {name: bag.weight.data for name, bag in model.bags.embedding_bags.items()}
    weights["a"][3] += 1
    weights["a"][39, 2] = 5
    weights["a"][45] += 1  # not published
    weights["b"][7] = weights["b"][7].nextafter(torch.tensor(9.0))  # equal after quantization
    weights["c"][0] = 0
    save_checkpoint(tmp_path / "runs", model, step=2)
    before, after = tmp_path / "runs/step-1", tmp_path / "runs/step-2"
    file = write_delta_between(folder, before, after)
    assert file is not None
    found = read_delta(file).tables
    assert {name: ids.tolist() for name, (ids, _) in found.items()} == {"a": [3, 39], "c": [0]}
    for name, (ids, rows) in found.items():
        assert torch.equal(rows, quantize_rows(weights[name], DTYPES[name][1])[ids])
    assert write_delta_between(folder, after, after) is None
    model.over.bias.data += 1
    save_checkpoint(tmp_path / "runs", model, step=3)
    with pytest.warns(UserWarning, match=r"\['over\.bias'\] of 1 other"):
        assert write_delta_between(folder, after, tmp_path / "runs/step-3") is None
    save_checkpoint(tmp_path / "other", nn.Linear(2, 1))
    with (
        pytest.warns(UserWarning, match="other values"),
        pytest.raises(CheckpointError, match="must have one table 'a'"),
    ):
        write_delta_between(folder, after, tmp_path / "other")
    large = version(tmp_path / "3", rows=ROWS + 1)
    with pytest.raises(CheckpointError, match=r"must have 51 rows.*8 columns, or"):
        write_delta_between(large, after, after)
