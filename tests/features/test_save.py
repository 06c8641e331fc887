"""Saved specs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from recsys.features import Categorical, FeatureSpec, Numeric
from recsys.features.save import NAME, _checksum
from tests.features.tables import rows_of, spec
from tests.features.test_containers import arrow, check_equal
from tests.saved import through_torch_save


def check_same(found: FeatureSpec, expected: FeatureSpec) -> None:
    assert found.columns == expected.columns
    ours, theirs = found.fitted, expected.fitted
    assert (ours.num_rows, ours.means, ours.deviations) == (
        theirs.num_rows,
        theirs.means,
        theirs.deviations,
    )
    assert {n: e.tolist() for n, e in ours.edges.items()} == {
        n: e.tolist() for n, e in theirs.edges.items()
    }
    for name, vocabulary in theirs.vocabularies.items():
        assert ours.vocabularies[name].values.equals(vocabulary.values)
    assert [*ours.vocabularies] == [*theirs.vocabularies]
    rows = arrow(rows_of(99, 100))
    check_equal(found.transform(rows), expected.transform(rows))


@pytest.mark.parametrize("seed", range(5))
def test_loaded_specs_equal_the_saved(seed: int, tmp_path: Path) -> None:
    fitted = spec().fit(rows_of(seed, 300))
    fitted.save(tmp_path / "spec")
    check_same(FeatureSpec.load(tmp_path / "spec"), fitted)
    other = spec()
    other.load_state_dict(through_torch_save(fitted.state_dict()))
    check_same(other, fitted)
    later = spec().fit(rows_of(seed + 1, 200))
    later.save(tmp_path / "spec")  # replaces it
    check_same(FeatureSpec.load(tmp_path / "spec"), later)
    assert [path.name for path in tmp_path.iterdir()] == ["spec"]


def test_empty_vocabularies_and_no_numbers(tmp_path: Path) -> None:
    made = FeatureSpec([Categorical("a"), Categorical("b"), Numeric("x", buckets=3)])
    made.fit({"a": [None], "b": pa.array([None], pa.string()), "x": [None]}).save(tmp_path / "s")
    found = FeatureSpec.load(tmp_path / "s")
    rows = {"a": ["new", None], "b": [7, None], "x": [1.0, None]}
    batch = found.transform(rows)
    assert batch.sparse_features.values().tolist() == [1, 0, 1, 0, 1, 0]


def test_a_fresh_process_has_the_same_batches(tmp_path: Path) -> None:
    fitted = spec().fit(rows_of(1, 300))
    fitted.save(tmp_path / "spec")
    code = (
        "import sys, torch\n"
        "from recsys.features import FeatureSpec\n"
        "spec = FeatureSpec.load(sys.argv[1])\n"  # imports the kinds of columns
        "from tests.features.tables import rows_of\n"
        "batch = spec.transform(rows_of(2, 50))\n"
        "kjt = batch.sparse_features\n"
        "torch.save([batch.dense_features, kjt.values(), kjt.lengths()], sys.argv[2])\n"
    )
    out = tmp_path / "batch.pt"
    subprocess.run([sys.executable, "-c", code, tmp_path / "spec", out], check=True)
    batch = fitted.transform(rows_of(2, 50))
    features = batch.sparse_features
    for found, expected in zip(
        torch.load(out),
        [batch.dense_features, features.values(), features.lengths()],
        strict=True,
    ):
        assert torch.equal(found, expected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    spec().fit(rows_of(1, 300)).save(tmp_path / "spec")
    return tmp_path / "spec"


@pytest.mark.parametrize("seed", range(30))
def test_damaged_files_are_named(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    if seed % 2:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        del data[rng.randrange(len(data)) :]
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=rf"{path.name} (is damaged|must have format)"):
        FeatureSpec.load(folder)


def rewritten(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A change of the description, with the right checksum."""

    def write(folder: Path) -> None:
        found = json.loads((folder / NAME).read_text())
        change(found)
        found["sha256"] = _checksum(found)
        (folder / NAME).write_text(json.dumps(found))

    return write


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda found: found.update(format=3), ValueError, "must have format 2; received 3"),
        (
            lambda found: found.update(format=3, vocabularies=["other"]),
            ValueError,
            "must have .*received 3. Another",
        ),
        (lambda found: found.pop("format"), ValueError, "must have format 2; received None"),
        (lambda found: found.pop("means"), ValueError, "is damaged: .*'means'"),
        (lambda found: found.pop("vocabularies"), ValueError, "is damaged"),
        (lambda found: found["vocabularies"].pop("city"), ValueError, "is damaged"),
        (lambda found: found["means"].pop("age"), ValueError, "is damaged: .*'age'"),
        (lambda found: found["edges"].pop("size"), ValueError, "is damaged: .*'size'"),
        (
            lambda found: found["columns"][0].update(kind="New"),
            ValueError,
            "must have .*received 'New'. Import",
        ),
        (lambda found: found["columns"][0].update(kind=["New"]), ValueError, "is damaged"),
        (lambda found: found["columns"][0].update(more=1), ValueError, "is damaged: .*more"),
        (lambda found: found.update(columns=3), ValueError, "is damaged"),
    ],
)
def test_descriptions_of_other_versions(
    change: Any, error: type[Exception], message: str, folder: Path
) -> None:
    rewritten(change)(folder)
    with pytest.raises(error, match=rf"{NAME} {message}"):
        FeatureSpec.load(folder)


def test_descriptions_of_another_kind(folder: Path) -> None:
    for text in ("[]", "3", "null", "{"):
        (folder / NAME).write_text(text)
        with pytest.raises(ValueError, match=f"{NAME} is damaged"):
            FeatureSpec.load(folder)


def test_missing_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none must be a folder that"):
        FeatureSpec.load(tmp_path / "none")
    (folder / "vocabulary-1.arrow").unlink()
    with pytest.raises(FileNotFoundError, match=r"vocabulary-1\.arrow"):
        FeatureSpec.load(folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="other must be a new folder"):
        spec().fit(rows_of(1, 30)).save(tmp_path / "other")
    with pytest.raises(RuntimeError, match="must be fitted"):
        spec().save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_other_files_are_not_removed(folder: Path) -> None:
    other = folder / "last" / "weights.pt"
    other.parent.mkdir()
    other.write_text("precious")
    with pytest.raises(FileExistsError, match="spec must be a new folder"):
        FeatureSpec.load(folder).save(folder)
    assert other.read_text() == "precious"


def test_a_failed_save_leaves_the_old_spec(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = FeatureSpec.load(folder)

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        spec().fit(rows_of(7, 30)).save(folder)
    monkeypatch.undo()
    check_same(FeatureSpec.load(folder), before)
    assert [path.name for path in folder.parent.iterdir()] == ["spec"]


def test_the_state_of_other_columns() -> None:
    state = FeatureSpec([Categorical("a")]).fit({"a": ["x"]}).state_dict()
    with pytest.raises(ValueError, match=r"must be of the columns.*min_count=2"):
        FeatureSpec([Categorical("a", min_count=2)]).load_state_dict(state)
