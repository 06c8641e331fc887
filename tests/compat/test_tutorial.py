"""The calls of TorchRec's introduction, in its order, on data of our own, with its output.

The calls run in a process of their own, once with TorchRec's names and once with ours.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import copy
import os
from typing import List

import torch
import torch.distributed as dist

{import_line}
from torchrec import JaggedTensor, KeyedJaggedTensor

# -- modules and data types

ebc = torchrec.EmbeddingBagCollection(
    device="cpu",
    tables=[
        torchrec.EmbeddingBagConfig(
            name="films",
            embedding_dim=8,
            num_embeddings=40,
            feature_names=["film"],
            pooling=torchrec.PoolingType.SUM,
        ),
        torchrec.EmbeddingBagConfig(
            name="readers",
            embedding_dim=8,
            num_embeddings=30,
            feature_names=["reader"],
            pooling=torchrec.PoolingType.MEAN,
        ),
    ],
)
show("tables", ebc.embedding_bags)
film = JaggedTensor(values=torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
show("offsets", film.offsets())
show("dense", film.to_dense())
show("jagged", film)
reader = JaggedTensor(values=torch.tensor([2, 3, 4]), lengths=torch.tensor([0, 3]))
kjt = KeyedJaggedTensor.from_jt_dict({"film": film, "reader": reader})
show("keys", kjt.keys())
show("lengths", kjt.lengths())
show("values", kjt.values())
assert isinstance(kjt.to_dict()["film"], JaggedTensor)
show("keyed", kjt)
result = ebc(kjt)
show("pooled", result.keys(), tuple(result.values().shape))
show("parts", {name: tuple(part.shape) for name, part in result.to_dict().items()})
weight = ebc.embedding_bags["films"].weight
torch.testing.assert_close(result["film"], torch.stack([weight[5], weight[7] + weight[1]]))
weight = ebc.embedding_bags["readers"].weight
torch.testing.assert_close(result["reader"][1], weight[2:5].mean(0))

# -- sharding

os.environ["RANK"] = "0"
os.environ["WORLD_SIZE"] = "1"
dist.init_process_group(backend="gloo", store=dist.HashStore(), rank=0, world_size=1)

from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import LazyAwaitable, ShardingEnv

sharder = EmbeddingBagCollectionSharder()
pg = dist.GroupMember.WORLD
planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"))
plan = planner.collective_plan(ebc, [sharder], pg)
show("plan", plan)
env = ShardingEnv.from_process_group(pg)
sharded_ebc = sharder.shard(ebc, plan.plan[""], env, torch.device("cpu"))
show("sharded", type(sharded_ebc).__name__)


class Ones(LazyAwaitable[torch.Tensor]):
    def __init__(self, size: List[int]) -> None:
        super().__init__()
        self._size = size

    def _wait_impl(self) -> torch.Tensor:
        return torch.ones(self._size)


show("awaited", Ones([2, 1]).wait().tolist())
output = sharded_ebc(kjt)
show("awaitable", type(output).__name__)
kt = output.wait()
show("kt", type(kt).__name__, kt.keys(), tuple(kt.values().shape))
torch.testing.assert_close(kt.values(), result.values())
model = torchrec.distributed.DistributedModelParallel(ebc, device=torch.device("cpu"))
torch.testing.assert_close(model(kjt).wait().values(), result.values())

# -- optimizers

from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

try:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    adagrad = EmbOptimType.EXACT_ROWWISE_ADAGRAD
except ImportError:
    adagrad = "EXACT_ROWWISE_ADAGRAD"
fused_params = {"optimizer": adagrad, "learning_rate": 0.02, "eps": 0.002}
fused = EmbeddingBagCollectionSharder(fused_params=fused_params)
sharded_fused = fused.shard(ebc, plan.plan[""], env, torch.device("cpu"))
show("fused", sharded_fused.fused_optimizer)
assert type(sharded_fused.fused_optimizer) is CombinedOptimizer
ebc_apply = copy.deepcopy(ebc)
for name, param in ebc_apply.named_parameters():
    show("parameter", name)
    apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.5})
sharded_apply = sharder.shard(ebc_apply, plan.plan[""], env, torch.device("cpu"))
show("applied", sharded_apply.fused_optimizer)
assert type(sharded_apply.fused_optimizer) is CombinedOptimizer
show("rest", dict(in_backward_optimizer_filter(sharded_fused.named_parameters())).keys())
losses = []
for _ in range(2):
    pooled = sharded_fused(kjt).wait().values()
    loss = torch.sum(torch.ones_like(pooled) - pooled)
    losses.append(loss.item())
    loss.backward()
show("falls", losses[1] < losses[0])


class InferenceModule(torch.nn.Module):
    def __init__(self, ebc: torchrec.EmbeddingBagCollection):
        super().__init__()
        self.ebc_ = ebc

    def forward(self, kjt: KeyedJaggedTensor):
        return self.ebc_(kjt)


for name, param in InferenceModule(ebc).named_parameters():
    show("serves", name, tuple(param.shape), param.dtype)
dist.destroy_process_group()
"""

EXPECTED = """
tables: ModuleDict(
  (films): EmbeddingBag(40, 8, mode='sum')
  (readers): EmbeddingBag(30, 8, mode='mean')
)
offsets: tensor([0, 1, 3])
dense: [tensor([5]), tensor([7, 1])]
jagged: JaggedTensor({
    [[5], [7, 1]]
})
keys: ['film', 'reader']
lengths: tensor([1, 2, 0, 3])
values: tensor([5, 7, 1, 2, 3, 4])
keyed: KeyedJaggedTensor({
    "film": [[5], [7, 1]],
    "reader": [[], [2, 3, 4]]
})
pooled: ['film', 'reader'] (2, 16)
parts: {'film': (2, 8), 'reader': (2, 8)}
plan: module:
param   | sharding type | compute kernel | ranks
------- | ------------- | -------------- | -----
films   | table_wise    | fused          | [0]
readers | table_wise    | fused          | [0]

param   | shard offsets | shard sizes | placement
------- | ------------- | ----------- | ----------
films   | [0, 0]        | [40, 8]     | rank:0/cpu
readers | [0, 0]        | [30, 8]     | rank:0/cpu
sharded: ShardedEmbeddingBagCollection
awaited: [[1.0], [1.0]]
awaitable: EmbeddingBagCollectionAwaitable
kt: KeyedTensor ['film', 'reader'] (2, 16)
fused: Parameter Group 0 lr: 0.02
parameter: embedding_bags.films.weight
parameter: embedding_bags.readers.weight
applied: Parameter Group 0 lr: 0.5
rest: dict_keys([])
falls: True
serves: ebc_.embedding_bags.films.weight (40, 8) torch.float32
serves: ebc_.embedding_bags.readers.weight (30, 8) torch.float32
"""

SHOW = """
import re

def show(name, *shown):
    text = " ".join(map(str, shown))
    if name in ("fused", "applied"):  # the lines that the introduction shows of an optimizer
        text = " ".join(re.findall(r"Parameter Group 0|\\blr: [0-9.]+", text))
    print(f"{name}: {text.strip()}")
"""


@pytest.mark.parametrize("names", ["torchrec", "recsys"])
def test_the_introduction_does_what_it_shows(names: str) -> None:
    line = "from recsys.compat import torchrec as compat; compat.install(); import torchrec"
    script = SCRIPT.replace("{import_line}", line if names == "torchrec" else "import torchrec")
    if names == "recsys":
        script = script.replace("torchrec", "recsys")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHOW + script],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == EXPECTED.strip()
