"""Several tasks on shared experts.

Ma et al., "Modeling task relationships in multi-task learning with multi-gate mixture-of-experts",
KDD 2018; Tang et al., "Progressive layered extraction (PLE): a novel multi-task learning model for
personalized recommendations", RecSys 2020.

Shapes: `B` samples, `N` columns of the input, `E` experts, `H` columns of an expert, `T` tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.modules.ctr.inputs import FlatInput
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.mlp import MLP
from recsys.sparse import KeyedJaggedTensor

__all__ = ["PLE", "MMoE", "MultiTask"]


@final
class MMoE(nn.Module):
    """Experts that all tasks read; each task mixes their outputs by a gate of its own.

    Args:
        in_features: `N`.
        num_tasks: `T`.
        num_experts: `E`.
        expert_sizes: Layers of an expert; the last is `H`.
        tower_sizes: Layers of a task after its gate, before one linear layer; empty for none.
        dropout: As in `MLP`.
        device: Device of the parameters.

    Raises:
        ValueError: A size is out of its range.

    Example:
        >>> MMoE(5, num_tasks=2, num_experts=3)(torch.ones(4, 5)).shape
        torch.Size([4, 2])
    """

    @checked
    def __init__(
        self,
        in_features: int,
        num_tasks: int,
        num_experts: int = 8,
        expert_sizes: Sequence[int] = (256, 128),
        tower_sizes: Sequence[int] = (64,),
        *,
        dropout: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.in_features = whole("MMoE.in_features", in_features)
        whole("MMoE.num_experts", num_experts)
        self.experts = _experts(num_experts, in_features, expert_sizes, dropout, device)
        self.gates = nn.ModuleList(
            nn.Linear(in_features, num_experts, device=device)
            for _ in range(whole("MMoE.num_tasks", num_tasks))
        )
        self.towers = _towers(num_tasks, expert_sizes[-1], tower_sizes, dropout, device)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, T]`.

        Args:
            x: `[B, N]`.
        """
        experts = torch.stack([expert(x) for expert in self.experts], 1)
        of_tasks = [_mixed(gate(x), experts) for gate in self.gates]
        logits = [
            tower(task_input) for tower, task_input in zip(self.towers, of_tasks, strict=True)
        ]
        return torch.cat(logits, 1)


@final
class PLE(nn.Module):
    """Layers of experts that all tasks read, and experts of each task.

    The gate of a task mixes its own experts and the shared ones, the shared gate mixes all; in the
    next layer each reads its own mixture.

    Args:
        in_features: `N`.
        num_tasks: `T`.
        num_layers: Layers of experts; with 1 this is customized gate control (CGC).
        num_shared: Shared experts of a layer.
        num_own: Experts of each task in a layer.
        expert_sizes: Layers of an expert; the last is `H`.
        tower_sizes: Layers of a task after the last gate, before one linear layer; empty for none.
        dropout: As in `MLP`.
        device: Device of the parameters.

    Raises:
        ValueError: A size is out of its range.

    Example:
        >>> PLE(5, num_tasks=2)(torch.ones(4, 5)).shape
        torch.Size([4, 2])
    """

    @checked
    def __init__(
        self,
        in_features: int,
        num_tasks: int,
        num_layers: int = 2,
        num_shared: int = 2,
        num_own: int = 2,
        expert_sizes: Sequence[int] = (256, 128),
        tower_sizes: Sequence[int] = (64,),
        *,
        dropout: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.in_features = whole("PLE.in_features", in_features)
        whole("PLE.num_layers", num_layers)
        self.num_tasks = whole("PLE.num_tasks", num_tasks)
        self.experts, self.gates = nn.ModuleList(), nn.ModuleList()
        for layer in range(num_layers):
            columns = in_features if layer == 0 else expert_sizes[-1]
            counts = [whole("PLE.num_own", num_own)] * num_tasks
            counts.append(whole("PLE.num_shared", num_shared))  # the shared ones are the last
            self.experts.append(
                nn.ModuleList(_experts(n, columns, expert_sizes, dropout, device) for n in counts)
            )
            read = [num_own + num_shared] * num_tasks
            if layer < num_layers - 1:
                read.append(num_own * num_tasks + num_shared)
            self.gates.append(nn.ModuleList(nn.Linear(columns, n, device=device) for n in read))
        self.towers = _towers(num_tasks, expert_sizes[-1], tower_sizes, dropout, device)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, T]`.

        Args:
            x: `[B, N]`.
        """
        inputs = [x] * (self.num_tasks + 1)
        layers: Iterable[Any] = zip(self.experts, self.gates, strict=True)
        for groups, gates in layers:
            read = [
                torch.stack([expert(task_input) for expert in group], 1)
                for group, task_input in zip(groups, inputs, strict=True)
            ]
            sources = [torch.cat([task_level, read[-1]], 1) for task_level in read[:-1]]
            sources.append(torch.cat(read, 1))
            inputs = [
                _mixed(gate(task_input), source)
                for gate, task_input, source in zip(gates, inputs, sources, strict=False)
            ]
        logits = [tower(task_input) for tower, task_input in zip(self.towers, inputs, strict=True)]
        return torch.cat(logits, 1)


@final
class MultiTask(nn.Module):
    """Look up all features and apply a model of several tasks.

    `DLRMTrain` trains it on labels `[B, T]` by the mean binary cross entropy over samples and
    tasks; `label_mask` of a batch leaves out missing labels.

    Args:
        embedding_bag_collection: Tables of any dims. Sharding replaces this submodule.
        dense_in_features: Columns of the dense features; 0 for none.
        tasks: `MMoE` or `PLE`; its `in_features` is the number of dense features and columns
            of all embeddings.

    Raises:
        ValueError: `tasks` reads another number of columns.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=10, feature_names=["film"]
        ... )
        >>> model = MultiTask(EmbeddingBagCollection(tables=[films]), 3, MMoE(3 + 4, num_tasks=2))
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
        >>> model(torch.ones(2, 3), ids).shape
        torch.Size([2, 2])
    """

    @checked
    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        tasks: MMoE | PLE,
    ) -> None:
        super().__init__()
        self.inputs = FlatInput(embedding_bag_collection, dense_in_features)
        if tasks.in_features != self.inputs.out_features:
            raise ValueError(
                f"tasks must read {self.inputs.out_features} columns, of the dense features "
                f"and all embeddings; received in_features={tasks.in_features}."
            )
        self.tasks = tasks

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits `[B, T]`.

        Args:
            dense_features: `[B, dense_in_features]`.
            sparse_features: Ids of all features, batch size `B`.
        """
        logits: Tensor = self.tasks(self.inputs(dense_features, sparse_features))
        return logits


def _experts(
    count: int,
    in_features: int,
    sizes: Sequence[int],
    dropout: float,
    device: torch.device | None,
) -> nn.ModuleList:
    if not sizes:
        raise ValueError("expert_sizes must have at least one layer; received none.")
    return nn.ModuleList(
        MLP(in_features, [*sizes], device=device, dropout=dropout) for _ in range(count)
    )


def _towers(
    num_tasks: int,
    in_features: int,
    sizes: Sequence[int],
    dropout: float,
    device: torch.device | None,
) -> nn.ModuleList:
    columns = sizes[-1] if sizes else in_features
    return nn.ModuleList(
        nn.Sequential(
            MLP(in_features, [*sizes], device=device, dropout=dropout),
            nn.Linear(columns, 1, device=device),
        )
        for _ in range(num_tasks)
    )


def _mixed(gate: Tensor, experts: Tensor) -> Tensor:
    """Return `[B, H]`, the mean of `[B, E, H]` weighted by the softmax of `[B, E]`."""
    return (gate.softmax(1).unsqueeze(2) * experts).sum(1)
