"""Packages of recommenders answer with the values of the data."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys.features import Categorical, FeatureSpec
from recsys.inference import Predictor, package, quantize_embeddings, score
from recsys.inference.packages.columns import Columns
from recsys.inference.packages.writer import _outputs
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.modules.item_index import ItemIndex, Recommend
from recsys.modules.sequences.next_item import NextItem
from recsys.modules.sequences.sasrec import SASRec

HISTORIES = [["a", "b"], ["c"], [], ["rare", None, "a"]]


def build() -> tuple[Recommend, FeatureSpec]:
    """A recommender of the items a to e; another is rare."""
    data = {"history": [[*"abcde"], [*"abcde"], ["rare"]]}
    spec = FeatureSpec([Categorical("history", is_list=True, table="items", min_count=2)]).fit(data)
    vocabulary = spec.fitted.vocabularies["items"]
    torch.manual_seed(0)
    items = EmbeddingConfig(
        vocabulary.num_rows, 4, "items", feature_names=["history"],
        num_special_rows=vocabulary.num_special_rows,
    )  # fmt: skip
    model = NextItem(EmbeddingCollection(tables=[items]), SASRec(4, 10), "in_batch").eval()
    index = ItemIndex(model.embedding_collection.embeddings["items"].weight)
    return Recommend(model, index, k=5), spec


def test_answers_are_values(tmp_path: Path) -> None:
    recommend, spec = build()
    table = pa.table({"history": pa.array(HISTORIES)})
    version = package(quantize_embeddings(recommend), tmp_path / "m", table, spec=spec)
    with Predictor(version) as predictor:
        found = predictor(table)
    for history, row in zip(HISTORIES, found["values"].tolist(), strict=True):
        left = {*"abcde"} - {*history}
        assert {*row[: len(left)]} == left  # all items that the user has not seen
        assert row[len(left) :] == [None] * (5 - len(left))
    assert found["values"].tolist() == spec.values_of("items", found["1"]).tolist()
    pq.write_table(table, tmp_path / "users.parquet")
    (path,) = score(version, tmp_path / "users.parquet", tmp_path / "out")
    assert pq.read_table(path)["values"].to_pylist() == found["values"].tolist()


def test_outputs_name_their_vocabulary() -> None:
    recommend, spec = build()
    columns = Columns(spec, pa.table({"history": pa.array(HISTORIES)}))
    of_others = ItemIndex(recommend.index.items, torch.arange(100, 105))
    plain = ItemIndex(recommend.model.embedding_collection.embeddings["items"].weight)
    expected = torch.zeros(4, 5), torch.zeros(4, 5, dtype=torch.int64)
    for index, history, wanted in (
        (recommend.index, "history", "items"),
        (plain, None, "items"),
        (of_others, None, None),  # ids of another catalogue are not rows
    ):
        one = Recommend(recommend.model, index, 5, history)
        outputs = _outputs(one, expected, columns)
        assert [output.get("vocabulary") for output in outputs] == [None, wanted]
    assert _outputs(recommend, expected, None)[1].get("vocabulary") is None
