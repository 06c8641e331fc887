"""Jagged attention beside PyTorch's padded attention: time by length, and memory by number of ids.

    python -m benchmarks.attention [--out benchmarks/results/attention-cpu.json]

Lengths of histories follow Zipf's law with exponent 1.05 up to a limit. Forward and backward, one
thread; contenders take turns in one process and a ratio is one of thread CPU time: its median and
its extremes over pairs of turns. The padded one pads, attends (`scaled_dot_product_attention`, or
the formula of HSTU's SiLU), and takes the values out again. Memory is the peak of a process of its
own above what it needs before the call.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.hashed import take_turns
from recsys.sparse import JaggedTensor
from recsys.sparse.ops import attention

RESULTS = Path(__file__).parent / "results"
CASES = ((256, 200, 2, 32), (256, 200, 4, 16), (16, 1024, 4, 32))
MEMORY_BAGS = (32, 64, 128, 256, 512)
EXPONENT = 1.05


class Histories(NamedTuple):
    """Queries, keys and values of bags; `inside` are their places in the padded tensors."""

    lengths: Tensor
    inside: Tensor
    parts: list[Tensor]

    def jagged(self) -> list[JaggedTensor]:
        return [JaggedTensor(part, lengths=self.lengths) for part in self.parts]

    def pad(self, part: Tensor) -> Tensor:
        """Return `[bags, heads, longest, columns]`."""
        bags, longest = len(self.lengths), int(self.lengths.max())
        rows = torch.zeros(bags * longest, *part.shape[1:]).index_copy(0, self.inside, part)
        return rows.view(bags, longest, *part.shape[1:]).transpose(1, 2)

    def take_out(self, padded: Tensor) -> Tensor:
        """Return `[values, heads, columns]`."""
        return padded.transpose(1, 2).flatten(0, 1)[self.inside]


def draw(bags: int, limit: int, heads: int, columns: int) -> Histories:
    """Draw histories by Zipf's law."""
    weights = torch.arange(1, limit + 1, dtype=torch.float64) ** -EXPONENT
    lengths = torch.multinomial(weights, bags, replacement=True) + 1
    inside = (torch.arange(int(lengths.max())) < lengths[:, None]).flatten().nonzero().flatten()
    shape = int(lengths.sum()), heads, columns
    return Histories(lengths, inside, [torch.randn(shape, requires_grad=True) for _ in range(3)])


def ours(histories: Histories, kind: Any, limit: int) -> Tensor:
    query, key, value = histories.jagged()
    return attention(query, key, value, max_length=limit, kind=kind).values()


def padded_softmax(histories: Histories) -> Tensor:
    query, key, value = map(histories.pad, histories.parts)
    return histories.take_out(F.scaled_dot_product_attention(query, key, value, is_causal=True))


def padded_silu(histories: Histories, limit: int) -> Tensor:
    query, key, value = map(histories.pad, histories.parts)
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return histories.take_out((F.silu(scores) / limit).masked_fill(later, 0) @ value)


def measure_time(pairs: int) -> dict[str, Any]:
    """Return the ratios of our time to that of padded attention."""
    found = {}
    for bags, limit, heads, columns in CASES:
        histories = draw(bags, limit, heads, columns)
        others: dict[str, Callable[[], Tensor]] = {
            "softmax": lambda: padded_softmax(histories),  # noqa: B023
            "silu": lambda: padded_silu(histories, limit),  # noqa: B023
        }
        for kind, other in others.items():
            torch.testing.assert_close(ours(histories, kind, limit), other(), atol=1e-4, rtol=1e-4)
            times = take_turns(
                lambda: ours(histories, kind, limit).sum().backward(),  # noqa: B023
                lambda: other().sum().backward(),  # noqa: B023
                pairs,
            )
            name = f"{bags} histories up to {limit}, {heads} heads of {columns}, {kind}"
            found[name] = times.summary()
    return found


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure_memory(bags: int) -> dict[str, Any]:
    """Return the peak of one step with histories of 300 values each, in this process."""
    columns = torch.randn(bags * 300, 2, 32)
    parts = [columns.clone().requires_grad_() for _ in range(3)]
    histories = Histories(torch.full((bags,), 300), torch.arange(bags * 300), parts)
    small = Histories(torch.tensor([300]), torch.arange(300), [part[:300] for part in parts])
    ours(small, "softmax", 300).sum().backward()  # libraries are loaded, gradients are allocated
    before = peak_mib()
    ours(histories, "softmax", 300).sum().backward()
    return {"ids": bags * 300, "mib": round(peak_mib() - before, 1)}


def run(*options: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.attention", *options]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--memory-of", type=int, help="only this: peak of that many histories")
    parser.add_argument("--out", type=Path, default=RESULTS / "attention-cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.memory_of is not None:
        print(json.dumps(measure_memory(arguments.memory_of)))
        return
    from benchmarks.__main__ import machine

    result = {
        "machine": machine(),
        "pairs": arguments.pairs,
        "time beside padded": measure_time(arguments.pairs),
        "memory": [run("--memory-of", str(bags)) for bags in MEMORY_BAGS],
    }
    print(json.dumps(result, indent=1))
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
