"""`find_values` finds given values in each kind of file that has them, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.features import Categorical, FeatureSpec, Hashed, Label
from recsys.inference import Publisher, package, quantize_embeddings
from recsys.inference.deletion import find_values, forget
from recsys.prepare import prepare
from tests.inference.deletion.test_forget import _Model, _spec, _train

pytestmark = pytest.mark.filterwarnings("ignore:The checkpoint in:UserWarning")
VALUES = {"user": ["user 3", "user 5", "nobody"], "item": ["item 4", "nothing"]}


def _found(folder: Path, spec: FeatureSpec) -> dict[tuple[str, str, str], int]:
    report = find_values(folder, VALUES, spec)
    assert report.unknown == []
    names = (str(Path(found.path).relative_to(folder)) for found in report.found)
    return {
        (name, found.what, found.table): found.num_values
        for name, found in zip(names, report.found, strict=True)
    }


def test_each_kind_of_file_is_found(tmp_path: Path) -> None:
    spec = _spec()
    model = _Model(spec)
    _train(model, spec, 0)
    save_checkpoint(tmp_path / "full", model, spec=spec)
    save_checkpoint(tmp_path / "bare", model)
    spec.save(tmp_path / "spec")
    quantized = quantize_embeddings(model.eval(), torch.float32)
    example = {"user": ["user 3", "b"], "item": ["item 4", "b"]}
    version = package(quantized, tmp_path / "m", example, spec=spec, programs=["torchscript"])
    publisher = Publisher(model, version)
    model.train()
    model(spec.transform(example).sparse_features).sum().backward()
    publisher.publish()
    publisher.close()
    raw = {"user": ["user 3", "user 3", None], "item": ["item 4", "x", "y"], "ok": [1, 0, 1]}
    (tmp_path / "raw").mkdir()
    pq.write_table(pa.table(raw), tmp_path / "raw/a.parquet")
    pq.write_table(pa.table({"user": [["user 5", "z"], []]}), tmp_path / "raw/lists.parquet")
    coded = pa.array(["user 9", "user 5"]).dictionary_encode().slice(0, 1)
    pq.write_table(pa.table({"user": coded}), tmp_path / "raw/unused.parquet")
    (tmp_path / "raw/b.csv").write_text("user,ok\nuser 5,1\nuser 3,0\n")
    prepare(FeatureSpec([*spec.columns, Label("ok")]).fit(raw), tmp_path / "raw/a.parquet",
            tmp_path / "ready")  # fmt: skip
    everything = {
        ("spec", "spec", "user"): 2,
        ("full/step-1", "checkpoint", "user"): 2,
        ("full/step-1", "checkpoint", "item"): 1,
        ("bare/step-1", "checkpoint", "user"): 2,
        ("bare/step-1", "checkpoint", "item"): 1,
        ("m/1", "package", "user"): 2,
        ("m/1", "package", "item"): 1,
        ("m/1", "delta of a package", "user"): 1,
        ("m/1", "delta of a package", "item"): 1,
        ("raw/a.parquet", "table", "user"): 1,
        ("raw/a.parquet", "table", "item"): 1,
        ("raw/lists.parquet", "table", "user"): 1,
        ("raw/b.csv", "table", "user"): 2,
        ("raw/unused.parquet", "table", "user"): 1,  # in its dictionary
        ("ready/features", "spec", "user"): 1,
        ("ready/part-00000.parquet", "prepared file", "user"): 1,
        ("ready/part-00000.parquet", "prepared file", "item"): 1,
    }
    assert _found(tmp_path, spec) == everything


def test_deltas_have_their_own_rows(tmp_path: Path) -> None:
    spec = _spec()
    model = _Model(spec)
    _train(model, spec, 0, steps=20)
    save_checkpoint(tmp_path / "c", model, spec=spec, delta=True, keep=None)
    example = {"user": ["user 5", "user 9"], "item": ["item 4", "item 5"]}
    model(spec.transform(example).sparse_features).sum().backward()
    save_checkpoint(tmp_path / "c", model, spec=spec, delta=True, keep=None)
    after = spec.forget({"user": VALUES["user"]})
    smaller = _Model(after)
    load_checkpoint(tmp_path / "c", smaller, spec=after)
    forget(smaller, VALUES, after)
    save_checkpoint(tmp_path / "c", smaller, spec=after, keep=None)
    assert _found(tmp_path, spec) == {
        ("c/step-1", "checkpoint", "user"): 2,
        ("c/step-1", "checkpoint", "item"): 1,
        ("c/step-2", "delta checkpoint", "user"): 1,
        ("c/step-2", "delta checkpoint", "item"): 1,
    }


def test_what_cannot_be_judged_is_listed(tmp_path: Path) -> None:
    spec, other = _spec(), FeatureSpec([Categorical("user")]).fit({"user": ["q"]})
    save_checkpoint(tmp_path / "other", torch.nn.ModuleDict({"m": _Model(_spec()).bags}))
    unknown = FeatureSpec([Categorical("user"), Hashed("item", rows=64, growing=True)])
    bags = _Model(unknown.fit({"user": ["w"], "item": ["x"]}))
    save_checkpoint(tmp_path / "bare", bags)
    (tmp_path / "bad.parquet").write_bytes(b"junk")
    other.save(tmp_path / "broken")
    (tmp_path / "broken/features.json").write_text("{")
    (tmp_path / "killed/step-4").mkdir(parents=True)
    (tmp_path / "killed/step-4/__0_0.distcp").write_bytes(b"user 3")
    report = find_values([tmp_path], VALUES, spec)
    places = {Path(text.split(": ")[0]).relative_to(tmp_path).parts[0] for text in report.unknown}
    assert places == {"bare", "bad.parquet", "broken", "killed"}
    assert "no spec with its values was found" in str(report)
    assert str(report).endswith("; 4 are not judged")
    assert {Path(found.path).parent.name for found in report.found} == {"other"}
    with pytest.raises(FileNotFoundError, match="must exist"):
        find_values(tmp_path / "no", VALUES, spec)
    with pytest.raises(TypeError, match="must be texts"):
        find_values(tmp_path, {"user": np.array([3])}, spec)
