"""Names of the columns of scored files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys.features import Categorical, FeatureSpec, Label, Numeric
from recsys.inference import package, quantize_embeddings, score
from recsys.inference.score_results import named_outputs
from recsys.modules.ctr.multi_task import MMoE, MultiTask
from recsys.modules.embedding_modules import EmbeddingBagCollection


@pytest.mark.parametrize(
    ("outputs", "tasks", "wanted"),
    [
        ({"output": np.array([[0.0], [-1000.0], [1000.0]])}, [], ["output", "probability"]),
        ({"output": np.zeros(3)}, ["click"], ["output", "probability"]),
        (
            {"click": np.zeros(3), "rank": np.zeros(3)},
            ["click"],
            ["click", "click_probability", "rank"],
        ),
        ({"output": np.zeros((3, 2))}, ["a"], None),
        ({"output": np.zeros(3, np.int64)}, [], None),
        ({"a": np.zeros(3), "b": np.zeros(3)}, [], None),
    ],
)
def test_probabilities_are_of_logits(
    outputs: dict[str, np.ndarray], tasks: list[str], wanted: list[str] | None
) -> None:
    if wanted is None:
        with pytest.raises(ValueError, match="of a model with one logit"):
            named_outputs(outputs, tasks, True)
        return
    found = named_outputs(outputs, tasks, True)
    assert list(found) == wanted
    for name in wanted:
        if name.endswith("probability"):
            logits = torch.from_numpy(outputs[wanted[0]])
            np.testing.assert_allclose(found[name], torch.sigmoid(logits), 1e-6)
    assert named_outputs(outputs, tasks, False) == outputs


@pytest.mark.parametrize("is_package", [True, False])
def test_outputs_of_tasks_have_their_names(tmp_path: Path, is_package: bool) -> None:
    names = ["cart", "buy", "return"]
    random = np.random.default_rng(0)
    labels = {name: random.integers(0, 2, 50).tolist() for name in names}
    rows = {
        "city": random.choice(["a", "b", "c"], 50).tolist(),
        "price": random.random(50).tolist(),
    }
    spec = FeatureSpec([Categorical("city"), Numeric("price"), *map(Label, names)])
    pq.write_table(pa.table({**rows, **labels}), tmp_path / "a.parquet")
    spec.fit(tmp_path / "a.parquet")
    tables = EmbeddingBagCollection(tables=spec.tables(8))
    model = quantize_embeddings(MultiTask(tables, 1, MMoE(9, num_tasks=3)).eval())
    options: dict[str, Any] = {"probabilities": True}
    scored: Any = model
    if is_package:
        example = {name: values[:2] for name, values in rows.items()}
        scored = package(model, tmp_path / "m", example, spec=spec, programs=["torchscript"])
    else:
        options["spec"] = spec
    [path] = score(scored, tmp_path / "a.parquet", tmp_path / "out", keys=["city"], **options)
    found = pq.read_table(path)
    assert found.column_names == ["city"] + [
        f"{n}{end}" for n in names for end in ("", "_probability")
    ]
    with torch.no_grad():
        batch = spec.transform(rows, labels=False)
        logits = model(batch.dense_features, batch.sparse_features)
    keys = ["cart", "city"]
    [path] = score(scored, tmp_path / "a.parquet", tmp_path / "labels", keys=keys, **options)
    other = pq.read_table(path)  # the label beside the output
    assert other.column_names[:4] == [*keys, "cart_output", "cart_probability"]
    assert other["cart"].to_pylist() == labels["cart"]
    assert other["cart_output"] == found["cart"]
    for name, column in zip(names, logits.T, strict=True):
        np.testing.assert_allclose(found[name], column, 1e-5, 1e-6)
        wanted = torch.sigmoid(column.double())
        np.testing.assert_allclose(found[f"{name}_probability"], wanted, 1e-5)
