"""A version and its shadow are compared on recorded rows as packages are on the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.inference.gate import Gate, GateReport
from recsys.metrics import auc

GATE = Gate(label="click", segments=("country",), min_rows=500, min_segment_rows=200)


def _rows(seed: int, rows: int = 4000, noise: float = 0.0, version: str = "8") -> dict[str, Any]:
    """Recorded rows; the noise of the predictions of the live version is given."""
    random = np.random.default_rng(seed)
    logits = random.normal(-1, 1, rows)
    clicks = random.random(rows) < 1 / (1 + np.exp(-logits))
    country = random.integers(0, 2, rows)
    return {
        "country": [["no", "it"][number] for number in country],
        "prediction_output": (logits + noise * random.normal(0, 1, rows)).astype(np.float32),
        "shadow_output": logits.astype(np.float32),
        "record_version": [version] * rows,
        "record_shadow": ["7"] * rows,
        "click": clicks.astype(int),
    }


def _refused(report: GateReport) -> set[str]:
    return {rule.name for rule in report.refused}


def test_both_predictions_are_judged(tmp_path: Path) -> None:
    good, bad = _rows(0, noise=0.05), _rows(1, noise=2.0)
    pq.write_table(pa.table(good), tmp_path / "good.parquet")
    report = GATE.compare_record({"tuesday": str(tmp_path / "good.parquet")})
    assert report.passed, str(report)
    assert (report.new, report.served, report.manifest) == ("8", "7", "")
    report = GATE.compare_record({"tuesday": bad})
    assert "auc" in _refused(report)
    [rule] = [rule for rule in report.rules if (rule.name, rule.subject) == ("auc", "tuesday")]
    import torch

    labels = torch.from_numpy(np.asarray(bad["click"], np.float64))
    areas = [
        float(auc(torch.from_numpy(bad[f"{n}_output"].astype(np.float64)), labels))
        for n in ("prediction", "shadow")
    ]
    assert rule.value == pytest.approx(areas[1] - areas[0], abs=1e-6)
    assert {segment.name for segment in report.segments} == {"all", "country=no", "country=it"}
    turned = GATE.compare_record({"tuesday": bad}, new="shadow")
    assert (turned.new, turned.served) == ("7", "8")
    assert "auc" not in _refused(turned)


def test_rows_without_a_shadow_are_left_out() -> None:
    rows = _rows(2)
    shadow = pa.array(rows["shadow_output"], mask=np.arange(4000) % 2 == 0)
    report = GATE.compare_record({"day": pa.table({**rows, "shadow_output": shadow})})
    [rule] = [rule for rule in report.rules if rule.name == "data"]
    assert rule.value == 2000


def test_numbers_are_judged_by_their_error() -> None:
    random = np.random.default_rng(0)
    seconds = random.gamma(2.0, 30.0, 4000)
    rows = _rows(0) | {
        "seconds": seconds,
        "shadow_output": (seconds + random.normal(0, 10, 4000)).astype(np.float32),
    }
    gate = Gate(label="seconds", regression=("seconds",), min_rows=500)
    for scale, shift, wanted in ((10, 0, set()), (12, 0, {"error"}), (10, 8, {"error"})):
        values = seconds + random.normal(0, scale, 4000) + shift
        given = rows | {"prediction_output": values.astype(np.float32)}
        report = gate.compare_record({"day": given})
        assert _refused(report) - {"calibration"} == wanted, str(report)
        assert ("calibration" in _refused(report)) == (shift == 8)
        [rule] = [rule for rule in report.rules if rule.name == "error"]
        errors = [((rows_of.astype(np.float32) - seconds) ** 2).mean()
                  for rows_of in (values, rows["shadow_output"])]  # fmt: skip
        assert rule.value == pytest.approx(errors[0] / errors[1] - 1, rel=1e-3, abs=1e-4)
    assert report.segments[0].new.loss == pytest.approx(errors[0], rel=1e-4)
    with pytest.raises(ValueError, match="finite numbers as labels; received nan in row 0"):
        gate.compare_record({"day": rows | {"seconds": [None] * 4000}})


def test_wrong_rows_are_errors() -> None:
    for changed, error, match in (
        ({"record_version": ["8"] * 3999 + ["9"]}, ValueError, "of one version and one shadow"),
        ({"click": [2] * 4000}, ValueError, "the labels 0 and 1"),
        ({"click": [None] * 4000}, ValueError, "the labels 0 and 1"),
    ):
        with pytest.raises(error, match=match):
            GATE.compare_record({"day": _rows(0) | changed})
    for name in ("record_shadow", "click", "country"):
        rows = _rows(0)
        del rows[name]
        with pytest.raises(KeyError, match=name):
            GATE.compare_record({"day": rows})
    with pytest.raises(ValueError, match="of one version"):
        GATE.compare_record({"a": _rows(0), "b": _rows(1, version="9")})
    with pytest.raises(ValueError, match=r"needs Gate\.label"):
        Gate().compare_record({"day": _rows(0)})
    with pytest.raises(ValueError, match="must have a data set"):
        GATE.compare_record({})
    with pytest.raises(ValueError, match="'prediction' or 'shadow'"):
        GATE.compare_record({"day": _rows(0)}, new="old")  # type: ignore[arg-type]
