"""Destinations of the numbers of a training job: files, text, and services."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from io import TextIOBase
from pathlib import Path
from typing import Any, Protocol, final

from recsys.base.arguments import path_of, wrong_type
from recsys.base.checked import checked


class Logger(Protocol):
    """A destination of numbers. The trainer calls it on rank 0 only."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers, such as `loss`, by name.

        Args:
            step: Number of steps so far.
            values: The numbers.
        """

    def close(self) -> None:
        """End the record; called when training ends, also by an error."""


def check_loggers(subject: str, loggers: object) -> None:
    """Check that loggers are a list of objects with `log` and `close`.

    Args:
        subject: Name of the argument.
        loggers: The argument.

    Raises:
        TypeError: They are not.

    Example:
        >>> check_loggers("loggers", [Lines()])
    """
    if not isinstance(loggers, list | tuple):
        wrong_type(subject, "a list of loggers", loggers)
    for number, logger in enumerate(loggers):
        if not (callable(getattr(logger, "log", None)) and callable(getattr(logger, "close", 0))):
            wrong_type(f"{subject}[{number}]", "a logger, with log and close", logger)


@final
class Lines:
    """A line of plain text per record, on stdout.

    Example:
        >>> Lines().log(200, {"loss": 0.55431, "samples_per_second": 38861.2})
        step 200: loss 0.5543, samples_per_second 38861
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print a line."""
        parts = (f"{name} {_short(value)}" for name, value in values.items())
        print(f"step {step}: {', '.join(parts)}", flush=True)

    def close(self) -> None:
        """Do nothing."""


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@final
class JsonLines:
    """A JSON object per record in a file, which is opened at the first record.

    Numbers that are not finite are written as null. The records of a job that resumes are appended;
    records of steps that it repeats are removed first.

    Args:
        path: The file. Its folder is created.

    Raises:
        TypeError: The path is not a path.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = JsonLines(f"{folder}/log.jsonl")
        ...     log.log(1, {"loss": 0.5})
        ...     log.close()
        ...     print((Path(folder) / "log.jsonl").read_text(), end="")
        {"step": 1, "loss": 0.5}
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path_of("JsonLines.path", path)
        self._file: TextIOBase | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_from(step)
            self._file = self._path.open("a")
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def _remove_from(self, step: int) -> None:
        """Remove the records of a step and of later ones, and a line that a killed job began."""
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text().splitlines(keepends=True):
            if not line.endswith("\n") or json.loads(line)["step"] >= step:
                break
            kept.append(line)
        new = self._path.with_suffix(".new")
        new.write_text("".join(kept))
        new.replace(self._path)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


@final
class TensorBoard:
    """Event files for TensorBoard (`pip install tensorboard`).

    Args:
        folder: Folder of the files.

    Raises:
        ImportError: At the first record, if tensorboard is not installed.
    """

    @checked
    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # events of steps that a resumed job repeats are hidden
            self._writer = SummaryWriter(self._folder, purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@final
class WandB:
    """A run of Weights & Biases (`pip install wandb`).

    Args:
        **settings: Arguments of `wandb.init`, such as `project` and `name`. With `id` and
            `resume="allow"`, a job that resumes continues its run.

    Raises:
        ImportError: At the first record, if wandb is not installed.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._run: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers."""
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._settings)
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


@final
class MLflow:
    """A run of MLflow (`pip install mlflow`), at the address of `MLFLOW_TRACKING_URI`.

    Args:
        **settings: Arguments of `mlflow.start_run`, such as `run_name` and `experiment_id`. With
            `run_id`, a job that resumes continues its run.

    Raises:
        ImportError: At the first record, if mlflow is not installed.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._mlflow: Any = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers."""
        if self._mlflow is None:
            import mlflow

            mlflow.start_run(**self._settings)
            self._mlflow = mlflow
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        if self._mlflow is not None:
            self._mlflow.end_run()
            self._mlflow = None
