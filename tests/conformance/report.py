"""Writes docs/conformance.md from the results: ``python -m tests.conformance.report``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.conformance.runner import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
_AXES = {
    "kind": "Lookup",
    "batches": "Batches",
    "topology": "Ranks, or nodes x ranks per node",
    "wire": "Wire",
    "optimizer": "Optimizer",
}
_WHY = (
    (
        ("differs", "Adam: data_parallel"),
        "torch's Adam has no moments before its first step, so the load leaves them out without "
        "a word. (After `init_state()` of the optimizer it loads them.)",
    ),
    (
        ("differs", "sequence | size per feature"),
        "TorchRec repeats a sequence for each sample that shares it; here it comes once.",
    ),
    (
        ("is not supported in CPU mode",),
        "On a CPU FBGEMM fuses SGD, Adagrad and row-wise Adagrad alone, and TorchRec has no "
        "other way.",
    ),
    (
        ("'PartialRowWiseAdam' object has no attribute",),
        "TorchRec's class stands for a fused optimizer and cannot train a data-parallel table.",
    ),
    (
        ("differs", "RowWiseAdagrad", "column_wise"),
        "TorchRec keeps a row's state for each column shard; here it is one per row, as in the "
        'unsharded table. (`row_state="per_shard"` asks for the former.)',
    ),
    (("differs", "RowWiseAdagrad", "grid_shard"), "As for column-wise: a state per column shard."),
    (
        ("differs", "weighted mean"),
        "On a CPU FBGEMM's backward of a weighted mean does not divide by the number of ids, as "
        "its forward does; under row splits TorchRec's forward differs as well. Here both divide.",
    ),
    (
        ("differs", "mean | one size", "grid_shard"),
        "TorchRec's grid takes no mean over rows that are split.",
    ),
    (
        ("differs", "data_parallel", "Adam"),
        "torch.optim.Adam also moves the rows that a batch does not read.",
    ),
    (("gloo/transport",), "A rank raised and left the others without a connection."),
    (("jagged_unique_indices",), "The operator exists for GPUs alone."),
    (
        ("Variable batch size TBE support is enabled for",),
        "FBGEMM takes a batch size per feature with SGD and row-wise Adagrad alone.",
    ),
    (("Sharding not supported",), "TorchRec has no such sharding of sequences."),
    (
        ("ProcessGroupGloo::allgather",),
        "TorchRec's reduce-scatter on gloo needs as many bags on all ranks.",
    ),
    (("IndexError", "size per feature", "grid_shard"), "A grid takes no batch size per feature."),
    (
        ("raises", "size per feature", "data_parallel"),
        "A data-parallel table takes no batch size per feature.",
    ),
    (
        ("split_with_sizes", "sequence", "data_parallel"),
        "Raised by TorchRec's data-parallel sequences, whether or not tables share a feature.",
    ),
    (
        ("Missing key in checkpoint state_dict: optimizer",),
        "The optimizer's entry for a table has other names under the other plan, or none on a "
        "rank that owns nothing.",
    ),
    (
        ("Size mismatch between saved",),
        "The row-wise state has another shape where columns are split.",
    ),
)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _of(count: Sequence[int]) -> str:
    equal, tried = count
    return f"{equal:,}" if equal == tried else f"**{equal:,} of {tried:,}**"


def _outcomes(counts: Mapping[str, int] | None) -> str:
    if not counts:
        return ""
    return ", ".join(f"{counts[name]} {name}" for name in sorted(counts))


def _made_on(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{result['date']}, {versions}, {result['seconds'] // 60} minutes."


def _matrix(result: Mapping[str, Any]) -> str:
    tried = result["cells"]
    text = f"**{result['equal']:,} of {tried:,} combinations equal the unsharded model.** "
    text += f"({_made_on(result)})\n\n"
    for axis, title in _AXES.items():
        table = result["counts"][axis]
        values = list(next(iter(table.values())))
        rows = [[f"`{s}`", *(_of(table[s][v]) for v in values)] for s in table]
        text += _table([title, *values], rows) + "\n"
    if result["differences"]:
        text += "Differences:\n\n"
        text += "".join(f"- {cell}: {found[0]}\n" for cell, found in result["differences"].items())
    return text


def _checkpoints(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> str:
    text = f"Here: {_outcomes(ours['outcomes'])} ({_made_on(ours)})\n\n"
    text += f"TorchRec: {_outcomes(peer['outcomes'])} ({_made_on(peer)})\n\n"
    for optimizer, table in ours["counts"].items():
        rows = [
            [
                f"`{saved}`",
                f"`{loaded}`",
                _outcomes(counts),
                _outcomes(peer["counts"][optimizer][saved][loaded]),
            ]
            for saved, by_loaded in table.items()
            for loaded, counts in by_loaded.items()
        ]
        text += f"### {optimizer}\n\n"
        text += _table(["saved under", "loaded under", "here", "TorchRec 1.8.0"], rows) + "\n"
    return text + "Where TorchRec's do not equal:\n\n" + _reasons(peer)


def _parity(result: Mapping[str, Any]) -> str:
    text = f"{result['cells']} cases: {_outcomes(result['outcomes'])} ({_made_on(result)})\n\n"
    for axis in ("optimizer", "kind", "batches", "topology"):
        table = result["counts"][axis]
        values = sorted({value for by_value in table.values() for value in by_value})
        rows = [[f"`{s}`", *(_outcomes(table[s].get(v)) for v in values)] for s in table]
        text += _table([_AXES[axis], *values], rows) + "\n"
    return text + "What TorchRec cannot run, and where it differs:\n\n" + _reasons(result)


def why(outcome: str, case: str) -> str:
    """The explanation of a difference, if there is one."""
    for patterns, reason in _WHY:
        if all(pattern in f"{outcome} {case}" for pattern in patterns):
            return reason
    return ""


def _reasons(result: Mapping[str, Any]) -> str:
    cases: dict[tuple[str, str], list[str]] = {}
    for outcome, found in result["not equal"].items():
        for case in found:
            cases.setdefault((outcome, why(outcome, case)), []).append(case)
    lines = []
    for (outcome, reason), found in sorted(cases.items(), key=lambda item: -len(item[1])):
        shown = outcome.replace("|", "/").replace("`", "'")
        lines.append(f"- {len(found)} x `{shown}`, as `{found[0]}`. {reason}".rstrip())
    return "\n".join(lines) + "\n"


def render(results: Path = RESULTS) -> str:
    """The page."""

    def read(name: str) -> Any:
        return json.loads((results / name).read_text())

    return f"""# Conformance

Written by `python -m tests.conformance.report` from `benchmarks/results/`, which `make conformance`
takes anew.

## Sharding is invisible

Random tables under every strategy, kind of lookup, number of ranks and simulated nodes, wire and
optimizer, trained for three steps and held against the unsharded model on one process: outputs,
keys, weights or gradients, optimizer state, the dense layer, names in the state dict.

With the fp32 wire all values agree to 1e-5 of the largest; and bit for bit for table-wise tables,
and for column-wise ones under elementwise optimizers (not where ids are made distinct first, or
samples share bags on three ranks: a third of a sum is not the sum of thirds). Narrow wires are held
to an error bound for each value (`tests/conformance/bounds.py`). A forgotten loss scale, a coarser
wire and values out of place exceed it (`tests/conformance/test_bounds.py`).

`mixed` draws a strategy for each table. On one rank nothing travels, so there is one wire. Numbers
are of cases that equal.

{_matrix(read("conformance.json"))}
## Checkpoints under other plans

Three steps, a checkpoint, a load under another plan and on another number of ranks (each of 1 to 4
to each of 1 to 4, four being two nodes), and three more steps. Here weights and optimizer state
after the load and at the end, and the outputs between, equal those of the unsharded run that never
stopped.

TorchRec is held to its own run that never stopped, saved and loaded by
`torch.distributed.checkpoint` from the state dicts of model and optimizer. What it cannot train on
gloo, it `cannot run`.

{_checkpoints(read("conformance-checkpoints.json"), read("conformance-checkpoints-peer.json"))}
## The same in TorchRec

The same tables, weights, plan and batches in TorchRec 1.8.0, on the same ranks: outputs and weights
agree to 1e-5 over five steps (`tests/parity/`). All ranks have batches of one size and a part of
each row-wise table, which TorchRec needs on gloo.

{_parity(read("parity.json"))}"""


if __name__ == "__main__":
    PAGE.write_text(render())
