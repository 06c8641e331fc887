"""Packages of recommenders answer with the values of the data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys.features import Categorical, FeatureSpec
from recsys.inference import Predictor, package, quantize_embeddings, score
from recsys.inference.packages.columns import PackageColumns
from recsys.inference.packages.writer import _outputs
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.modules.item_index import ItemIndex, Recommend
from recsys.modules.sequences.next_item import NextItem
from recsys.modules.sequences.sasrec import SASRec

HISTORIES = [["a", "b"], ["c"], [], ["rare", None, "a"]]
TEXTS = ["Oslo", "", "Zürich 北 \U0001f600", "x" * 1024, "e"]
NUMBERS = [5, -(2**63), 2**63 - 1, 0, -1]


def build(items: Sequence[Any] = "abcde") -> tuple[Recommend, FeatureSpec]:
    """A recommender of five items, texts or whole numbers; another is rare."""
    rare = "rare" if isinstance(items[0], str) else 7
    data = {"history": [[*items], [*items], [rare]]}
    spec = FeatureSpec([Categorical("history", is_list=True, table="items", min_count=2)]).fit(data)
    vocabulary = spec.fitted.vocabularies["items"]
    torch.manual_seed(0)
    table = EmbeddingConfig(
        vocabulary.num_rows, 4, "items", feature_names=["history"],
        num_special_rows=vocabulary.num_special_rows,
    )  # fmt: skip
    model = NextItem(EmbeddingCollection(tables=[table]), SASRec(4, 10), "in_batch").eval()
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


def histories_of(items: Sequence[Any]) -> Any:
    """A table of histories that leave five to no items."""
    kind = pa.string() if isinstance(items[0], str) else pa.int64()
    lists = [[*items[:2]], [items[2]], [], [None, items[0], items[0]], [*items]]
    return pa.table({"history": pa.array(lists, pa.list_(kind))})


def test_a_row_outside_the_vocabulary_is_an_error_of_its_request() -> None:
    predictor = Predictor.__new__(Predictor)
    predictor._manifest = {"outputs": [{"name": "1", "vocabulary": "items"}]}
    predictor._spec = build()[1]
    error = predictor._with_values({"1": np.array([[2, -1], [7, 0]])})
    assert isinstance(error, RuntimeError)
    assert str(error) == "rows must be from -1 to 6; received -1 to 7."


def test_outputs_name_their_vocabulary() -> None:
    recommend, spec = build()
    columns = PackageColumns(spec, pa.table({"history": pa.array(HISTORIES)}))
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
