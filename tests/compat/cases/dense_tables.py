"""Tables with the kernel `dense`: plain parameters, for the script's own optimizer; on one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.compat.cases.distributed import CPU, _tables, _world


def _trained(fused_params: Any, how: Any, lr: float = 0.5, in_backward: bool = False) -> Any:
    """Return the effect of a step of the script's SGD on tables sharded in given ways."""
    import torchrec
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = _tables()
            if in_backward:
                table = self.ebc.embedding_bags["a"]
                apply_optimizer_in_backward(torch.optim.SGD, table.parameters(), {"lr": 0.25})

        def forward(self, features: Any) -> Any:
            pooled = self.ebc(features)
            return pooled["fa"] * 2 + pooled["fb"]

    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params)
    plan = construct_module_sharding_plan(
        _tables(), how(), sharder=sharder, local_size=1, world_size=1, device_type="cpu"
    )
    plans = ShardingPlan({"ebc": plan})
    with _world():
        model = DistributedModelParallel(Model(), device=CPU, plan=plans, sharders=[sharder])
        with torch.no_grad():
            for value in model.state_dict().values():
                for part in value.local_shards() if hasattr(value, "local_shards") else [value]:
                    part = getattr(part, "tensor", part)
                    part.copy_(torch.arange(160.0).reshape(10, 16) / 100)
        features = torchrec.KeyedJaggedTensor(
            ["fa", "fb"], torch.tensor([1, 2, 3, 3]), lengths=torch.tensor([1, 1, 0, 2])
        )
        parameters = dict(model.named_parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        output = model(features)
        output.sum().backward()
        gradients = {name: value.grad for name, value in sorted(parameters.items())}
        optimizer.step()
        model.fused_optimizer.step()
        return [
            output,
            {name: list(value.shape) for name, value in sorted(parameters.items())},
            gradients,
            model(features),
            sorted(model.state_dict()),
            sorted(model.fused_optimizer.params),
            len(list(model.parameters())),
        ]


def table_wise_and_data_parallel() -> Any:
    from torchrec.distributed.sharding_plan import data_parallel, table_wise

    def how() -> Any:
        return {"a": table_wise(rank=0, compute_kernel="dense"), "b": data_parallel()}

    return [_trained(None, how), _trained({"learning_rate": 0.1}, how)]


def column_and_table_wise() -> Any:
    from torchrec.distributed.sharding_plan import column_wise, table_wise

    def how() -> Any:
        return {
            "a": column_wise(ranks=[0], compute_kernel="dense"),
            "b": table_wise(rank=0, compute_kernel="dense"),
        }

    return _trained({"learning_rate": 0.1, "optimizer": _sgd()}, how)


def _sgd() -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return EmbOptimType.EXACT_SGD


def one_fused_one_dense() -> Any:
    from torchrec.distributed.sharding_plan import table_wise

    def how() -> Any:
        return {
            "a": table_wise(rank=0, compute_kernel="fused"),
            "b": table_wise(rank=0, compute_kernel="dense"),
        }

    return _trained({"learning_rate": 0.25, "optimizer": _sgd()}, how)


def fused_by_the_script_beside_dense() -> Any:
    from torchrec.distributed.sharding_plan import table_wise

    def how() -> Any:
        return {
            "a": table_wise(rank=0, compute_kernel="fused"),
            "b": table_wise(rank=0, compute_kernel="dense"),
        }

    return _trained(None, how, in_backward=True)
