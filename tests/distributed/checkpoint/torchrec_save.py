"""Train a model of TorchRec on two ranks and save it by torch.distributed.checkpoint.

    torchrun --standalone --nproc-per-node=2 -m tests.distributed.checkpoint.torchrec_save \
        table_wise RowWiseAdagrad FOLDER

Each rank writes its tables to `FOLDER/rank-N.pt`; the checkpoint is `FOLDER/saved`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

TABLES = {"t_user": (10, 8), "t_item": (7, 4)}
FEATURES = ["f0", "f1"]


def parts_of(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return the offsets and the values of each part on this rank."""
    if isinstance(value, torch.Tensor) and type(value).__name__ != "DTensor":
        if hasattr(value, "local_shards"):
            return [
                (tuple(s.metadata.shard_offsets), s.tensor.clone()) for s in value.local_shards()
            ]
        return [((0,) * value.dim(), value.detach().clone())]
    return [
        (tuple(chunk.offsets), tensor.clone())
        for chunk, tensor in zip(
            value.__create_chunk_list__(), value.to_local().local_shards(), strict=True
        )
    ]


def main() -> None:
    kind, algorithm, path = sys.argv[1:]
    warnings.filterwarnings("ignore")
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, optim
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    ebc = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[feature]
            )
            for feature, (name, (rows, dim)) in zip(FEATURES, TABLES.items(), strict=True)
        ],
        device=cpu,
    )
    found = getattr(optim, algorithm, None) or getattr(torch.optim, algorithm)
    apply_optimizer_in_backward(found, ebc.parameters(), {"lr": 0.1})
    model = torch.nn.ModuleDict({"ebc": ebc, "over": torch.nn.Linear(12, 1)})
    sharder: Any = EmbeddingBagCollectionSharder()
    places = {
        "table_wise": {"t_user": plans.table_wise(rank=0), "t_item": plans.table_wise(rank=1)},
        "row_wise": {name: plans.row_wise() for name in TABLES},
    }
    plan = plans.construct_module_sharding_plan(
        ebc, places[kind], sharder=sharder, local_size=2, world_size=2, device_type="cpu"
    )
    sharded = DistributedModelParallel(
        model, device=cpu, plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
    )
    dense = KeyedOptimizerWrapper(
        {name: param for name, param in sharded.named_parameters() if name.startswith("over.")},
        lambda params: torch.optim.Adam(params, lr=0.1),
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, dense])
    parts = sharded.module
    for step in range(3):
        batch = KeyedJaggedTensor(
            FEATURES,
            values=torch.tensor([1, 2 + step, 3, 4, 5, 6 - step]),
            lengths=torch.tensor([1, 2, 2, 1]),
        )
        dense.zero_grad()
        parts["over"](parts["ebc"](batch).values()).sum().backward()
        dense.step()
    state = {"model": sharded.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=Path(path) / "saved")
    values = {name: parts_of(value) for name, value in state["model"].items()}
    for param, states in state["optimizer"]["state"].items():
        values |= {f"{param}.{key}": parts_of(value) for key, value in states.items()}
    torch.save(values, Path(path) / f"rank-{rank}.pt")
    dist.barrier()
    os._exit(0)  # TorchRec's threads may abort a process that ends


if __name__ == "__main__":
    main()
