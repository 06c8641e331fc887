"""Mutation tests: `python -m tests.mutants trace FOLDER`, then `choose` or `run` with the folder.

`trace` runs the suite and records the lines that each test executes. `choose` writes the cases that
`make test` leaves out, `tests/rest.txt`. `run` draws changes over all lines of `recsys`. For each
it runs the tests of the line up to the first failure: the cases of `make test`, then the rest, then
the slow cases. It works on copies of the last commit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from tests.mutants.choose import choose, shortened
from tests.mutants.mutate import Fault, draw
from tests.mutants.trace import prepare, seconds_of_tests, tests_of_lines
from tests.rest import LIST, is_long, is_rest
from tests.slow import is_slow

ROOT = Path(__file__).parents[2]
_LIMIT_S = 1800


class Result(NamedTuple):
    """The first test that notices a fault."""

    path: str
    fault: Fault
    num_tests: int
    """Number of tests that execute the line."""
    tier: str
    """The tier that notices the fault; "none", or "not run" if no test executes the line."""
    test: str
    """The test that fails."""

    def __str__(self) -> str:
        change = f"{_short(self.fault.before)} -> {_short(self.fault.after)}"
        place = f"{self.path}:{self.fault.line}"
        return f"{self.tier:8} {place} {self.fault.kind}: {change} [{self.num_tests}] {self.test}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 50 else f"{line[:50]}..."


def tier_of(test: str) -> str:
    """Return the tier of a test: "fast", "rest" or "slow".

    Args:
        test: Its id.
    """
    return "slow" if is_slow(test) or is_long(test) else "rest" if is_rest(test) else "fast"


def trace(folder: Path, arguments: Sequence[str]) -> int:
    """Run the suite and record the lines that each test executes."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.trace", *arguments]
    return subprocess.run(command, cwd=ROOT, env=prepare(folder), check=False).returncode


def write_rest(folder: Path, limit_s: float) -> None:
    """Choose the cases of `make test` and write the list of the others."""
    seconds = {test: s for test, s in seconds_of_tests(folder).items() if tier_of(test) != "slow"}
    lines = tests_of_lines(folder)
    kept = choose(
        {
            path: {number: tests & seconds.keys() for number, tests in by_number.items()}
            for path, by_number in lines.items()
        },
        seconds,
        limit_s,
    )
    names = shortened(seconds.keys() - kept, seconds.keys())
    LIST.write_text("".join(f"{name}\n" for name in names))
    print(f"{len(kept)} of {len(seconds)} cases kept; {len(names)} names in {LIST}")


def _failed_test(copy: Path, tests: Sequence[str]) -> str:
    """Return the first test that fails; "" if all pass."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(tests))
        listed.flush()
        options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", "120"]
        command = [sys.executable, "-m", "pytest", *options, f"@{listed.name}"]
        env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        try:
            run = subprocess.run(
                command, cwd=copy, env=env, capture_output=True, text=True, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return f"no end in {_LIMIT_S} s"
    if run.returncode == 0:
        return ""
    if run.returncode == 5:  # no test was collected
        raise RuntimeError(f"{' '.join(tests[:3])}:\n{run.stdout[-2000:]}")
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR "))]
    return lines[0].split(" - ")[0].partition(" ")[2] if lines else (run.stdout + run.stderr)[-200:]


def check(
    copy: Path, path: str, fault: Fault, tests: Sequence[str], seconds: Mapping[str, float]
) -> Result:
    """Run the tests of a fault on a copy, quick ones first.

    Args:
        copy: A copy of the repository.
        path: The changed file.
        fault: Its fault.
        tests: The tests that execute its line.
        seconds: Seconds of each test.
    """
    if not tests:
        return Result(path, fault, 0, "not run", "")
    before = (copy / path).read_text()
    (copy / path).write_text(fault.source)
    try:
        for tier in ("fast", "rest", "slow"):
            chosen = [test for test in tests if tier_of(test) == tier]
            chosen.sort(key=lambda test: seconds.get(test, 0.0))
            failed = _failed_test(copy, chosen) if chosen else ""
            if failed:
                return Result(path, fault, len(tests), tier, failed)
    finally:
        (copy / path).write_text(before)
    return Result(path, fault, len(tests), "none", "")


def _tests_of(lines: Mapping[int, frozenset[str]], fault: Fault) -> frozenset[str]:
    """Return the tests that execute a fault: an expression of several lines has one of its own."""
    return lines.get(fault.line) or lines.get(fault.statement) or frozenset()


def run(folder: Path, count: int, seed: int, processes: int) -> list[Result]:
    """Draw faults and run their tests; prints a line for each fault, and the counts.

    Args:
        folder: The folder of the records.
        count: Number of faults.
        seed: The seed of the faults.
        processes: Number of copies that run side by side.
    """
    lines = tests_of_lines(folder)
    seconds = {test: sum(parts) for test, parts in seconds_of_tests(folder).items()}
    copies: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory(prefix="recsys-mutants-") as home:
        for place in range(processes):
            copies.put(copy := Path(home, str(place)))
            subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
        files = {
            str(path.relative_to(copy)): path.read_text() for path in copy.rglob("recsys/**/*.py")
        }

        def result_of(drawn: tuple[str, Fault]) -> Result:
            path, fault = drawn
            copy = copies.get()
            try:
                tests = _tests_of(lines.get(path, {}), fault)
                result = check(copy, path, fault, sorted(tests), seconds)
            finally:
                copies.put(copy)
            print(result, flush=True)
            return result

        with ThreadPoolExecutor(processes) as pool:
            results = list(pool.map(result_of, draw(files, count, seed)))
    print(dict(Counter(result.tier for result in results)))
    return results


def main() -> int:
    """Parse the command."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("command", choices=["trace", "choose", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100, help="number of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=700, help="of the chosen cases together")
    arguments, rest = parser.parse_known_args()
    if arguments.command == "trace":
        return trace(arguments.folder.resolve(), rest)
    if arguments.command == "choose":
        write_rest(arguments.folder.resolve(), arguments.seconds)
        return 0
    run(arguments.folder.resolve(), arguments.count, arguments.seed, arguments.processes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
