"""The part of a trained model that is scored, packaged and exported."""

from __future__ import annotations

import copy
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys import DistributedModelParallel
from recsys.features import Categorical, FeatureSpec, Ids, Label, Numeric
from recsys.inference import export_torchscript, package, quantize_embeddings, score
from recsys.inference.served_part import served_part
from recsys.modules.ctr.din import DIN
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.sequences.bert4rec import BERT4Rec
from recsys.modules.sequences.masked_item import MaskedItem
from recsys.modules.sequences.next_item import NextItem
from recsys.modules.sequences.sasrec import SASRec
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


def test_the_model_of_a_training_wrapper_is_scored(tmp_path: Path) -> None:
    rows = {"city": ["a", "b", "a"], "price": [1.0, 2.0, 4.0], "ok": [0, 1, 0]}
    spec = FeatureSpec([Categorical("city"), Numeric("price"), Label("ok")]).fit(rows)
    model = DLRM(EmbeddingBagCollection(tables=spec.tables(4)), 1, [4, 4], [4, 1])
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    found = []
    for number, one in enumerate(
        (model, DLRMTrain(model), DistributedModelParallel(DLRMTrain(copy.deepcopy(model))))
    ):
        [path] = score(one, tmp_path / "a.parquet", tmp_path / str(number), spec=spec)
        found.append(pq.read_table(path)["output"].to_pylist())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", [NextItem, MaskedItem])
def test_training_of_sequences_is_refused_with_the_remedy(tmp_path: Path, kind: type) -> None:
    config = EmbeddingConfig(10, 8, "films", feature_names=["history", "target"])
    films = EmbeddingCollection(tables=[config])
    model = (
        NextItem(films, SASRec(8, 50), "in_batch")
        if kind is NextItem
        else MaskedItem(BERT4Rec(10, 5, 8, nhead=2, num_layers=1), mask_id=0)
    )
    ids = KeyedJaggedTensor(["history", "target"], torch.arange(4), lengths=torch.ones(4).int())
    with pytest.raises(ValueError, match=rf"received {kind.__name__}, .* Package Recommend\("):
        package(quantize_embeddings(model.eval()), tmp_path / "m", [ids])
    pq.write_table(pa.table({"history": [[1]], "target": [[2]]}), tmp_path / "a.parquet")
    lists = [Ids(name, rows=10, is_list=True) for name in ("history", "target")]
    spec = FeatureSpec(lists).fit(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=rf"received {kind.__name__}, .*and score the package"):
        score(model, tmp_path / "a.parquet", tmp_path / "out", spec=spec)


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
    with pytest.raises(ValueError, match=r"programs must be \['aoti'\] for this"):
        package(model, tmp_path / "m", [torch.ones(2, 3), ids], programs=["torchscript"])
