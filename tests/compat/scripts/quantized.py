"""From a trained collection to a program: quantize, shard over one process, trace, script."""

import json
import os

import torch
import torchrec
from torch import nn, quantization
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.shard import _shard_modules
from torchrec.distributed.types import ShardingEnv
from torchrec.fx import Tracer
from torchrec.modules.embedding_configs import QuantConfig
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)


class InferenceModule(nn.Module):
    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc_ = ebc

    def forward(self, kjt: KeyedJaggedTensor) -> torchrec.KeyedTensor:
        return self.ebc_(kjt)


def main() -> None:
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection(
        device=torch.device("cpu"),
        tables=[
            EmbeddingBagConfig(
                name=f"{name}_table",
                embedding_dim=64,
                num_embeddings=4096,
                feature_names=[name],
            )
            for name in ("product", "user")
        ],
    )
    with torch.no_grad():
        for table in ebc.embedding_bags.values():
            rows, columns = table.weight.shape
            table.weight.copy_(torch.arange(rows * columns).view(rows, columns).sin())
    kjt = KeyedJaggedTensor(
        keys=["product", "user"],
        values=torch.tensor([101, 202, 303, 404, 505, 606]),
        lengths=torch.tensor([2, 0, 1, 1, 1, 1]),
    )
    qconfig = QuantConfig(
        activation=quantization.PlaceholderObserver.with_args(dtype=torch.float),
        weight=quantization.PlaceholderObserver.with_args(dtype=torch.int8),
    )
    quantized = quantization.quantize_dynamic(
        InferenceModule(ebc),
        qconfig_spec={EmbeddingBagCollection: qconfig},
        mapping={EmbeddingBagCollection: QuantEmbeddingBagCollection},
        inplace=False,
    )
    buffers = {name: [list(b.shape), str(b.dtype)] for name, b in quantized.named_buffers()}
    exact, answer = ebc(kjt), quantized(kjt)
    sharded = _shard_modules(
        module=quantized, device=torch.device("cpu"), env=ShardingEnv.from_local(1, 0)
    )
    graph = Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"]).trace(sharded)
    scripted = torch.jit.script(torch.fx.GraphModule(sharded, graph))
    found = scripted(kjt)
    facts = {
        "buffers": buffers,
        "keys": found.keys(),
        "shape": list(found.values().shape),
        "values": found.values()[0, :4].tolist(),
        "as sharded": torch.equal(found.values(), sharded(kjt).values()),
        "as quantized": torch.equal(found.values(), answer.values()),
        "close": torch.allclose(found.values(), exact.values(), atol=2e-2),
    }
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
