"""Quantized collections return what TorchRec's do, bit for bit, and store the same bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recsys.inference import quantize_embeddings
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.sparse import KeyedJaggedTensor
from tests.parity.peer import PeerPool, peer_mood

KEYS = ["x", "y", "z"]
SHAPES = [(200, "a", ["x", "y"]), (300, "b", ["z", "y"])]


def _batch(kind: Any, is_weighted: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4, (len(KEYS) * 32,), generator=generator)
    num_ids = int(lengths.sum())
    values = torch.randint(0, 200, (num_ids,), generator=generator)
    weights = torch.rand(num_ids, generator=generator) if is_weighted else None
    return kind(KEYS, values, weights, lengths)


def _outputs(output: Any, is_pooled: bool) -> dict[str, torch.Tensor]:
    if is_pooled:
        return dict(
            zip(output.keys(), output.values().split(output.length_per_key(), 1), strict=True)
        )
    return {name: bags.values() for name, bags in output.items()}


def compare(
    dtype: torch.dtype, output_dtype: torch.dtype, pooling: str, is_weighted: bool, dim: int
) -> None:
    """Quantizes the same tables here and there, and looks up the same batch."""
    import torchrec
    from torchrec.inference import modules as peer
    from torchrec.quant.embedding_modules import EmbeddingCollection as PeerRows

    is_pooled = pooling != "NONE"
    torch.manual_seed(0)
    if is_pooled:
        ours: Any = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(rows, dim, name, feature_names=f, pooling=PoolingType[pooling])
                for rows, name, f in SHAPES
            ],
            is_weighted=is_weighted,
        )
        theirs = torchrec.EmbeddingBagCollection(
            tables=[
                torchrec.EmbeddingBagConfig(
                    num_embeddings=rows,
                    embedding_dim=dim,
                    name=name,
                    feature_names=f,
                    pooling=torchrec.PoolingType[pooling],
                )
                for rows, name, f in SHAPES
            ],
            is_weighted=is_weighted,
        )
    else:
        ours = EmbeddingCollection(
            tables=[EmbeddingConfig(rows, dim, name, feature_names=f) for rows, name, f in SHAPES]
        )
        theirs = torchrec.EmbeddingCollection(
            tables=[
                torchrec.EmbeddingConfig(
                    num_embeddings=rows, embedding_dim=dim, name=name, feature_names=f
                )
                for rows, name, f in SHAPES
            ]
        )
    theirs.load_state_dict(ours.state_dict())
    kind = torchrec.EmbeddingCollection
    with peer_mood():
        quantized_there = peer.quantize_embeddings(
            nn.Sequential(theirs), dtype, False, [kind], {kind: PeerRows}, output_dtype
        )[0]
        expected = _outputs(
            quantized_there(_batch(torchrec.KeyedJaggedTensor, is_weighted)), is_pooled
        )
    quantized: Any = quantize_embeddings(ours, dtype, output_dtype=output_dtype)
    received = _outputs(quantized(_batch(KeyedJaggedTensor, is_weighted)), is_pooled)
    assert list(received) == list(expected)
    for name, values in expected.items():
        assert received[name].dtype is values.dtype is output_dtype
        torch.testing.assert_close(received[name], values, rtol=0, atol=0)
    if dtype not in (torch.quint4x2, torch.quint2x4):  # the peer's cannot be read as bytes
        state, state_there = quantized.state_dict(), quantized_there.state_dict()
        assert list(state) == list(state_there)
        assert all(torch.equal(state[name], state_there[name]) for name in state)


def compare_all(dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    """Every way of pooling, and dims that are and are not multiples of 4."""
    for dim in (8, 64) if dtype in (torch.quint4x2, torch.quint2x4) else (6, 8, 64):
        for pooling in ("SUM", "MEAN", "NONE"):
            for is_weighted in (False, True) if pooling != "NONE" else (False,):
                compare(dtype, output_dtype, pooling, is_weighted, dim)


@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.quint4x2, torch.quint2x4, torch.float16, torch.float32]
)
def test_quantized_collections_are_the_peers(
    peer_ranks: PeerPool, dtype: torch.dtype, output_dtype: torch.dtype
) -> None:
    peer_ranks(1, compare_all, dtype, output_dtype)
