"""Loggers write each record, once, also after a resume."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recsys.training import JsonLines, Lines, MLflow, TensorBoard, WandB

VALUES = {"loss": 0.5, "validation/auc": 0.75}


def records_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logger = Lines()
    logger.log(100, {"epoch": 1, "loss": 0.123456, "samples_per_second": 123456.7})
    logger.log(200, {"loss": math.nan, "rate": math.inf, "learning_rate": 1e-5})
    logger.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 100: epoch 1, loss 0.1235, samples_per_second 123457",
        "step 200: loss nan, rate inf, learning_rate 1e-05",
    ]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    logger = JsonLines(path)
    assert not path.exists()
    logger.log(1, VALUES)
    logger.log(2, {"loss": math.nan, "rate": math.inf})
    assert len(records_in(path)) == 2  # at once, not at the end
    logger.close()
    logger.close()
    assert records_in(path) == [{"step": 1, **VALUES}, {"step": 2, "loss": None, "rate": None}]
    with pytest.raises(TypeError, match=r"JsonLines\.path must be a path"):
        JsonLines(3)  # type: ignore[arg-type]


def test_a_repeated_step_replaces_its_records(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    logger = JsonLines(path)
    for step in (1, 2, 3, 3, 4):
        logger.log(step, {"loss": step})
    logger.close()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # the job is killed
    logger = JsonLines(path)
    logger.log(3, {"loss": 30})
    logger.log(4, {"loss": 40})
    logger.close()
    found = [(record["step"], record["loss"]) for record in records_in(path)]
    assert found == [(1, 1), (2, 2), (3, 30), (4, 40)]
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoard(tmp_path)
    logger.log(3, VALUES)
    logger.log(6, {"loss": 0.25})
    logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 0.5), (6, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("validation/auc")] == [(3, 0.75)]


class Service(ModuleType):
    """A module of a service, which records the calls."""

    def __init__(self) -> None:
        super().__init__("service")
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **settings: Any) -> Any:
            self.calls.append((name, *args, settings))
            return self

        return call


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    logger = WandB(project="clicks")
    logger.close()
    assert service.calls == []  # a rank that logs nothing opens no run
    logger.log(3, VALUES)
    logger.log(4, VALUES)
    logger.close()
    assert service.calls == [
        ("init", {"project": "clicks"}),
        ("log", VALUES, {"step": 3}),
        ("log", VALUES, {"step": 4}),
        ("finish", {}),
    ]


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, "mlflow", service)
    logger = MLflow(run_name="clicks")
    logger.log(3, VALUES)
    logger.close()
    logger.close()
    assert service.calls == [
        ("start_run", {"run_name": "clicks"}),
        ("log_metrics", VALUES, {"step": 3}),
        ("end_run", {}),
    ]


def test_services_are_imported_at_the_first_record(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    for logger in (WandB(), MLflow()):
        with pytest.raises(ImportError):
            logger.log(1, VALUES)
