"""Names of TorchRec that resolve here: `python -m tests.parity.names [--peer FOLDER]`.

It imports every module of TorchRec in a process of its own, from FOLDER if one is given (another
release, unpacked). Each public name there, defined or imported from another of its modules, is
resolved here, refused with a reason, or left. Of the names of its API reference and of its packages
it compares members, arguments and defaults. The list is written to names-RELEASE.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from recsys.compat.table import home_of, reason_of
from tests.compat.facts import line_of, read_line, words_of
from tests.compat.test_facts import DIFFERENT, differences

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("test_utils.", ".benchmark", ".experimental", ".github", ".tests", ".test_")
"""Modules that are not for users: tests and benchmarks of the package itself."""
LATER = (".quant_mc",)
"""Quantized managed collisions: nothing here does their work yet."""
REFERENCE = {
    "torchrec.sparse.jagged_tensor": "JaggedTensor KeyedJaggedTensor KeyedTensor",
    "torchrec.modules.embedding_configs": "BaseEmbeddingConfig EmbeddingBagConfig EmbeddingConfig",
    "torchrec.modules.embedding_modules": "EmbeddingBagCollection EmbeddingCollection",
    "torchrec.distributed.types": "ShardingPlan",
    "torchrec.distributed.planner.planners": "EmbeddingShardingPlanner",
    "torchrec.distributed.planner.enumerators": "EmbeddingEnumerator",
    "torchrec.distributed.planner.partitioners": "GreedyPerfPartitioner",
    "torchrec.distributed.planner.storage_reservations": "HeuristicalStorageReservation",
    "torchrec.distributed.planner.proposers": "GreedyProposer",
    "torchrec.distributed.planner.shard_estimators": (
        "EmbeddingPerfEstimator EmbeddingStorageEstimator"
    ),
    "torchrec.distributed.model_parallel": "DistributedModelParallel",
    "torchrec.inference.modules": "quantize_inference_model shard_quant_model",
}
"""The classes and functions on the pages of TorchRec's API reference."""
NEWER = {
    r"EmbeddingCollection\.(set_)?use_sorted_select": "how a lookup gathers is the kernel's choice",
    r"\w+Pipeline\w*\(async_inplace_copy\)": "a batch is copied into memory of its own",
    r"Embedding(ShardingPlanner|PlannerBase)\.get_(search_space|selected_options)": (
        "callbacks are given the options of the best plan"
    ),
    r"Topology\.(reproduction_hash|to_reproduction_dict)": "to_json describes a machine",
    r"DryRunRequest\(planner_config\)": "for the executor, which is the user's: any value",
    r"\w*Optimizer\w*\.scratch_buffers": "optimizers here keep no buffers beside their state",
}
"""Differences of 1.9 from 1.8, and the reasons why they are not here."""
WALK = """
import contextlib, importlib, io, json, pkgutil, sys, warnings
warnings.simplefilter("ignore")
from tests.parity.names import LEFT_OUT, facts_of
import torchrec
found = {}
names = [m.name for m in pkgutil.walk_packages(torchrec.__path__, "torchrec.", onerror=lambda n: 0)]
for name in ["torchrec", *names]:
    if not any(part in name for part in LEFT_OUT):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found[name] = facts_of(importlib.import_module(name))
        except Exception as error:
            print(f"{name} is not importable: {error}", file=sys.stderr)
json.dump({"version": torchrec.version.__version__, "modules": found}, sys.stdout)
"""


def facts_of(module: ModuleType) -> dict[str, Any]:
    """The public names of a module that its package defines: whether of a package, and facts."""
    found = {}
    for name, value in vars(module).items():
        home = str(getattr(value, "__module__", None))
        is_ours = home.startswith("torchrec") or (home == "None" and name.isupper())
        if not name.startswith("_") and is_ours and not isinstance(value, ModuleType):
            line = line_of(f"{module.__name__}.{name}", words_of(value))
            is_target = hasattr(module, "__path__") or (
                name in REFERENCE.get(module.__name__, "").split()
            )
            home = f"{home}.{value.__name__}" if hasattr(value, "__name__") else ""
            found[name] = {"is_target": is_target, "line": line, "home": home}
    return found


def names_of(peer: Path | None) -> dict[str, Any]:
    """Return the findings of a walk through a TorchRec."""
    path = os.pathsep.join(str(folder) for folder in (ROOT, peer) if folder)
    run = subprocess.run(
        [sys.executable, "-c", WALK],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def state_of(module: str, name: str, home: str) -> str:
    """Return the state of a name: resolved, refused (with the reason) or left."""
    if home_of(module, name) is not None:
        return "resolved"
    reason = reason_of(f"{module}.{name}") or reason_of(home)
    return f"refused: {reason}" if reason else "left"


def share(states: list[str]) -> str:
    """Return the counts of the states, and the share of resolved names."""
    counts = Counter(state.partition(":")[0] for state in states)
    rate = counts["resolved"] / max(1, len(states))
    return f"{len(states)} names: {dict(sorted(counts.items()))}, {rate:.1%} resolved"


def facts_report(lines: list[str]) -> Iterator[str]:
    """Yields how members and arguments of the names compare, then what differs with its reason."""
    words = [word for line in lines for word in read_line(line)[1]]
    total = sum(bool(word.name) + len(word.arguments or ()) for word in words)
    differ = list(differences(lines))
    known = DIFFERENT | NEWER
    found = {
        f"{name} {how}": [why for pattern, why in known.items() if re.fullmatch(pattern, name)]
        for name, how in differ
    }
    without = sum(not reasons for reasons in found.values())
    yield (
        f"{total} members and arguments of these: {len(found) - without} differ for a reason, "
        f"{without} without"
    )
    for difference, reasons in found.items():
        yield f"  {difference}: {reasons[0] if reasons else 'left'}"


def report(found: dict[str, Any]) -> Iterator[str]:
    """Yields the list: what users meet first, then every other module."""
    targets: list[str] = []
    others: dict[str, dict[str, str]] = {}
    states: list[str] = []
    lines: list[str] = []
    for module, names in sorted(found["modules"].items()):
        for name, facts in sorted(names.items()):
            state = state_of(module, name, facts["home"])
            is_later = any(part in f"{module} {facts['home']}" for part in LATER)
            if not facts["is_target"] or is_later:
                others.setdefault(module, {})[name] = state
                continue
            states.append(state)
            if state == "resolved":
                lines.append(facts["line"])
            else:
                targets.append(f"  {module}.{name} {state}")
    yield f"TorchRec {found['version']}, by python -m tests.parity.names"
    yield f"API reference and packages, {share(states)}"
    yield from targets
    yield from facts_report(lines)
    yield f"All other modules, {share([s for names in others.values() for s in names.values()])}"
    for module, names in others.items():
        by_state: dict[str, list[str]] = {}
        for name, state in names.items():
            by_state.setdefault(state, []).append(name)
        yield f"{module}: {len(by_state.pop('resolved', []))} of {len(names)} resolved"
        for state, left in sorted(by_state.items()):
            yield f"  {state}: {' '.join(left)}"


def main() -> int:
    """Walks and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Path, help="folder of another release, unpacked")
    found = names_of(parser.parse_args().peer)
    file = Path(__file__).with_name(f"names-{found['version']}.txt")
    lines = list(report(found))
    file.write_text("\n".join(lines) + "\n")
    print(*(line for line in lines if " names: " in line), file, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
