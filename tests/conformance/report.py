"""Write docs/conformance.md from the results: `python -m tests.conformance.report`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.conformance.runner import RESULTS

_OUTCOMES = {
    "equal": "equal",
    "differs": "different",
    "raises": "with an error",
    "cannot run": "not supported",
}
PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
_ROW_STATE = (
    "TorchRec's row-wise Adagrad keeps a state per row and column shard, recsys one per row "
    '(unless `row_state="per_shard"`).'
)
_NO_SIZES = "TorchRec's data-parallel tables and grids support no batch size per feature."
_WHY = (
    (
        ("differs", "Adam: data_parallel"),
        "torch's Adam has no moments before its first step, so the load skips them silently, "
        "unless the optimizer's `init_state()` was called.",
    ),
    (
        ("differs", "sequence | size per feature"),
        "TorchRec repeats a sequence for each sample that shares it; recsys returns it once.",
    ),
    (
        ("is not supported in CPU mode",),
        "On a CPU FBGEMM fuses only SGD, Adagrad and row-wise Adagrad.",
    ),
    (
        ("'PartialRowWiseAdam' object has no attribute",),
        "TorchRec's `PartialRowWiseAdam` cannot train a data-parallel table.",
    ),
    (
        ("differs", "RowWiseAdagrad", "column_wise"),
        _ROW_STATE,
    ),
    (("differs", "RowWiseAdagrad", "grid_shard"), _ROW_STATE),
    (
        ("differs", "weighted mean"),
        "FBGEMM's backward of a weighted mean on a CPU, and TorchRec's forward of row splits, do "
        "not divide by the number of ids.",
    ),
    (
        ("differs", "mean | one size", "grid_shard"),
        "TorchRec's grid supports no mean over split rows.",
    ),
    (
        ("differs", "data_parallel", "Adam"),
        "`torch.optim.Adam` also updates rows that a batch does not read.",
    ),
    (("gloo/transport",), "A rank raised and left the others without a connection."),
    (("jagged_unique_indices",), "FBGEMM deduplicates ids only on GPUs."),
    (
        ("Variable batch size TBE support is enabled for",),
        "FBGEMM supports a batch size per feature only with SGD and row-wise Adagrad.",
    ),
    (("Sharding not supported",), "TorchRec shards no sequences over nodes or grids."),
    (
        ("ProcessGroupGloo::allgather",),
        "TorchRec's reduce-scatter on gloo needs the same number of bags on all ranks.",
    ),
    (
        ("IndexError", "size per feature", "grid_shard"),
        _NO_SIZES,
    ),
    (
        ("raises", "size per feature", "data_parallel"),
        _NO_SIZES,
    ),
    (
        ("split_with_sizes", "sequence", "data_parallel"),
        "TorchRec's data-parallel sequences raise an error.",
    ),
    (
        ("Missing key in checkpoint state_dict: optimizer",),
        "The optimizer's state has other names under the other plan, or is missing on a rank "
        "without shards.",
    ),
    (
        ("Size mismatch between saved",),
        "The row-wise state has another shape if columns are split.",
    ),
)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _total(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    return sum(map(Counter, counts), Counter[str]())


def _outcomes(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[name]:,} {_OUTCOMES[name]}" for name in _OUTCOMES if name in counts)


def _cell(counts: Mapping[str, int], outcomes: Sequence[str]) -> str:
    """Return counts of some outcomes, separated by slashes."""
    return "/".join(str(counts.get(outcome, 0)) for outcome in outcomes)


def _environment(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"({result['date']}, {versions}, {result['seconds'] // 60} minutes)"


def _matrix(result: Mapping[str, Any]) -> str:
    text = f"**{result['equal']:,} of {result['cells']:,} combinations equal the unsharded model** "
    text += f"{_environment(result)}.\n"
    if result["differences"]:
        text += "\nDifferences:\n\n"
        text += "".join(f"- {cell}: {found[0]}\n" for cell, found in result["differences"].items())
    return text


def _checkpoints(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> str:
    counts = peer["counts"]
    rows = [
        [f"`{saved}`", *(_cell(_total(counts[o][saved].values()), list(_OUTCOMES)) for o in counts)]
        for saved in next(iter(counts.values()))
    ]
    return (
        f"- recsys: {_outcomes(ours['outcomes'])}\n"
        f"- TorchRec: {_outcomes(peer['outcomes'])}\n\n"
        "TorchRec's cases by plan of the save, equal/different/with an error/not supported:\n\n"
        + _table(["saved under", *counts], rows)
        + "\nReasons in TorchRec:\n\n"
        + _reasons(peer)
    )


def _parity(result: Mapping[str, Any]) -> str:
    table = result["counts"]["optimizer"]
    optimizers = sorted({name for by_name in table.values() for name in by_name})
    outcomes = [name for name in _OUTCOMES if name in result["outcomes"]]
    rows = [[f"`{s}`", *(_cell(table[s].get(v, {}), outcomes) for v in optimizers)] for s in table]
    return (
        f"{result['cells']} cases: {_outcomes(result['outcomes'])}. Cells: "
        f"{'/'.join(_OUTCOMES[name] for name in outcomes)}.\n\n"
        + _table(["strategy", *optimizers], rows)
        + "\nReasons in TorchRec:\n\n"
        + _reasons(result)
    )


def why(outcome: str, case: str) -> str:
    """Return the explanation of a difference, or "" if it has none."""
    for patterns, reason in _WHY:
        if all(pattern in f"{outcome} {case}" for pattern in patterns):
            return reason
    return ""


def _reasons(result: Mapping[str, Any]) -> str:
    """Return a list item for each reason, with the number of its cases."""
    counts: Counter[str] = Counter()
    for outcome, found in result["not equal"].items():
        counts.update(why(outcome, case) or f"`{outcome}`" for case in found)
    return "".join(f"- {count} x {reason}\n" for reason, count in counts.most_common())


def render(results: Path = RESULTS) -> str:
    """Return the text of the page."""

    def read(name: str) -> Any:
        return json.loads((results / name).read_text())

    return f"""# Conformance

`make conformance` compares sharded models with unsharded models and with TorchRec 1.8.0, and
`python -m tests.conformance.report` writes this page. Counts by lookup, batch sizes, ranks, wire
format and optimizer, and every case that is not equal, are in `benchmarks/results/`:
`conformance.json`, `conformance-checkpoints.json`, `conformance-checkpoints-peer.json` and
`parity.json`.

## Sharded equals unsharded

A combination is a strategy, a kind of lookup, a number of ranks and simulated nodes, a wire format,
batch sizes and an optimizer. Random tables train for three steps. Outputs, keys, weights or
gradients, optimizer state, dense layers and state dict names are compared with the unsharded model.

- fp32 wire: all values agree to 1e-5 of the largest value. They agree bit for bit for table-wise
  tables, and for column-wise tables under elementwise optimizers, except with deduplicated ids or
  with samples that share bags on three ranks.
- Narrow wires: each value is within an error bound (`tests/conformance/bounds.py`).

{_matrix(read("conformance.json"))}
## Checkpoints under other plans

Each case trains three steps, saves, loads under another plan and on another number of ranks (1 to
4, four being two nodes), and trains three more steps. recsys is compared with the unsharded run
without an interruption. TorchRec is compared with its own uninterrupted run; it saves and loads by
`torch.distributed.checkpoint`. TorchRec cannot train *not supported* settings on gloo.

{_checkpoints(read("conformance-checkpoints.json"), read("conformance-checkpoints-peer.json"))}
## The same models in TorchRec

Both libraries train the same tables, weights, plan and batches on the same ranks: outputs and
weights of five steps are equal if they agree to 1e-5 (`tests/parity/`). All ranks have batches of
one size and a shard of each row-wise table, which TorchRec needs on gloo.

{_parity(read("parity.json"))}"""


if __name__ == "__main__":
    PAGE.write_text(render())
