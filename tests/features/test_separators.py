"""Lists in texts, compared with `str.split`: in files, requests and prepared tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from recsys import datasets
from recsys.features import Categorical, FeatureSpec, Hashed, Ids, Label, Numeric
from recsys.features.columns import Column
from recsys.features.save import describe
from recsys.inference import Predictor, package, quantize_embeddings, score
from recsys.inference.packages.columns import model_request, raw_request
from recsys.inference.packages.manifest_rules import _column
from recsys.modules.embedding_configs import PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.prepare import prepare
from recsys.sparse import KeyedJaggedTensor

WORDS = ["action", "comedy", " drama", "new wave ", "7", "07", "ø"]


def _spec(separator: str | None) -> FeatureSpec:
    options: dict[str, Any] = {"is_list": True, "separator": separator}
    return FeatureSpec(
        [
            Categorical("genres", **options),
            Categorical("rated", weights="stars", **options),
            Hashed("tags", rows=1000, **options),
            Ids("films", rows=50, **options),
            Label("ok"),
        ]
    )


def _lists(count: int, seed: int) -> dict[str, list[Any]]:
    """Return columns with lists, None and empty lists."""
    draw = np.random.default_rng(seed)

    def bags(values: Any) -> list[Any]:
        sizes = draw.integers(-1, 4, count)
        return [
            None if n < 0 else [values[i] for i in draw.integers(0, len(values), n)] for n in sizes
        ]

    rated = bags(WORDS)
    stars = [
        None if bag is None else [round(float(x), 3) for x in draw.random(len(bag))]
        for bag in rated
    ]
    return {
        "genres": bags(WORDS),
        "rated": rated,
        "stars": stars,
        "tags": bags(WORDS),
        "films": bags(list(range(50))),
        "ok": draw.integers(0, 2, count).tolist(),
    }


def _texts(lists: dict[str, list[Any]], separator: str) -> dict[str, list[Any]]:
    def text(value: Any) -> Any:
        return separator.join(map(str, value)) if isinstance(value, list) else value

    return {name: [text(value) for value in column] for name, column in lists.items()}


def _same(found: Any, wanted: Any) -> None:
    assert found.sparse_features.keys() == wanted.sparse_features.keys()
    for part in ("values", "lengths", "weights"):
        left, right = (getattr(batch.sparse_features, part)() for batch in (found, wanted))
        assert left.tolist() == right.tolist()


@pytest.mark.parametrize("separator", ["|", ", "])
@pytest.mark.parametrize("seed", range(3))
def test_texts_are_read_as_their_lists(separator: str, seed: int, tmp_path: Path) -> None:
    lists = _lists(100, seed)
    texts = _texts(lists, separator)
    plain = _spec(None).fit(lists)
    wanted = plain.transform(lists)
    whole = pa.table(texts)
    spec = _spec(separator).fit(whole)
    assert spec.fingerprints() == plain.fingerprints()
    kinds: list[Any] = [pa.string(), pa.large_string(), pa.string_view(), pa.binary()]
    for kind in kinds:
        columns = {name: whole[name].cast(kind) for name in texts if name != "ok"}
        _same(spec.transform(pa.table({**columns, "ok": whole["ok"]})), wanted)
    encoded = {name: whole[name].dictionary_encode() for name in texts if name != "ok"}
    _same(spec.transform(pa.table({**encoded, "ok": whole["ok"]})), wanted)
    chunks = pa.concat_tables([whole.slice(0, 7), whole.slice(7, 0), whole.slice(7)])
    _same(spec.transform(chunks), wanted)
    _same(spec.transform(pd.DataFrame(texts)), wanted)
    _same(spec.transform(lists), wanted)  # lists stay lists
    views = pa.array(lists["genres"], pa.list_view(pa.string()))
    _same(spec.transform(whole.set_column(0, "genres", views)), wanted)

    pq.write_table(whole, tmp_path / "a.parquet", row_group_size=30)
    whole.to_pandas().to_csv(tmp_path / "a.csv", index=False)
    for suffix, read in (("parquet", datasets.parquet), ("csv", datasets.csv)):
        path = tmp_path / f"a.{suffix}"
        assert _spec(separator).fit(path).fingerprints() == plain.fingerprints()
        [batch] = read(path, spec, 100)
        _same(batch, wanted)
        ready = tmp_path / suffix
        assert prepare(_spec(separator), path, ready) == 100
        [batch] = datasets.parquet(ready / "*.parquet", FeatureSpec.load(ready / "prepared"), 100)
        _same(batch, wanted)
    ranks = [
        datasets.parquet(tmp_path / "a.parquet", spec, 100, rank=i, world_size=2) for i in (0, 1)
    ]
    assert sum(len(batch.labels) for reader in ranks for batch in reader) == 100
    mixed = datasets.csv([tmp_path / "a.parquet", tmp_path / "a.csv"], spec, 100)
    for batch in mixed:
        _same(batch, wanted)


def test_columns_of_single_numbers_are_texts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("genres,films,stars\n7,1,0.5\n07,2,1\n")
    options: dict[str, Any] = {"is_list": True, "separator": "|"}
    columns = [Categorical("genres", **options), Ids("films", rows=9, weights="stars", **options)]
    spec = FeatureSpec(columns).fit(tmp_path / "a.csv")
    assert spec.values_of("genres", [2, 3]).tolist() == ["07", "7"]
    [batch] = datasets.csv(tmp_path / "a.csv", spec, 9, labels=False)
    assert batch.sparse_features["films"].values().tolist() == [1, 2]
    assert batch.sparse_features["films"].weights().tolist() == [0.5, 1]


class _Sum(nn.Module):
    def forward(self, ids: Any) -> torch.Tensor:
        bags = ids.to_dict().values()
        return torch.stack([torch.stack([bag.sum() for bag in f.to_dense()]) for f in bags]).sum(0)


def test_score_and_requests(tmp_path: Path) -> None:
    lists = _lists(20, 0)
    texts = _texts(lists, "|")
    spec = _spec("|").fit(texts)
    pd.DataFrame(texts).to_csv(tmp_path / "a.csv", index=False)
    [path] = score(_Sum(), tmp_path / "a.csv", tmp_path / "s", spec=spec, keys=["genres"])
    wanted = _Sum()(_spec(None).fit(lists).transform(lists).sparse_features)
    found = pq.read_table(path)
    assert found["output"].to_pylist() == wanted.tolist()
    assert found["genres"].to_pylist() == [text or None for text in texts["genres"]]
    names = [feature.name for feature in spec.features()]
    features = [{"name": name, "tensor": name} for name in names]
    inputs = [{"kind": "jagged", "weighted": True, "features": features}]
    request = model_request(spec, inputs, texts)
    for name, tensor in model_request(_spec(None).fit(lists), inputs, lists).items():
        assert request[name].tolist() == tensor.tolist()
    tensors = {name: name for name in names}
    entries: list[Any] = [
        column.describe(spec.fitted, pa.table(texts), tensors) for column in spec.columns[:-1]
    ]
    assert [entry["dtype"] for entry in entries] == ["text", "text", "text", "int64"]
    raw, plain = raw_request(entries, texts), raw_request(entries, lists)
    assert raw["films"].tolist() == plain["films"].tolist()  # type: ignore[union-attr]
    assert raw["stars"].tolist() == plain["stars"].tolist()  # type: ignore[union-attr]
    for name in names:
        lengths = raw[f"{name}.lengths"].tolist()  # type: ignore[union-attr]
        assert lengths == [len(bag or ()) for bag in lists[name]]
    sizes = raw["genres"].views[:, 1].tolist()  # type: ignore[union-attr]
    assert sizes == [len(word.encode()) for bag in lists["genres"] for word in bag or ()]


def test_a_package_splits_texts(tmp_path: Path) -> None:
    lists = _lists(30, 1)
    texts = _texts(lists, "|")
    spec = _spec("|").fit(texts)
    tables = spec.tables(4, PoolingType.SUM)
    collection = EmbeddingBagCollection(tables=tables, is_weighted=True)
    model = quantize_embeddings(_Pooled(collection).eval())
    example = pa.table(texts).drop_columns(["ok"])
    version = package(model, tmp_path / "m", example, spec=spec, programs=["torchscript"])
    with Predictor(version) as predictor:
        [column, *_] = predictor.manifest["columns"]
        assert (column["separator"], column["dtype"]) == ("|", "text")
        found, wanted = (predictor(request)["output"] for request in (texts, lists))
        assert found.tolist() == wanted.tolist()
        with pytest.raises(ValueError, match=r"'x' in row 0\. Send numbers between separators"):
            predictor({**texts, "films": ["1|x"] * 30})
    (tmp_path / "a.csv").write_text("genres,rated,stars,tags,films\n7,a|7,1|2,,3\n07,,,b|c,4|5\n")
    [path] = score(version, tmp_path / "a.csv", tmp_path / "s", keys=["genres"])
    rows = {
        "genres": [["7"], ["07"]],
        "rated": [["a", "7"], []],
        "stars": [[1.0, 2.0], []],
        "tags": [[], ["b", "c"]],
        "films": [[3], [4, 5]],
    }
    with Predictor(version) as predictor:
        output = predictor(rows)["output"][:, 0].tolist()
    assert pq.read_table(path).to_pydict() == {"genres": ["7", "07"], "output": output}
    with pytest.raises(ValueError, match="must have lists and a separator that is not empty"):
        _column("columns[0]", {**column, "separator": ""})


class _Pooled(nn.Module):
    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.tables(ids).values().sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        (
            {"films": ["1|2", "3||4"]},
            ValueError,
            "'films' must .*received '' in",
        ),
        ({"films": ["1", "3| 4"]}, ValueError, "whole numbers .*received ' 4'"),
        ({"films": ["1.0"]}, ValueError, "whole numbers .*received '1.0' in"),
        ({"films": ["1", "77"]}, ValueError, "from 0 .*received 77 in"),
        (
            {"rated": ["a|b"], "stars": ["1|x"]},
            ValueError,
            "'stars' must .*received 'x' in",
        ),
        ({"rated": ["a|b"], "stars": ["1|nan"]}, ValueError, r"'stars' must have finite numbers"),
        ({"rated": ["a|b"], "stars": ["1"]}, ValueError, "received 1 weights and 2 ids"),
        ({"genres": [b"a", b"\xff|b"]}, ValueError, "'genres' must have .*in UTF-8.*row 1"),
        ({"genres": [1, 2]}, TypeError, r"'genres' must have lists; received int64"),
    ],
)
@pytest.mark.parametrize("has_file", [False, True])
def test_bad_values_are_named(
    tmp_path: Path, columns: Any, error: type[Exception], message: str, has_file: bool
) -> None:
    spec = _spec("|").fit(_texts(_lists(9, 0), "|"))
    size = len(next(iter(columns.values())))
    table = pa.table(
        {name: pa.nulls(size, pa.string()) for name in spec.column_names()}
        | {"ok": [1] * size}
        | columns
    )
    if not has_file:
        with pytest.raises(error, match=message):
            spec.transform(table)
        return
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(error, match=f"{message}|a.parquet: .*{message}") as raised:
        list(datasets.parquet(tmp_path / "a.parquet", spec, 9))
    assert f"{tmp_path}/a.parquet" in str(raised.value)


@pytest.mark.parametrize("kind", [Categorical, Hashed, Ids])
def test_settings(kind: Any) -> None:
    rows = {} if kind is Categorical else {"rows": 9}
    for options in ({"separator": "|"}, {"separator": "", "is_list": True}):
        with pytest.raises(ValueError, match=rf"{kind.__name__} 'x': separator must be a text"):
            kind("x", **rows, **options)
    shared: list[Column] = [
        kind("x", table="t", is_list=True, separator="|", **rows),
        kind("y", table="t", is_list=True, separator=";", **rows),
        kind("z", table="t", **rows),
    ]
    spec = FeatureSpec([*shared, Numeric("age")])
    values = ["1|2", "3;4", 5] if kind is Ids else ["1|2", "3;4", "5"]
    data = {"x": values[:1], "y": values[1:2], "z": values[2:], "age": [1.0]}
    batch = spec.fit(data).transform(data)
    assert batch.sparse_features.lengths().tolist() == [2, 2, 1]
    assert describe(spec.columns, spec.fitted)["columns"][0]["separator"] == "|"


def test_a_text_without_separator_is_an_error_with_the_remedy() -> None:
    rule = r"'genres' must have lists; received string\. Set separator to split texts, such as '\|'"
    with pytest.raises(TypeError, match=rule):
        FeatureSpec([Categorical("genres", is_list=True)]).fit({"genres": ["action|comedy"]})
