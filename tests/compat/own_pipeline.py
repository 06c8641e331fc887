"""A script for TorchRec with a train pipeline of its own; the same code runs on recsys.

torchrun --nproc-per-node=2 own_pipeline.py
torchrun --nproc-per-node=2 -m recsys.compat own_pipeline.py
"""

import functools
import json
from collections import deque

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Multistreamable

FEATURES = ["user", "film", "genre"]
DEVICE = torch.device("cpu")
STEPS = 20


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over = torch.nn.Linear(8 * len(FEATURES), 1)
        self.ebc = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=8,
                    num_embeddings=24,
                    feature_names=[name],
                    init_fn=functools.partial(torch.nn.init.constant_, val=0.01 * (i + 1)),
                )
                for i, name in enumerate(FEATURES)
            ],
        )

    def forward(self, features):
        pooled = self.ebc(features)
        assert isinstance(pooled, LazyAwaitable)
        return self.over(torch.cat([pooled[name] for name in FEATURES], dim=1)).squeeze(1)


class PipelinedForward:
    """Called in place of a sharded module: takes the batch that was sent before."""

    def __init__(self, module):
        self.module = module
        self.sent = deque()

    def start(self, features):
        context = self.module.create_context()
        assert isinstance(context, Multistreamable)
        request = self.module.input_dist(context, features)
        assert isinstance(request, Awaitable)
        tensors = request.wait()
        assert isinstance(tensors, Awaitable)
        self.sent.append((context, tensors))

    def __call__(self, features):
        context, tensors = self.sent.popleft()
        return self.module.compute_and_output_dist(context, tensors.wait())


class Pipeline:
    """Copies one batch, sends the ids of another and trains on a third in each `progress`."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.forwards = []
        for module in model.modules():
            if isinstance(module, ShardedModule):
                self.forwards.append(PipelinedForward(module))
                module.forward = self.forwards[-1]
        self.batches = deque()
        self.copied = None

    def copy(self, data):
        self.copied = next(data, None)
        if self.copied is not None:
            features, labels = self.copied
            self.copied = features.to(DEVICE), labels.to(DEVICE)

    def send(self, data):
        if self.copied is not None:
            for forward in self.forwards:
                forward.start(self.copied[0])
            self.batches.append(self.copied)
            self.copy(data)

    def progress(self, data):
        if not self.batches:
            self.copy(data)
            self.send(data)
        self.send(data)
        return train(self.model, self.optimizer, *self.batches.popleft())


def train(model, optimizer, features, labels):
    optimizer.zero_grad()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(features), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def batches():
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        lengths = torch.randint(0, 4, (len(FEATURES) * 4,), generator=generator)
        ids = torch.randint(0, 24, (int(lengths.sum()),), generator=generator)
        yield KeyedJaggedTensor.from_lengths_sync(FEATURES, ids, lengths), (lengths[:4] > 1).float()


def make():
    torch.manual_seed(0)
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.5})
    plan = construct_module_sharding_plan(
        model.ebc,
        {"user": row_wise(), "film": table_wise(rank=1), "genre": column_wise(ranks=[1, 0])},
        world_size=2,
        local_size=2,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=DEVICE,
        plan=ShardingPlan(plan={"ebc": plan}),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.SGD(params, lr=0.1),
    )
    return model, dense


def main():
    dist.init_process_group("gloo")
    model, dense = make()
    plain = [train(model, dense, *batch) for batch in batches()]
    pipeline, data = Pipeline(*make()), batches()
    pipelined = [pipeline.progress(data) for _ in range(STEPS)]
    found = [None, None]
    dist.all_gather_object(found, {"plain": plain, "pipelined": pipelined})
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
