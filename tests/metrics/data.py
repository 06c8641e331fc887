"""Random outputs of a model, equal in every process."""

from __future__ import annotations

import numpy as np
import torch

TASKS = ("click", "buy")
Batch = dict[str, torch.Tensor]


def model_out(seed: int, num_samples: int, tasks: tuple[str, ...] = TASKS) -> Batch:
    """Labels, predictions and weights of tasks, and what else metrics need."""
    generator = torch.Generator().manual_seed(seed)
    out = {"session_id": torch.randint(0, 5, (num_samples,), generator=generator)}
    out["grouping_keys"] = torch.randint(0, 3, (num_samples,), generator=generator)
    out["tensor"] = torch.rand(num_samples, generator=generator)
    for task in tasks:
        prediction = torch.rand(num_samples, generator=generator)
        out[f"{task}_prediction"] = prediction
        out[f"{task}_label"] = (torch.rand(num_samples, generator=generator) < prediction).float()
        out[f"{task}_weight"] = torch.rand(num_samples, generator=generator)
    return out


def batches_of_rank(rank: int, num_samples: int = 16) -> list[Batch]:
    """More batches on some ranks than on others, and an empty one."""
    sizes = [num_samples] * (3 + rank % 2) + [0, num_samples // 2]
    return [model_out(100 * rank + place, size) for place, size in enumerate(sizes)]


def in_window(batches: list[Batch], max_samples: int) -> list[Batch]:
    """The last batches that fit into a window."""
    kept: list[Batch] = []
    for batch in reversed(batches):
        if sum(len(b["tensor"]) for b in [*kept, batch]) > max_samples:
            break
        kept.append(batch)
    return kept[::-1]


def column(batches: list[Batch], name: str) -> np.ndarray:
    """One output over batches, float64."""
    return torch.cat([batch[name] for batch in batches]).double().numpy()
