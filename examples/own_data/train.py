"""From a table of clicks to scores of a served model.

python examples/own_data/train.py CLICKS.parquet OUT

With torchrun it trains on several ranks. The table has the columns of
`recsys.datasets.synthetic.ClickModel`; docs/own_data.md explains the steps.
"""

import os
import sys
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from recsys import DistributedModelParallel, EmbeddingBagCollection
from recsys.datasets import TimeSplit, parquet
from recsys.distributed.checkpoint import load_checkpoint
from recsys.distributed.types import ShardingEnv
from recsys.features import Categorical, FeatureSpec, Hashed, Label, Numeric, Timestamp
from recsys.inference import package, quantize_embeddings, score
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward, in_backward_optimizer_filter
from recsys.training import Trainer

path, out = sys.argv[1], Path(sys.argv[2])
split = TimeSplit("time", validation="2024-01-23T09:36:00", test="2024-01-26T04:48:00")
spec = FeatureSpec(
    [
        Hashed("user", rows=100_000),
        Categorical("film", min_count=3),
        Categorical("city"),
        Categorical("genre"),
        Categorical("tags", is_list=True),
        Numeric("age", buckets=10),
        Numeric("price", log1p=True, standardize=True),
        Timestamp("time"),
        Label("click"),
    ]
)


def build_model() -> DLRMTrain:
    torch.manual_seed(0)
    tables = EmbeddingBagCollection(tables=spec.tables(dim=16))
    return DLRMTrain(DLRM(tables, len(spec.dense_names), [16, 16], [64, 1]))


if "RANK" in os.environ:
    dist.init_process_group("gloo")
env = ShardingEnv.default()
spec.fit(ds.dataset(path).filter(split.filter_of("train", pq.read_schema(path))))
model = build_model()
apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.03})
sharded = DistributedModelParallel(model, env=env, device=torch.device("cpu"))
settings = {"rank": env.rank, "world_size": env.world_size, "divide": "batches", "split": split}
readers = {
    part: parquet(path, spec, 512 // env.world_size, part=part, shuffle=part == "train", **settings)
    for part in ("train", "validation", "test")
}
dense = dict(in_backward_optimizer_filter(sharded.named_parameters())).values()
adam = torch.optim.Adam(dense, lr=0.001)
trainer = Trainer(sharded, adam, out, epochs=10, patience=1, overwrite=True)
trainer.fit(readers["train"], readers["validation"])
print(f"rank {env.rank}: test {trainer.evaluate(readers['test'])}")
if dist.is_initialized():
    dist.destroy_process_group()

if env.rank == 0:
    served = build_model()
    load_checkpoint(trainer.best, served)
    example = pq.read_table(path, columns=spec.column_names(labels=False)).slice(0, 2)
    version = package(
        quantize_embeddings(served.model.eval()), out / "models/clicks", example, spec=spec
    )
    print(score(version, path, out / "scores", keys=["user", "click"]))
