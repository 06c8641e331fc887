"""Deltas of a model that trains: base and deltas equal the model, under any sharding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recsys import DistributedModelParallel
from recsys.distributed.checkpoint import save_checkpoint_async
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.sharding_plan import EmbeddingModuleShardingPlan
from recsys.distributed.types import ShardingPlan, ShardingType
from recsys.inference import Predictor, Publisher, package, quantize_embeddings
from recsys.inference import publisher as publisher_module
from recsys.inference.packages.deltas import read_deltas
from recsys.inference.packages.manifest import sha256_of
from recsys.kernels.hashed.index import geometry
from recsys.kernels.quantize import quantize_rows
from recsys.kernels.quantized import row_bytes
from recsys.modules.hashed_ids import AtLeast
from tests.distributed.cases import whole
from tests.inference.packages.test_indexes import Model, batch_of, check, new_model, trained
from tests.ranks import RankPool

DIM, ROWS = 8, {"users": 512, "films": 40}


def version_of(folder: Path) -> Path:
    """A version without a program, of the tables of `Model`; all rows are 0."""
    (folder / "tables").mkdir(parents=True)
    index = {
        "ids": "tables/i", "digests": "tables/d", "regions": geometry(512)[1], "seed": 0,
        "unknown": "zero",
    }  # fmt: skip
    sizes = {"tables/i": 8 * ROWS["users"], "tables/d": ROWS["users"]}
    tables = []
    for number, (name, rows) in enumerate(ROWS.items()):
        table = {"name": name, "rows": rows, "dim": DIM, "dtype": "int8", "features": []}
        table |= {"row_bytes": row_bytes(DIM, 8), "index": index if name == "users" else None}
        table |= {"file": f"tables/{name}.rows", "buffer": "b", "offset": number << 16}
        sizes[f"tables/{name}.rows"] = rows * row_bytes(DIM, 8)
        tables.append(table)
    files = {}
    for name, size in sizes.items():
        (folder / name).write_bytes(bytes(size))
        files[name] = {"bytes": size, "sha256": sha256_of(folder / name)}
    manifest: dict[str, Any] = dict.fromkeys(
        ("recsys", "torch", "fbgemm", "machine", "instruction_set"), ""
    )
    manifest |= {key: [] for key in ("programs", "inputs", "outputs", "columns")}
    manifest |= {"format": 1, "limits": {"max_rows": 1}, "files": files, "tables": tables}
    manifest["buffers"] = [{"name": "b", "bytes": 2 << 16}]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def applied(version: Path, base: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Rows of each table, then hashed ids and digests, after all deltas."""
    found = {name: [rows.clone()] for name, rows in base.items()}
    found["users"] += [torch.zeros(512, dtype=torch.int64), torch.zeros(512, dtype=torch.uint8)]
    for delta in read_deltas(version):
        for name, (rows, *values) in delta.tables.items():
            for target, value in zip(found[name], values, strict=True):
                target[rows] = value
    return found


def rows_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Quantized rows of a model, with zeros for ids without a row."""
    state = {name.split(".")[-2]: whole(v) for name, v in model.state_dict().items()
             if name.endswith("weight") and "over" not in name}  # fmt: skip
    state["users"][:: 512 // geometry(512)[1]] = 0
    return {name: quantize_rows(values.float(), 8) for name, values in state.items()}


TYPES = {
    "table_wise": (ShardingType.TABLE_WISE, ShardingType.TABLE_WISE),
    "row_wise": (ShardingType.ROW_WISE, ShardingType.ROW_WISE),
    "column_wise": (ShardingType.COLUMN_WISE, ShardingType.DATA_PARALLEL),
    "table_row_wise": (ShardingType.TABLE_ROW_WISE, ShardingType.COLUMN_WISE),
}


def _sharded(model: Model, kinds: tuple[ShardingType, ShardingType]) -> DistributedModelParallel:
    plan = {}
    for config, kind in zip(model.bags.embedding_bag_configs(), kinds, strict=True):
        owners = [0] if kind is ShardingType.TABLE_WISE else [0, 1]
        rows = config.num_embeddings
        plan[config.name] = parameter_sharding(kind, rows, DIM, owners, local_size=2)
    plans = ShardingPlan({"bags": EmbeddingModuleShardingPlan(plan)})
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plans)


def _publish(kinds: tuple[ShardingType, ShardingType], folder: Path) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    model = new_model(unknown="zero", admission=AtLeast(2))
    sharded = _sharded(model, kinds)
    base, version = _based(sharded, folder)
    publisher = Publisher(sharded, version, every=1e-6)
    for seed in range(30):
        sharded(batch_of(seed * world + rank)).sum().backward()
        publisher.step()
    publisher.publish()
    assert publisher.publish() is None
    publisher.close()
    wanted = rows_of(sharded)
    state = sharded.state_dict()
    ids, used = (whole(state[f"bags.embedding_bags.users.index.{n}"]) for n in ("ids", "last_used"))
    if rank == 0:
        found = applied(version, base)
        assert len(list(read_deltas(version))) > 5
        for name, rows in wanted.items():
            assert torch.equal(found[name][0], rows), name
        assert torch.equal(found["users"][2] > 0, used > 0)
        assert torch.equal(found["users"][1][used > 0], ids[used > 0])


@pytest.mark.parametrize("kinds", TYPES.values(), ids=TYPES)
def test_base_and_deltas_equal_the_sharded_model(
    ranks: RankPool, tmp_path: Path, kinds: tuple[ShardingType, ShardingType]
) -> None:
    ranks(2, _publish, kinds, tmp_path)


def test_a_predictor_follows_a_model_that_trains(tmp_path: Path) -> None:
    model = new_model()
    trained(model, range(3))
    quantized = quantize_embeddings(model)
    version = package(quantized, tmp_path / "m", [batch_of(0)], programs=["torchscript"])
    publisher = Publisher(model, version)
    predictor = Predictor(version)
    for last in range(4, 40, 4):
        trained(model, range(last, last + 4))
        file = publisher.publish()
        assert file is not None
        predictor.apply(file)
        check(predictor, quantize_embeddings(model))
    publisher.close()
    predictor.close()


def _fail_to_publish(folder: Path) -> None:
    """Rank 0 cannot write; all ranks raise, and the rows are part of the next delta."""
    rank = dist.get_rank()
    model = new_model(unknown="zero")
    sharded = _sharded(model, (ShardingType.ROW_WISE, ShardingType.ROW_WISE))
    base, version = _based(sharded, folder)
    with pytest.raises(ValueError, match="must have the table"):
        Publisher(sharded.module.over, version)
    publisher = Publisher(sharded, version)
    if rank == 0:
        (version / "deltas").write_text("not a folder")
    sharded(batch_of(rank)).sum().backward()
    with pytest.raises(Exception, match="deltas"):
        publisher.publish()
    if rank == 0:
        (version / "deltas").unlink()
    publisher.publish()
    publisher.close()
    wanted = rows_of(sharded)
    if rank == 0:
        assert torch.equal(applied(version, base)["users"][0], wanted["users"])


def _based(sharded: torch.nn.Module, folder: Path) -> tuple[dict[str, Tensor], Path]:
    """The rows of a model, and a version that rank 0 writes for it."""
    base, version = rows_of(sharded), folder / "1"
    if dist.get_rank() == 0:
        version_of(version)
    dist.barrier()
    return base, version


def _fail_to_copy(folder: Path) -> None:
    """One rank cannot copy its rows: all raise at once, and no row is lost."""
    rank = dist.get_rank()
    model = new_model(unknown="zero")
    sharded = _sharded(model, (ShardingType.ROW_WISE, ShardingType.ROW_WISE))
    base, version = _based(sharded, folder)
    publisher = Publisher(sharded, version)
    sharded(batch_of(rank)).sum().backward()
    copy = publisher_module._Source.copy
    failing = mock.Mock(side_effect=MemoryError("no room")) if rank == 1 else copy
    with (
        mock.patch.object(publisher_module._Source, "copy", failing),
        pytest.raises(Exception, match="no room"),
    ):
        publisher.publish()
    publisher.publish()
    publisher.close()
    wanted = rows_of(sharded)
    if rank == 0:
        assert torch.equal(applied(version, base)["users"][0], wanted["users"])


def test_rows_that_a_rank_cannot_copy_are_published_later(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, _fail_to_copy, tmp_path)


def _publish_and_save(folder: Path) -> None:
    """A thread saves while the training thread publishes; rounds of a few rows."""
    rank = dist.get_rank()
    model = new_model(unknown="zero")
    sharded = _sharded(model, (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE))
    base, version = _based(sharded, folder)
    publisher = Publisher(sharded, version, every=1e-6)
    with mock.patch.object(publisher_module, "_ROUND_BYTES", 500):
        for seed in range(40):
            sharded(batch_of(2 * seed + rank)).sum().backward()
            publisher.step()
            if seed % 3 == 0:
                pending = save_checkpoint_async(folder / "saved", sharded, sharded.fused_optimizer)
        publisher.publish()
    pending.wait()
    publisher.close()
    wanted = rows_of(sharded)
    if rank == 0:
        assert torch.equal(applied(version, base)["users"][0], wanted["users"])


def test_publishing_and_saving_at_the_same_time(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, _publish_and_save, tmp_path)


def test_rows_of_a_delta_that_cannot_be_written_are_published_later(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks(2, _fail_to_publish, tmp_path)


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from recsys.inference import Publisher
from recsys.inference.packages.deltas import read_deltas
from recsys.inference.packages.manifest import sha256_of
from tests.inference.test_publisher import applied, rows_of, version_of, new_model, batch_of
torch.set_num_threads(1)
rng, counts = random.Random(0), []
for kill in range(int(sys.argv[2])):
    torch.manual_seed(kill)
    model = new_model(unknown="zero")
    base, version = rows_of(model), version_of(Path(sys.argv[1], str(kill)))
    child = os.fork()
    if child == 0:
        publisher = Publisher(model, version)
        for seed in range(10_000):
            model(batch_of(seed)).sum().backward()
            publisher.publish()
    time.sleep(rng.uniform(0.02, 0.3))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    counts.append(len(list(read_deltas(version))))
    for seed in range(counts[-1]):
        model(batch_of(seed)).sum().backward()
    found = applied(version, base)
    for name, rows in rows_of(model).items():
        assert torch.equal(found[name][0], rows), (kill, counts, name)
print(sum(counts))
"""


def test_a_killed_publisher_leaves_the_state_of_a_step(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        Publisher(Model(), tmp_path)
    with pytest.raises(ValueError, match="every must be positive"):
        Publisher(Model(), tmp_path, every=0)
