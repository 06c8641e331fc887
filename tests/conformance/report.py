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
_WHY = (
    (
        ("differs", "Adam: data_parallel"),
        "torch's Adam has no moments before its first step, so the load skips them silently. "
        "(After `init_state()` of the optimizer it loads them.)",
    ),
    (
        ("differs", "sequence | size per feature"),
        "TorchRec repeats a sequence for each sample that shares it; this library returns it once.",
    ),
    (
        ("is not supported in CPU mode",),
        "On a CPU FBGEMM fuses only SGD, Adagrad and row-wise Adagrad, and TorchRec has no "
        "alternative.",
    ),
    (
        ("'PartialRowWiseAdam' object has no attribute",),
        "TorchRec's class stands for a fused optimizer and cannot train a data-parallel table.",
    ),
    (
        ("differs", "RowWiseAdagrad", "column_wise"),
        "TorchRec keeps one state per row and column shard; this library keeps one per row, as in "
        'the unsharded table. (`row_state="per_shard"` selects the former.)',
    ),
    (("differs", "RowWiseAdagrad", "grid_shard"), "As for column-wise: a state per column shard."),
    (
        ("differs", "weighted mean"),
        "On a CPU FBGEMM's backward of a weighted mean does not divide by the number of ids; its "
        "forward does. Under row splits TorchRec's forward differs as well. Here both divide.",
    ),
    (
        ("differs", "mean | one size", "grid_shard"),
        "TorchRec's grid supports no mean over split rows.",
    ),
    (
        ("differs", "data_parallel", "Adam"),
        "torch.optim.Adam also updates rows that a batch does not read.",
    ),
    (("gloo/transport",), "A rank raised and left the others without a connection."),
    (("jagged_unique_indices",), "The operator exists only for GPUs."),
    (
        ("Variable batch size TBE support is enabled for",),
        "FBGEMM supports a batch size per feature only with SGD and row-wise Adagrad.",
    ),
    (("Sharding not supported",), "TorchRec does not shard sequences this way."),
    (
        ("ProcessGroupGloo::allgather",),
        "TorchRec's reduce-scatter on gloo needs the same number of bags on all ranks.",
    ),
    (
        ("IndexError", "size per feature", "grid_shard"),
        "A grid supports no batch size per feature.",
    ),
    (
        ("raises", "size per feature", "data_parallel"),
        "A data-parallel table supports no batch size per feature.",
    ),
    (
        ("split_with_sizes", "sequence", "data_parallel"),
        "Raised by TorchRec's data-parallel sequences, whether or not tables share a feature.",
    ),
    (
        ("Missing key in checkpoint state_dict: optimizer",),
        "The optimizer's entry for a table has other names under the other plan, or is missing on "
        "a rank without shards.",
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


def _environment(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"({result['date']}, {versions}, {result['seconds'] // 60} minutes)"


def _matrix(result: Mapping[str, Any]) -> str:
    rows = []
    for strategy, counts in result["counts"]["kind"].items():
        equal, tried = map(sum, zip(*counts.values(), strict=True))
        rows.append([f"`{strategy}`", f"{tried:,}", f"{equal:,}"])
    text = f"**{result['equal']:,} of {result['cells']:,} combinations equal the unsharded model** "
    text += f"{_environment(result)}.\n\n" + _table(["strategy", "combinations", "equal"], rows)
    if result["differences"]:
        text += "\nDifferences:\n\n"
        text += "".join(f"- {cell}: {found[0]}\n" for cell, found in result["differences"].items())
    return text


def _checkpoints(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> str:
    rows = [
        [
            optimizer,
            f"`{saved}`",
            _outcomes(_total(by_loaded.values())),
            _outcomes(_total(peer["counts"][optimizer][saved].values())),
        ]
        for optimizer, table in ours["counts"].items()
        for saved, by_loaded in table.items()
    ]
    return (
        f"- recsys: {_outcomes(ours['outcomes'])} {_environment(ours)}\n"
        f"- TorchRec: {_outcomes(peer['outcomes'])} {_environment(peer)}\n\n"
        + _table(["optimizer", "saved under", "recsys", "TorchRec 1.8.0"], rows)
        + "\nReasons of TorchRec's differences:\n\n"
        + _reasons(peer)
    )


def _parity(result: Mapping[str, Any]) -> str:
    table = result["counts"]["optimizer"]
    optimizers = sorted({name for by_name in table.values() for name in by_name})
    rows = [[f"`{s}`", *(_outcomes(table[s].get(v, {})) for v in optimizers)] for s in table]
    return (
        f"{result['cells']} cases: {_outcomes(result['outcomes'])} {_environment(result)}\n\n"
        + _table(["strategy", *optimizers], rows)
        + "\nErrors and differences in TorchRec:\n\n"
        + _reasons(result)
    )


def why(outcome: str, case: str) -> str:
    """Return the explanation of a difference, or "" if it has none."""
    for patterns, reason in _WHY:
        if all(pattern in f"{outcome} {case}" for pattern in patterns):
            return reason
    return ""


def _reasons(result: Mapping[str, Any]) -> str:
    """Return a list item for each outcome and reason, with its count and an example."""
    cases: dict[tuple[str, str], list[str]] = {}
    for outcome, found in result["not equal"].items():
        for case in found:
            cases.setdefault((outcome, why(outcome, case)), []).append(case)
    lines = []
    for (outcome, reason), found in sorted(cases.items(), key=lambda item: -len(item[1])):
        shown = outcome.replace("|", "/").replace("`", "'")
        lines.append(f"- {len(found)} x `{shown}`, such as `{found[0]}`. {reason}".rstrip())
    return "\n".join(lines) + "\n"


def render(results: Path = RESULTS) -> str:
    """Return the text of the page."""

    def read(name: str) -> Any:
        return json.loads((results / name).read_text())

    return f"""# Conformance

`make conformance` compares sharded with unsharded models and with TorchRec, and
`python -m tests.conformance.report` writes this page. Counts by lookup, batch sizes, ranks, wire
format and optimizer are in `benchmarks/results/`: `conformance.json`,
`conformance-checkpoints.json`, `conformance-checkpoints-peer.json` and `parity.json`.

## Sharded equals unsharded

A combination is a strategy, a kind of lookup, a number of ranks and simulated nodes, a wire format,
batch sizes, and an optimizer. Random tables train for three steps and are compared with the
unsharded model on one process: outputs, keys, weights or gradients, optimizer state, dense layers,
and the names of the state dict.

- With the fp32 wire all values agree to 1e-5 of the largest.
- They agree bit for bit for table-wise tables, and for column-wise tables under elementwise
  optimizers. Exceptions are deduplicated ids and samples that share bags on three ranks.
- Narrow wires are held to an error bound for each value (`tests/conformance/bounds.py`). A
  forgotten loss scale, a coarser wire and misplaced values exceed it
  (`tests/conformance/test_bounds.py`).

`mixed` draws a strategy for each table. One rank sends nothing, so it has one wire format.

{_matrix(read("conformance.json"))}
## Checkpoints under other plans

Three steps, a checkpoint, a load under another plan and on another number of ranks (each of 1 to 4
to each of 1 to 4, four being two nodes), and three more steps. In recsys, weights, optimizer state
and outputs equal the unsharded run without an interruption.

TorchRec is compared with its own uninterrupted run, saved and loaded by
`torch.distributed.checkpoint` from the state dicts of model and optimizer. *Not supported* settings
cannot be trained by TorchRec on gloo.

{_checkpoints(read("conformance-checkpoints.json"), read("conformance-checkpoints-peer.json"))}
## The same models in TorchRec

The same tables, weights, plan and batches in TorchRec 1.8.0 on the same ranks: outputs and weights
agree to 1e-5 over five steps (`tests/parity/`). All ranks have batches of one size and a shard of
each row-wise table, which TorchRec needs on gloo.

{_parity(read("parity.json"))}"""


if __name__ == "__main__":
    PAGE.write_text(render())
