"""A plugin of pytest that records the lines of `recsys` that each test executes, and its seconds.

`python -m tests.mutants trace FOLDER` runs the suite with it. Lines of the ranks of the pool and of
processes that a test starts count for this test. A killed process leaves no lines.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing.util
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.ranks import RankPool

FOLDER = "RECSYS_TRACE"
"""The environment variable with the folder of the records."""


def start() -> coverage.Coverage:
    """Record the lines of this process; see `sitecustomize.py` of the folder."""
    folder = Path(os.environ[FOLDER])
    recorder = coverage.Coverage(
        data_file=str(folder / "lines"), data_suffix=True, config_file=False, source_pkgs=["recsys"]
    )
    recorder.set_option("run:disable_warnings", ["module-not-measured", "no-data-collected"])
    recorder.start()
    return recorder


def start_in_child() -> None:
    """Record the lines of a process that a test has started, up to its end."""
    recorder = start()
    recorder.switch_context(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])
    atexit.register(recorder.save)
    multiprocessing.util.Finalize(None, recorder.save, exitpriority=100)


def of_rank(test: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on a rank of the pool and record its lines under a test."""
    recorder = coverage.Coverage.current()
    assert recorder is not None
    recorder.switch_context(test)
    try:
        return function(*args)
    finally:
        recorder.save()  # the pool kills its processes


class Recorder:
    """The plugin, in each process of pytest."""

    def __init__(self, folder: Path, is_main: bool) -> None:
        self._folder, self._is_main = folder, is_main
        self._seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._lines = start()
        call = RankPool.__call__

        @functools.wraps(call)
        def traced(
            pool: RankPool, size: int, fn: Callable[..., Any], *args: Any, **options: Any
        ) -> list[Any]:
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
            return call(pool, size, of_rank, test, fn, *args, **options)

        RankPool.__call__ = traced  # type: ignore[method-assign, assignment]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record the lines of a test."""
        self._lines.switch_context(item.nodeid)
        yield
        self._lines.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of a stage of a test: of its fixtures, or of itself and of its end."""
        self._seconds[report.nodeid][report.when != "setup"] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the records."""
        self._lines.stop()
        self._lines.save()
        if self._is_main:
            path = self._folder / "seconds.json"
            known = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps({**known, **self._seconds}))


def pytest_configure(config: pytest.Config) -> None:
    """Record lines if the environment has a folder for them."""
    if FOLDER in os.environ:
        is_main = not hasattr(config, "workerinput")
        config.pluginmanager.register(Recorder(Path(os.environ[FOLDER]), is_main))


def prepare(folder: Path) -> dict[str, str]:
    """Make the folder of the records; returns the environment of pytest.

    Args:
        folder: A new or an empty folder.
    """
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).parents[2]
    (site / "sitecustomize.py").write_text(
        "import os\n"
        f"if os.environ.get('PYTEST_CURRENT_TEST') and os.environ.get('{FOLDER}'):\n"
        f"    import sys\n    sys.path.append({str(root)!r})\n"
        "    from tests.mutants.trace import start_in_child\n"
        "    start_in_child()\n"
    )
    paths = [str(site), str(root), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def seconds_of_tests(folder: Path) -> dict[str, tuple[float, float]]:
    """Return the seconds of each test: of its fixtures, and of itself.

    Args:
        folder: The folder of the records.
    """
    return {test: tuple(s) for test, s in json.loads((folder / "seconds.json").read_text()).items()}


def tests_of_lines(folder: Path) -> dict[str, dict[int, frozenset[str]]]:
    """Return the tests that execute each line, by file of the library and number of line.

    Args:
        folder: The folder of the records.
    """
    data = coverage.CoverageData(str(folder / "all"))
    if not (folder / "all").exists():
        recorder = coverage.Coverage(data_file=str(folder / "all"), config_file=False)
        recorder.combine([str(path) for path in folder.glob("lines.*")], keep=True)
        recorder.save()
    data.read()
    root = f"{Path(__file__).parents[2]}{os.sep}"
    lines: dict[str, dict[int, frozenset[str]]] = {}
    for path in sorted(data.measured_files()):
        with contextlib.suppress(ValueError):
            lines[path.removeprefix(root)] = {
                number: frozenset(filter(None, tests))
                for number, tests in data.contexts_by_lineno(path).items()
            }
    return lines
