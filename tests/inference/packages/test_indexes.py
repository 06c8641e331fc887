"""Packages of tables with hashed ids: servers give ids the rows that training gave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recsys.distributed.checkpoint import save_checkpoint
from recsys.inference import (
    Predictor,
    export_torchscript,
    inspect,
    package,
    quantize_embeddings,
    write_delta,
    write_delta_between,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.hashed_ids import AtLeast, HashedIds
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.inference.packages.test_writer import request_of

IDS = torch.tensor([-(2**63), -1, 0, 2**63 - 1])


class Model(nn.Module):
    """A collection with and without hashed ids, then a dense layer."""

    def __init__(self, device: str = "cpu", **rules: Any) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                512, 8, "users", feature_names=["user", "friend"], ids=HashedIds(**rules)
            ),
            EmbeddingBagConfig(40, 8, "films", feature_names=["film"]),
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device(device))
        self.over = nn.Linear(24, 2)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.over(self.bags(ids).values())


def batch_of(seed: int, rows: int = 16) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * rows,), generator=random)
    users = int(lengths[: 2 * rows].sum())
    near = torch.randint(-800, 800, (users,), generator=random) * 2**50
    near[::7] = IDS[torch.randint(0, 4, (len(near[::7]),), generator=random)]
    films = torch.randint(0, 40, (int(lengths.sum()) - users,), generator=random)
    return KeyedJaggedTensor(["user", "friend", "film"], torch.cat([near, films]), lengths=lengths)


def trained(model: nn.Module, seeds: range) -> None:
    model.train()
    for seed in seeds:
        model(batch_of(seed)).sum().backward()
    model.eval()


def new_model(**rules: Any) -> Model:
    model = Model(**rules)
    apply_optimizer_in_backward(torch.optim.Adagrad, model.bags.parameters(), {"lr": 0.3})
    return model


def check(predictor: Predictor, model: nn.Module) -> None:
    for seed in range(100, 105):
        batch = batch_of(seed)
        wanted = model(batch).detach()
        found = predictor(request_of(batch))["output"]
        torch.testing.assert_close(torch.from_numpy(found), wanted)


RULES = [{}, {"unknown": "zero"}, {"ttl": 3, "seed": -5}, {"admission": AtLeast(2)}]


@pytest.mark.parametrize("rules", RULES, ids=range(len(RULES)))
def test_a_package_equals_the_trained_model(tmp_path: Path, rules: dict[str, Any]) -> None:
    model = new_model(**rules)
    trained(model, range(20))
    quantized = quantize_embeddings(model, torch.float32)
    for seed in range(100, 105):
        assert torch.equal(quantized(batch_of(seed)), model(batch_of(seed)))
    version = package(quantized, tmp_path / "m", [batch_of(0)], programs=["torchscript"])
    with Predictor(version) as predictor:
        check(predictor, model)
    assert "input user: ids\n" in inspect(version)


@pytest.mark.filterwarnings("ignore:The checkpoint in:UserWarning")
def test_deltas_bring_new_ids_and_take_old_ones(tmp_path: Path) -> None:
    """Rows of one delta, and of the difference of two checkpoints, equal a new package."""
    model = new_model(unknown="zero")
    trained(model, range(5))
    versions = [tmp_path / name / "1" for name in ("rows", "between")]
    for version in versions:
        quantized = quantize_embeddings(model, torch.int8)
        package(quantized, version.parent, [batch_of(0)], programs=["torchscript"])
    save_checkpoint(tmp_path / "saved", model, step=1)
    trained(model, range(5, 40))
    assert model.bags.embedding_bags["users"].index.stats().evicted > 0
    save_checkpoint(tmp_path / "saved", model, step=2)
    model.over.load_state_dict(quantized.over.state_dict())  # a delta has rows only
    wanted = quantize_embeddings(model, torch.int8)
    index = wanted.bags.indexes.table("users")
    weights = {name: table.weight.detach() for name, table in model.bags.embedding_bags.items()}
    weights["users"][index.shared_rows()] = 0
    write_delta(versions[0], {
        "users": (torch.arange(512), weights["users"], index.ids, index.last_used > 0),
        "films": (torch.arange(40), weights["films"]),
    })  # fmt: skip
    write_delta_between(versions[1], tmp_path / "saved/step-1", tmp_path / "saved/step-2")
    for version in versions:
        with Predictor(version) as predictor:
            assert predictor.sequence == 1
            check(predictor, wanted)


@pytest.mark.filterwarnings("ignore:The checkpoint in:UserWarning")
def test_a_checkpoint_is_quantized_with_its_ids(tmp_path: Path) -> None:
    model = new_model()
    trained(model, range(20))
    save_checkpoint(tmp_path, model)
    found = quantize_embeddings(Model(device="meta"), torch.float32, checkpoint=tmp_path)
    for seed in range(100, 103):
        assert torch.equal(found(batch_of(seed)), model(batch_of(seed)))


def test_ids_are_returned_as_they_were_given() -> None:
    config = EmbeddingConfig(300, 8, "users", feature_names=["user"], ids=HashedIds())
    rows = quantize_embeddings(EmbeddingCollection(tables=[config], need_indices=True))
    batch = KeyedJaggedTensor(["user"], IDS, lengths=torch.ones(4, dtype=torch.int64))
    assert torch.equal(rows(batch)["user"].weights(), IDS)


def test_changes_of_hashed_tables_have_their_ids(tmp_path: Path) -> None:
    model = new_model()
    trained(model, range(3))
    quantized = quantize_embeddings(model, torch.int8)
    version = package(quantized, tmp_path / "m", [batch_of(0)], programs=["torchscript"])
    rows, values, ids = torch.arange(2), torch.ones(2, 8), torch.tensor([3, 4])
    with pytest.raises(ValueError, match="hashed ids and their use"):
        write_delta(version, {"users": (rows, values)})
    with pytest.raises(ValueError, match=r"'films' must have row numbers.*hashed ids"):
        write_delta(version, {"films": (rows, values, ids, ids > 0)})
    with pytest.raises(ValueError, match="hashed ids in other rows"):
        write_delta(version, {"users": (rows + 200, values, ids, ids > 0)})


class Renamed(Model):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return super().forward(ids.with_values(ids.values() * 31 % 40))


def test_models_whose_ids_servers_cannot_map_are_refused(tmp_path: Path) -> None:
    batch = batch_of(0)
    model = quantize_embeddings(Renamed())
    with pytest.raises(ValueError, match="must be inputs of the model"):
        package(model, tmp_path / "m", [batch])
    model = quantize_embeddings(Model())
    with pytest.raises(ValueError, match="must be int64"):
        package(model, tmp_path / "m", [batch.with_values(batch.values().int())])
    with pytest.raises(ValueError, match=r"Write a package by recsys\.inference\.package"):
        export_torchscript(model, tmp_path / "m.pt", [batch])
    twice = [
        EmbeddingBagConfig(64, 8, name, feature_names=["user"], ids=HashedIds()) for name in "ab"
    ]
    with pytest.raises(ValueError, match=r"'user' of .*be read by one"):
        quantize_embeddings(EmbeddingBagCollection(tables=twice))
