"""The part of a trained model that is packaged and exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recsys import DistributedModelParallel
from recsys.inference import export_torchscript, package, quantize_embeddings
from recsys.inference.served_part import served_part
from recsys.modules.ctr.din import DIN
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.sparse import KeyedJaggedTensor


def trained() -> DLRMTrain:
    tables = [EmbeddingBagConfig(9, 4, "films", feature_names=["film"])]
    return DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables), 2, [4, 4], [4, 1]))


def inputs() -> list[object]:
    film = KeyedJaggedTensor(["film"], torch.tensor([3, 4]), lengths=torch.tensor([1, 1]))
    return [torch.ones(2, 2), film]


def test_the_model_of_a_training_wrapper_is_packaged(tmp_path: Path) -> None:
    model = quantize_embeddings(trained().eval())
    assert served_part(model) is model.model
    version = package(model, tmp_path / "m", inputs(), programs=["torchscript"])
    assert (version / "program.pt").is_file()
    export_torchscript(model, tmp_path / "m.pt", inputs())


def test_sharded_and_float_tables_are_refused_with_the_remedy(tmp_path: Path) -> None:
    sharded = DistributedModelParallel(trained(), device=torch.device("cpu")).eval()
    for model in (sharded, sharded.module, sharded.module.model):
        with pytest.raises(ValueError, match=r"received the sharded .* Pass quantize_embeddings"):
            package(model, tmp_path / "m", inputs())
    with pytest.raises(ValueError, match=r"Call quantize_embeddings first"):
        package(trained().eval(), tmp_path / "m", inputs())
    with pytest.raises(ValueError, match=r"must be in evaluation mode"):
        package(quantize_embeddings(trained()).train(), tmp_path / "m", inputs())
    assert not (tmp_path / "m").exists()


def test_torchscript_that_cannot_compile_a_model_names_aoti(tmp_path: Path) -> None:
    users = EmbeddingBagConfig(10, 4, "users", feature_names=["user"])
    films = EmbeddingConfig(10, 8, "films", feature_names=["seen", "film"])
    bags, films_of = EmbeddingBagCollection(tables=[users]), EmbeddingCollection(tables=[films])
    model = quantize_embeddings(DIN(bags, films_of, 3, pairs=[("seen", "film")]).eval())
    ids = KeyedJaggedTensor(
        ["user", "seen", "film"], torch.arange(1, 8), lengths=torch.tensor([1, 1, 3, 0, 1, 1])
    )
    with pytest.raises(ValueError, match=r"programs must be \['aoti'\] for this model"):
        package(model, tmp_path / "m", [torch.ones(2, 3), ids], programs=["torchscript"])
