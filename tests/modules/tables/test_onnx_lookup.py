"""Lookups in operations of ONNX, and ONNX programs, equal lookups of the collections."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.tables.onnx_lookup import look_up_plainly
from recsys.sparse import KeyedJaggedTensor

KEYS = ["c", "a", "unread", "b"]
DYNAMIC = {0: torch.export.Dim.DYNAMIC}


class Pooled(nn.Module):
    """Bags of three features, of two tables that pool in different ways."""

    def __init__(self, is_weighted: bool = False) -> None:
        super().__init__()
        last = PoolingType.SUM if is_weighted else PoolingType.MEAN
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(10, 4, "t", feature_names=["a"]),
                EmbeddingBagConfig(20, 8, "u", feature_names=["b", "c"], pooling=last),
            ],
            is_weighted=is_weighted,
        )

    def forward(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.ebc(KeyedJaggedTensor(KEYS, values, weights, lengths)).values()


class Sequences(nn.Module):
    """The ids of three features, and the rows that they name."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = EmbeddingCollection(
            tables=[
                EmbeddingConfig(10, 4, "t", feature_names=["a"]),
                EmbeddingConfig(20, 4, "u", feature_names=["b", "c"]),
            ],
            need_indices=True,
        )

    def forward(self, values: Tensor, lengths: Tensor) -> list[Tensor]:
        found = self.ec(KeyedJaggedTensor(KEYS, values, lengths=lengths))
        return [found[key].values() for key in "abc"] + [found[key].weights() for key in "abc"]


class Scores(nn.Module):
    """A DLRM."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(10, 8, f"t_{key}", feature_names=[key]) for key in KEYS]
        self.dlrm = DLRM(EmbeddingBagCollection(tables=tables), 3, [16, 8], [16, 1])

    def forward(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        return self.dlrm(dense, KeyedJaggedTensor(KEYS, values, lengths=lengths))


def _batch(size: int, most: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, lengths and weights of samples; if `most` is 1, of empty bags."""
    lengths = torch.randint(0, most, (len(KEYS) * size,))
    values = torch.randint(0, 10, (int(lengths.sum()),))
    return values, lengths, torch.rand(len(values))


def _listed(found: Tensor | list[Tensor]) -> list[Tensor]:
    return found if isinstance(found, list) else [found]


@pytest.mark.parametrize("most", [4, 1])
@pytest.mark.parametrize("pooling", ["SUM", "MEAN", "NONE"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_they_find_what_the_operation_finds(size: int, pooling: str, most: int) -> None:
    torch.manual_seed(size)
    is_weighted, is_sequence = pooling == "SUM", pooling == "NONE"
    tables = [torch.rand(10, 4), torch.rand(20, 4).bfloat16()]
    values, lengths, weights = _batch(size, most)
    parts = (tables, KEYS, size, values, lengths, weights if is_weighted else None)
    reads = (["a", "b", "c", "a"], [0, 1, 1, 1], [pooling, "SUM" if is_weighted else pooling])
    expected = torch.ops.recsys.look_up(*parts, *reads, is_sequence)
    torch.testing.assert_close(look_up_plainly(*parts, *reads, is_sequence), expected)


@pytest.mark.filterwarnings("ignore")  # of the exporter's own parts
def test_onnx_programs_give_equal_values(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs ONNX: make test SLOW=1 installs it")
    runtime = pytest.importorskip("onnxruntime", reason="needs ONNX: make test SLOW=1 installs it")
    torch.manual_seed(0)
    dlrm = Scores()
    for model in (Pooled(), Pooled(is_weighted=True), Sequences(), dlrm):
        model.eval()

        def batch(size: int, most: int = 4, model: nn.Module = model) -> tuple[Tensor, ...]:
            *ids, weights = _batch(size, most)
            if model is dlrm:
                return torch.rand(size, 3), *ids
            is_weighted = isinstance(model, Pooled) and model.ebc.is_weighted()
            return (*ids, weights) if is_weighted else (*ids,)

        example = batch(3)
        exported = torch.onnx.export(
            model, example, dynamo=True, dynamic_shapes=tuple(DYNAMIC for _ in example)
        )
        exported.save(tmp_path / "model.onnx")
        session = runtime.InferenceSession(tmp_path / "model.onnx")
        names = [given.name for given in session.get_inputs()]
        for given in [*map(batch, range(1, 7)), batch(2, most=1)]:
            feeds = {name: part.numpy() for name, part in zip(names, given, strict=True)}
            found = [torch.from_numpy(part) for part in session.run(None, feeds)]
            expected = [part.detach() for part in _listed(model(*given))]
            torch.testing.assert_close(found, expected)
