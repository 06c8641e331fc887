"""Rows on the disk in checkpoints: damage, kills, loads that do not fit, and refusals."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recsys.distributed.checkpoint import (
    CheckpointError,
    export_safetensors,
    load_checkpoint,
    load_table,
    read_checkpoint,
    read_hashed_table,
    save_checkpoint,
    save_checkpoint_async,
)
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.plan_layout import layout_of_plan
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from recsys.distributed.types import ShardingEnv, ShardingType
from recsys.inference import Publisher, quantize_embeddings
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.hashed_ids import HashedIds
from recsys.optim import Adagrad
from tests.modules.ids.test_row_log import limit_of_files
from tests.modules.ids.test_row_store import (
    batch_of,
    collection,
    fill,
    indexes,
    read,
    train,
)


def sharded(folder: Path | None, **changes: Any) -> Any:
    return DistributedModelParallel(
        torch.nn.ModuleDict({"ebc": collection(folder, **changes)}),
        env=ShardingEnv.from_local(),
        device=torch.device("cpu"),
    )


def logs(model: Any) -> list[Any]:
    return [i.log for t in model.module["ebc"]._stages.tables.values() for i in t.indexes()]


@torch.no_grad()
def read_only(module: Any, batch: Any) -> torch.Tensor:
    return read(module, batch)


def filled(tmp_path: Path, **changes: Any) -> Any:
    model = sharded(tmp_path / "rows", **changes)
    draw = random.Random(0)
    for _ in range(60):
        train(model.module["ebc"], batch_of(draw, 900))
    assert min(map(len, logs(model))) > 100
    return model


def saved(tmp_path: Path) -> tuple[Any, Path]:
    model = filled(tmp_path)
    save_checkpoint(tmp_path / "c", model, model.fused_optimizer)
    return model, tmp_path / "c"


@pytest.mark.filterwarnings("ignore:.*lacks the optimizer state")
def test_an_unsharded_model_is_saved_and_loaded(tmp_path: Path) -> None:
    module, large = collection(tmp_path / "rows"), collection(None, 16_384)
    draw = fill(module)
    same = random.Random(0)
    for _ in range(60):
        train(large, batch_of(same, 900))
    save_checkpoint(tmp_path / "c", module)
    other = collection(tmp_path / "rows")
    load_checkpoint(tmp_path / "c", other)
    sizes = [len(index.log) for index in indexes(module)]
    assert [len(index.log) for index in indexes(other)] == sizes
    for one in (other, large):
        one.eval()
    for _ in range(10):
        batch = batch_of(draw, 900)
        assert torch.equal(read_only(other, batch), read_only(large, batch))


def test_pruning_removes_the_links_and_keeps_the_log(tmp_path: Path) -> None:
    model, path = saved(tmp_path)
    sizes = [len(log) for log in logs(model)]
    for step in (5, 6):
        save_checkpoint(path, model, model.fused_optimizer, keep=1, step=step)
        assert [version.name for version in path.iterdir()] == [f"step-{step}"]
    assert [len(log) for log in logs(model)] == sizes
    rows = [file for log in logs(model) for file in log.folder.iterdir()]
    assert {file.stat().st_nlink for file in rows} == {1}  # short files are copied
    manifest = json.loads((path / "step-6" / "manifest.json").read_text())["content"]
    assert sorted(manifest["overflow"]) == ["ebc.embedding_bags.ta.", "ebc.embedding_bags.tb."]
    assert manifest["files"].keys() <= {file.name for file in (path / "step-6").iterdir()}


@pytest.mark.parametrize("change", ["missing", "short", "bit", "live"])
def test_damaged_files_are_named(tmp_path: Path, change: str) -> None:
    _, path = saved(tmp_path)
    end = "live" if change == "live" else "rows"
    file = next(iter(sorted((path / "step-1").glob(f"*.{end}"))))
    data = bytearray(file.read_bytes())
    if change == "missing":
        file.unlink()
    elif change == "short":
        file.write_bytes(data[:-1])
    else:
        data[3] ^= 1
        file.write_bytes(data)
    message = f"{file.name} " + ("cannot be read" if change == "missing" else "is damaged")
    model = sharded(tmp_path / "rows")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, model, model.fused_optimizer)
    with pytest.raises(CheckpointError, match=message):
        _ = [read_hashed_table(path, name) for name in ("ta", "tb")]


def test_a_full_disk_keeps_the_last_version(tmp_path: Path) -> None:
    model, path = saved(tmp_path)
    with limit_of_files(1000), pytest.raises(CheckpointError, match="File too large"):
        save_checkpoint(path, model, model.fused_optimizer)
    assert [version.name for version in path.iterdir()] == ["step-1"]
    load_checkpoint(path, model, model.fused_optimizer)


# -- loads that do not fit -------------------------------------------------------------------------


def test_a_load_without_an_overflow_is_refused(tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    model = sharded(None)
    with pytest.raises(CheckpointError, match=r"rows of 'ebc\.embedding_bags\.ta' that were in"):
        load_checkpoint(path, model, model.fused_optimizer)
    load_checkpoint(path, model, model.fused_optimizer, allow_partial=True)


def test_a_load_with_another_optimizer_is_refused(tmp_path: Path) -> None:
    old, path = saved(tmp_path)
    model = sharded(tmp_path / "rows", optimizer=Adagrad)
    with pytest.raises(CheckpointError, match="optimizer"):
        load_checkpoint(path, model, model.fused_optimizer)
    load_checkpoint(path, model)  # the weights alone
    assert [len(log) for log in logs(model)] == [len(log) for log in logs(old)]
    for log, other in zip(logs(model), logs(old), strict=True):
        numbers = log._numbers._index
        ids = numbers.ids[numbers.last_used > 0]
        assert torch.equal(log.read(ids)[:, :16], other.read(ids)[:, :16])
        assert log.read(ids)[:, 16:].eq(0).all()


def test_an_overflow_can_be_added(tmp_path: Path) -> None:
    first = sharded(None)
    save_checkpoint(tmp_path / "c", first, first.fused_optimizer)
    model = filled(tmp_path)
    load_checkpoint(tmp_path / "c", model, model.fused_optimizer)
    assert [len(log) for log in logs(model)] == [0, 0]


# -- refusals --------------------------------------------------------------------------------------


def test_saves_of_parts_are_refused(tmp_path: Path) -> None:
    model = filled(tmp_path)
    for name in ("delta", "consolidated"):
        for save in (save_checkpoint, save_checkpoint_async):
            with pytest.raises(ValueError, match=rf"{name}=True needs all rows"):
                save(tmp_path / "c", model, **{name: True})
    with pytest.raises(ValueError, match=r"A state dict .*'ta' with \d+"):
        model.state_dict()


def test_moves_and_other_loads_are_refused(tmp_path: Path) -> None:
    model, path = saved(tmp_path)
    plan = construct_module_sharding_plan(
        collection(None),
        {"ta": table_wise(rank=0), "tb": table_wise(rank=0)},
        world_size=1,
        device_type="cpu",
    )
    with pytest.raises(ValueError, match=r"reshard needs .*'ta'.*new plan"):
        model.reshard({"ebc": plan})
    with pytest.raises(CheckpointError, match=r"resize needs all rows.*embedding_bags\.ta'"):
        load_checkpoint(path, model, model.fused_optimizer, resize="ta")
    with pytest.raises(ValueError, match=r"load_table needs all rows .* 'ta'"):
        load_table(model, "ta", np.ones((1, 4), np.float32), ids=np.arange(1))
    assert min(map(len, logs(model))) > 100


def test_consumers_of_changed_rows_are_refused(tmp_path: Path) -> None:
    model = filled(tmp_path)
    with pytest.raises(ValueError, match=r"A model to publish needs.*'ta'"):
        Publisher(model, tmp_path / "published")


def test_a_checkpoint_is_not_served_without_its_rows(tmp_path: Path) -> None:
    model, path = saved(tmp_path)
    with pytest.raises(CheckpointError, match="not support tables with Hashed"):
        export_safetensors(path, tmp_path / "f.safetensors")
    with pytest.raises((CheckpointError, ValueError), match=r"HashedIds\.overflow"):
        quantize_embeddings(torch.nn.ModuleDict({"ebc": collection(None)}), checkpoint=path)
    assert "ebc.embedding_bags.ta.weight" in read_checkpoint(path, "ta")
    assert len(read_hashed_table(path, "ta").ids) == 254 + len(logs(model)[0])


@pytest.mark.parametrize("kind", [ShardingType.COLUMN_WISE, ShardingType.GRID_SHARD])
def test_splits_of_columns_are_refused(kind: ShardingType) -> None:
    rules = HashedIds(overflow="/rows", num_regions=2)
    tables = [EmbeddingBagConfig(128, 8, "t", feature_names=["a"], ids=rules)]
    plan = {"t": parameter_sharding(kind, 128, 8, [0, 1], local_size=1)}
    message = r"'t' with rows on the disk must be table_wise, row_wise or table_row_wise; rec"
    with pytest.raises(ValueError, match=message):
        layout_of_plan(EmbeddingBagCollection(tables=tables), plan, 2, 1)


# -- kills -----------------------------------------------------------------------------------------

JOB = """
import random, sys
from pathlib import Path
from recsys.distributed.checkpoint import save_checkpoint
from tests.modules.ids.test_row_store import batch_of, collection, train
work, draw = Path(sys.argv[1]), random.Random(0)
module = collection(work / "rows")
for step in range(1, 10**6):
    train(module, batch_of(draw, 900))
    if step > 60:
        save_checkpoint(work / "c", module, step=step)
        print(step, flush=True)
"""


def test_killed_saves_leave_the_last_version(tmp_path: Path) -> None:
    """The killed job's rows on the disk are deleted by the next job."""
    draw = random.Random(0)
    for _ in range(3):
        path = tmp_path / "c"
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", JOB, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        ) as process:
            assert process.stdout is not None
            saved = [int(process.stdout.readline())]
            time.sleep(draw.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
            saved += [int(line) for line in process.stdout.read().split()]
        assert len(list((tmp_path / "rows").iterdir())) == 4
        module = collection(tmp_path / "rows")
        load_checkpoint(path, module)
        assert len(list((tmp_path / "rows").iterdir())) == 4
        [step] = {index.step for index in indexes(module)}
        assert step >= saved[-1]
        large, stream = collection(None, 16_384), random.Random(0)
        for _ in range(step):
            train(large, batch_of(stream, 900))
        for one in (module, large):
            one.eval()
        batch = batch_of(draw, 900, size=60)
        assert torch.equal(read_only(module, batch), read_only(large, batch))
        del module
        shutil.rmtree(path)
