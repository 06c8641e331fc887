"""After `forget`, neither a model nor its checkpoints and servers have the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys import DistributedModelParallel, EmbeddingBagCollection
from recsys.distributed.checkpoint import load_checkpoint, read_hashed_table, save_checkpoint
from recsys.distributed.checkpoint.versions import read_manifest
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType
from recsys.features import Categorical, FeatureSpec, Hashed, Ids
from recsys.features.text_hash import hash_texts
from recsys.inference import (
    Predictor,
    Publisher,
    package,
    quantize_embeddings,
    write_delta_between,
)
from recsys.inference.deletion import forget
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.hashed_ids import DistanceLFU, HashedIds
from recsys.optim import Adagrad, Adam, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import whole
from tests.ranks import RankPool

DIM = 8
USERS, ITEMS = [f"user {n}" for n in range(30)], [f"item {n}" for n in range(60)]


def _spec() -> FeatureSpec:
    columns = [Categorical("user"), Hashed("item", rows=256, growing=True)]
    return FeatureSpec(columns).fit({"user": USERS, "item": ITEMS[:30]})


def _ids(items: list[str]) -> list[int]:
    return list(hash_texts(pa.array(items, pa.large_string())).tolist())


class _Model(nn.Module):
    def __init__(self, spec: FeatureSpec, optimizer: Any = Adagrad) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=spec.tables(DIM))
        apply_optimizer_in_backward(optimizer, self.bags.parameters(), {"lr": 0.3})

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.bags(ids).values().sum(1)


def _train(model: nn.Module, spec: FeatureSpec, seed: int, steps: int = 4) -> None:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        users, items = random.choice(USERS, 40).tolist(), random.choice(ITEMS, 40).tolist()
        batch = spec.transform({"user": users, "item": items}).sparse_features
        model(batch).square().sum().backward()


def _rows(model: nn.Module, spec: FeatureSpec) -> dict[Any, list[float]]:
    """Weights and optimizer states by user, and by id of items; without free rows."""
    state = {name.rpartition("bags.")[2]: whole(v) for name, v in model.state_dict().items()}
    states = {
        name.split(".")[-2]: [whole(v).double() for v in of.values() if v.dim()]
        for name, of in model.fused_optimizer.state_dict()["state"].items()
    }
    rows = {}
    for table in ("user", "item"):
        columns = [state[f"{table}.weight"].double(), *states[table]]
        columns = [column.reshape(len(columns[0]), -1) for column in columns]
        rows[table] = torch.cat(columns, 1).tolist()
    names = spec.values_of("user", range(len(rows["user"]))).tolist()
    names[:2] = ["missing", "unknown"]
    ids, used = state["item.index.ids"], state["item.index.last_used"] > 0
    found = dict(zip(names, rows["user"], strict=True))
    return found | {int(ids[row]): rows["item"][row] for row in used.nonzero().flatten().tolist()}


KINDS = {
    "table_wise": (ShardingType.TABLE_WISE, ShardingType.TABLE_WISE),
    "row_wise": (ShardingType.ROW_WISE, ShardingType.ROW_WISE),
    "column_wise": (ShardingType.COLUMN_WISE, ShardingType.COLUMN_WISE),
    "data_parallel": (ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE),
}


def _sharded(model: _Model, kinds: tuple[ShardingType, ShardingType]) -> DistributedModelParallel:
    tables = EmbeddingModuleShardingPlan()
    for config, kind in zip(model.bags.embedding_bag_configs(), kinds, strict=True):
        owners = [1] if kind is ShardingType.TABLE_WISE else [0, 1]
        tables[config.name] = parameter_sharding(kind, config.num_embeddings, DIM, owners)
    return DistributedModelParallel(model, plan=ShardingPlan({"bags": tables}))


def _forget_on_ranks(kinds: tuple[ShardingType, ShardingType], folder: Path) -> None:
    spec = _spec()
    torch.manual_seed(0)
    model = _sharded(_Model(spec, Adam), kinds)
    _train(model, spec, dist.get_rank())
    save_checkpoint(folder, model, model.fused_optimizer, delta=True, keep=None)
    before = _rows(model, spec)
    known = [item for item in ITEMS[:20] if _ids([item])[0] in before]
    values = {"user": [*USERS[3:6], "nobody"], "item": [*ITEMS[:20], *ITEMS[:2], "nothing"]}
    other: dict[str, list[str]] = {"user": USERS[:1], "item": []}
    with pytest.raises(ValueError, match="equal on all ranks"):
        forget(model, other if dist.get_rank() == 0 else values, spec)
    assert _rows(model, spec) == before
    assert forget(model, values, spec) == {"user": 3, "item": len(known)}
    expected = {key: row for key, row in before.items() if key not in _ids(ITEMS[:20])}
    for user in USERS[3:6]:
        expected[user] = before["unknown"][:DIM] + [0.0] * (len(before["unknown"]) - DIM)
    assert _rows(model, spec) == expected
    assert forget(model, values, spec) == {"user": 3, "item": 0}
    save_checkpoint(folder, model, model.fused_optimizer, delta=True, keep=None)
    save_checkpoint(folder, model, model.fused_optimizer, keep=None)
    assert read_manifest(folder / "step-2").get("kind") == "delta"
    for version in ("step-2", "step-3"):
        torch.manual_seed(1)
        other_model = DistributedModelParallel(_Model(spec, Adam))
        load_checkpoint(folder / version, other_model, other_model.fused_optimizer)
        assert _rows(other_model, spec) == expected
        assert not set(read_hashed_table(folder / version, "item").ids.tolist()) & set(
            _ids(ITEMS[:20])
        )
    _train(model, spec, 7)  # forgotten items are new ones
    assert _ids(ITEMS[:1])[0] in _rows(model, spec)


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_rows_and_states_are_gone_on_all_ranks(
    ranks: RankPool, tmp_path: Path, kinds: tuple[ShardingType, ShardingType]
) -> None:
    ranks(2, _forget_on_ranks, kinds, tmp_path / "c")


@pytest.mark.filterwarnings("ignore:The checkpoint in:UserWarning")
@pytest.mark.filterwarnings("ignore:A delta updates rows of tables only:UserWarning")
def test_a_server_answers_as_for_unknown_values(tmp_path: Path) -> None:
    spec = _spec()
    model = _Model(spec)
    _train(model, spec, 0)
    example = {"user": USERS[:2], "item": ITEMS[:2]}
    version = package(
        quantize_embeddings(model.eval(), torch.float32), tmp_path / "m", example,
        spec=spec, programs=["torchscript"],
    )  # fmt: skip
    publisher = Publisher(model, version)
    request = {"user": [USERS[3], "nobody", USERS[8]], "item": ["new", "new", ITEMS[50]]}
    items = {"user": ["nobody"], "item": [ITEMS[4]]}
    with Predictor(version) as predictor:
        first = predictor(request)["output"]
        assert first[0] != first[1]
        known = predictor(items)["output"]
        forget(model, {"user": [USERS[3]], "item": [ITEMS[4]]}, spec)
        file = publisher.publish()
        assert file is not None
        predictor.apply(file)
        later = predictor(request)["output"]
        assert later[0] == later[1] == first[1]
        assert later[2] == first[2]
        assert predictor(items)["output"] != known
        wanted = model(spec.transform(items).sparse_features).item()
        np.testing.assert_allclose(predictor(items)["output"], wanted, rtol=1e-6)
    publisher.close()
    later = _Model(spec.forget({"user": [USERS[3]]}))
    with pytest.raises(ValueError, match="must be of the fit of the model; rows of"):
        Publisher(later, version)
    save_checkpoint(tmp_path / "before", model)
    wider = _Model(spec.extend({"user": ["a", "b"], "item": ITEMS[:2]}).spec)
    save_checkpoint(tmp_path / "after", wider)
    with pytest.raises(ValueError, match="after must be of the fit of before; rows"):
        write_delta_between(version, tmp_path / "before", tmp_path / "after")


@pytest.mark.filterwarnings("ignore:The checkpoint in:UserWarning")
def test_rows_on_the_disk_are_gone(tmp_path: Path) -> None:
    rules = HashedIds(overflow=str(tmp_path / "rows"), eviction=DistanceLFU())
    table = EmbeddingBagConfig(64, 4, "t", feature_names=["f"], ids=rules)
    model = EmbeddingBagCollection(tables=[table])
    apply_optimizer_in_backward(Adagrad, model.parameters(), {"lr": 0.3})
    ids = torch.arange(400) * 2**40 + 12345
    for batch in ids.split(20):
        keyed = KeyedJaggedTensor(["f"], batch, lengths=torch.ones(len(batch), dtype=torch.long))
        model(keyed).values().sum().backward()
    removed = set(ids[::3].tolist())
    save_checkpoint(tmp_path / "before", model)
    before = set(read_hashed_table(tmp_path / "before", "t").ids.tolist())
    rows = model.embedding_bags["t"].index.pairs()[0].tolist()
    assert len(removed & before - set(rows)) > 50
    count = forget(model, {"t": ids[::3]})["t"]
    save_checkpoint(tmp_path / "c", model)
    found = set(read_hashed_table(tmp_path / "c", "t").ids.tolist())
    assert found == before - removed
    assert count == len(removed & set(rows))
    folders = (tmp_path / "rows", tmp_path / "c")
    data = [file.read_bytes() for folder in folders for file in folder.rglob("*.rows")]
    assert len(data) > 1
    for value in removed & before:
        assert not any(value.to_bytes(8, "little") in of_file for of_file in data)


def test_what_cannot_be_forgotten_is_an_error() -> None:
    columns = [Categorical("u"), Hashed("shared", rows=9), Ids("row", rows=5)]
    columns.append(Hashed("h", rows=64, growing=True))
    spec = FeatureSpec(columns).fit({"u": [1, 2], "shared": [1, 2], "row": [0, 1], "h": ["a", "b"]})
    model = EmbeddingBagCollection(tables=spec.tables(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for values, error, match in (
        ({"x": [1]}, KeyError, "received 'x'"),
        ({"row": [1]}, KeyError, "received 'row'"),
        ({"shared": [1]}, ValueError, "share 9 rows"),
        ({"u": ["1"]}, TypeError, r"values\['u'\] must be numbers"),
        ({"u": [True]}, TypeError, "received True"),
        ({"u": [1.0]}, TypeError, "received 1.0"),
        ({"u": 1}, TypeError, "a list of values"),
        ({"h": "ab"}, TypeError, "a list of values"),
        ({"h": [7]}, TypeError, "must be texts"),
        ([1], TypeError, "a dict of values by table"),
    ):
        with pytest.raises(error, match=match):
            forget(model, values, spec)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another fit"):
        forget(model, {"u": [1]}, FeatureSpec(columns[:1]).fit({"u": [1, 3]}))
    with pytest.raises(KeyError, match="no rank has"):
        forget(EmbeddingBagCollection(tables=spec.tables(4)[3:]), {"u": [1]}, spec)
    with pytest.raises(ValueError, match="has no hashed ids"):
        forget(model, {"u": [1]})
    assert forget(model, {"u": [None, 9], "h": []}, spec) == {"u": 0, "h": 0}  # type: ignore[list-item]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert forget(model, {"u": np.array([2, 1])}, spec) == {"u": 2}


def test_unsigned_ids_keep_their_bits() -> None:
    rules = HashedIds()
    model = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(64, 4, "t", feature_names=["f"], ids=rules)]
    )
    apply_optimizer_in_backward(Adagrad, model.parameters(), {"lr": 0.3})
    batch = KeyedJaggedTensor(["f"], torch.tensor([-3, 0]), lengths=torch.tensor([2]))
    model(batch).values().sum().backward()
    assert forget(model, {"t": [2**64 - 3]}) == {"t": 1}
    assert model.embedding_bags["t"].index.pairs()[0].tolist() == [0]


def test_ids_whose_time_has_ended_are_gone() -> None:
    table = EmbeddingBagConfig(64, 4, "t", feature_names=["f"], ids=HashedIds(ttl=1))
    model = EmbeddingBagCollection(tables=[table])
    apply_optimizer_in_backward(Adagrad, model.parameters(), {"lr": 0.3})
    for number in (2**60 + 5, *[7] * 8):
        batch = KeyedJaggedTensor(["f"], torch.tensor([number]), lengths=torch.tensor([1]))
        model(batch).values().sum().backward()
    index = model.embedding_bags["t"].index
    assert 2**60 + 5 in index.ids.tolist()
    assert forget(model, {"t": [2**60 + 5]}) == {"t": 1}
    assert 2**60 + 5 not in index.ids.tolist()
