"""State dicts of tables that share a storage, in tools that compare storages."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn

from recsys.inference import quantize_embeddings
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from recsys.modules.hashed_ids import HashedIds
from recsys.modules.tables.aliased_storage import detach_storage
from recsys.optim import RowWiseAdagrad
from recsys.sparse import KeyedJaggedTensor

SIZES = {"a": (20, 4), "b": (30, 8), "c": (5, 4)}


def bags(**settings: Any) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(rows, dim, name, feature_names=[f"f_{name}"], **settings)
        for name, (rows, dim) in SIZES.items()
    ]


def batch() -> KeyedJaggedTensor:
    keys = [f"f_{name}" for name in SIZES]
    return KeyedJaggedTensor(keys, torch.tensor([1, 2, 3, 4, 0, 1]), lengths=torch.ones(6).int())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bags": lambda: EmbeddingBagCollection(tables=bags()),
    "half": lambda: EmbeddingBagCollection(tables=bags(data_type=DataType.FP16)),
    "hashed": lambda: EmbeddingBagCollection(tables=bags(ids=HashedIds())),
    "fused": lambda: FusedEmbeddingBagCollection(bags(), RowWiseAdagrad, {"lr": 0.1}),
    "sequences": lambda: EmbeddingCollection(
        tables=[
            EmbeddingConfig(rows, 4, name, feature_names=[f"f_{name}"])
            for name, (rows, _) in SIZES.items()
        ]
    ),
    "dlrm": lambda: DLRM(
        EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(9, 4, n, feature_names=[f"f_{n}"]) for n in SIZES]
        ),
        2,
        [4],
        [1],
    ),
    "int8": lambda: quantize_embeddings(EmbeddingBagCollection(tables=bags()), torch.qint8),
    "int4": lambda: quantize_embeddings(EmbeddingBagCollection(tables=bags()), torch.quint4x2),
}


@pytest.mark.parametrize("name", MODELS)
def test_tools_that_compare_storages_save_all_tables(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = MODELS[name](), MODELS[name]()
    state = model.state_dict()
    storages = {  # as accelerate and transformers find tensors that are the same
        (t.device, t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
        for t in state.values()
    }
    assert len(storages) == len(state) >= 3
    save_model(model, str(tmp_path / "file"))
    stored = load_file(tmp_path / "file")
    assert stored.keys() == state.keys()
    assert all(torch.equal(stored[key], value) for key, value in state.items())
    assert load_model(other, tmp_path / "file") == (set(), [])
    assert all(torch.equal(other.state_dict()[key], value) for key, value in state.items())


def test_one_table_is_saved_without_the_others() -> None:
    table = EmbeddingBagCollection(tables=bags()).state_dict()["embedding_bags.c.weight"]
    file = io.BytesIO()
    torch.save(table, file)
    alone = io.BytesIO()
    torch.save(table.clone(), alone)
    assert file.tell() == alone.tell()


def test_a_state_dict_has_the_memory_of_the_tables() -> None:
    """`torch.distributed.checkpoint` loads into the tensors of a state dict."""
    model = EmbeddingBagCollection(tables=bags())
    before = model(batch()).values().detach().clone()
    lookups = model._lookups
    for value in model.state_dict().values():
        value.add_(1.0)
    after = model(batch()).values()
    torch.testing.assert_close(after, before + 1.0)
    assert model._lookups is lookups
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())


def test_a_state_dict_outlives_its_model() -> None:
    state = EmbeddingBagCollection(tables=bags()).state_dict()
    expected = {name: value.clone() for name, value in state.items()}
    [torch.full((20, 4), 7.0) for _ in range(100)]
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_shared_memory_stays_shared() -> None:
    model = EmbeddingBagCollection(tables=bags())
    model.share_memory()
    assert all(value.is_shared() for value in model.state_dict().values())


def _gradient() -> Tensor:
    return torch.zeros(4, requires_grad=True)[2:]


@pytest.mark.parametrize("tensor", [torch.zeros(4), torch.zeros(4, device="meta")[2:], _gradient()])
def test_tensors_that_stay(tensor: Tensor) -> None:
    state = {"w": tensor}
    detach_storage(state, "w")
    assert state["w"] is tensor
