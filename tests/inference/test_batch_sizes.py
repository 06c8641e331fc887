"""Programs serve batches of any size, also of one sample and with attention."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recsys.inference import export_aoti, quantize_embeddings
from recsys.inference.batch_sizes import batch_sizes, samples_of
from recsys.inference.export import PlainModel, exported_program
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.sparse import JaggedTensor, KeyedJaggedTensor

COLUMNS, LONGEST = 8, 6
BATCHES: tuple[list[int], ...] = ([], [3], [1], [2, 0, 1, 5, 4], [9, 1, 6])


class Sequences(nn.Module):
    """A transformer over padded sequences."""

    def __init__(self, longest: int | None = LONGEST) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [EmbeddingConfig(50, COLUMNS, "films", feature_names=["film"])]
        self.rows, self.longest = EmbeddingCollection(tables=tables), longest
        layer = nn.TransformerEncoderLayer(COLUMNS, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        jagged = self.rows(features)["film"]
        padded = jagged.to_padded_dense(self.longest)
        is_padding = torch.arange(padded.shape[1]) >= jagged.lengths().unsqueeze(1)
        # a row of padding only has no attention, which is NaN
        is_ignored = is_padding & (jagged.lengths() > 0).unsqueeze(1)
        found = self.encoder(padded, src_key_padding_mask=is_ignored)
        total: Tensor = found.masked_fill(is_padding.unsqueeze(2), 0.0).sum(1)
        return total


def _batch(lengths: list[int]) -> KeyedJaggedTensor:
    ids = torch.arange(sum(lengths)) * 7 % 50
    return KeyedJaggedTensor(["film"], ids, lengths=torch.tensor(lengths, dtype=torch.int64))


def _check(program: Any, model: nn.Module, batches: Sequence[list[int]]) -> None:
    for lengths in batches:
        batch = _batch(lengths)
        with torch.no_grad():
            found = program(batch.values(), batch.lengths())
        # nn.MultiheadAttention itself raises an error for a mask of an empty batch
        wanted = model(batch).detach() if lengths else torch.zeros(0, COLUMNS)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("example", [[2, 3], [0, 2, 1, 3]])
def test_attention_serves_any_batch_size(example: list[int]) -> None:
    model = quantize_embeddings(Sequences())
    plain = PlainModel(model, [_batch(example)])
    program = exported_program(plain).module()
    # a graph that is not compiled has a view of an empty mask with an unknown size
    _check(program, model, BATCHES[1:])


def test_attention_needs_an_example_of_two_samples() -> None:
    plain = PlainModel(quantize_embeddings(Sequences()), [_batch([4])])
    with pytest.raises(ValueError, match=r"== 1 only\..*two or more samples"):
        exported_program(plain)


def test_packages_with_attention_serve_any_batch_size(tmp_path: Path) -> None:
    model = quantize_embeddings(Sequences())
    _check(export_aoti(model, tmp_path / "model.pt2", [_batch([2, 3])]), model, BATCHES)


class Sized(nn.Module):
    """A branch on the batch size."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        tables = [EmbeddingConfig(50, COLUMNS, "films", feature_names=["film"])]
        self.rows, self.kind = EmbeddingCollection(tables=tables), kind

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.rows(features)["film"].to_padded_dense(LONGEST).sum(1)
        size = pooled.shape[0]
        is_other = {"<=": size > 4, "!= 4": size == 4, "!= 1": size == 1, ">=": size < 2}[self.kind]
        return pooled * 2 if is_other else pooled


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("<=", r"traced for features_lengths.shape\[0\] <= 4 only"),
        (">=", r"traced for features_lengths.shape\[0\] >= 2 only"),
        ("!= 4", r"traced for features_lengths.shape\[0\] != 4 only"),
        ("!= 1", "received other outputs on one sample"),
    ],
)
def test_branches_on_the_batch_size_are_refused(kind: str, message: str) -> None:
    plain = PlainModel(quantize_embeddings(Sized(kind)), [_batch([2, 3])])
    with pytest.raises(ValueError, match=message):
        plain.check(exported_program(plain).module())


class Reads(Sequences):
    """Does what torch.export does not support."""

    def __init__(self, kind: str) -> None:
        super().__init__(None if kind == "longest" else LONGEST)
        self.kind = kind

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        total = super().forward(features)
        if self.kind == "branch" and total.sum() > 0:
            return total + 1
        if self.kind == "list":
            return torch.stack([rows.sum(0) for rows in self.rows(features)["film"].to_dense()])
        return total


@pytest.mark.parametrize("kind", ["longest", "branch", "list"])
def test_sizes_that_depend_on_values_are_named(
    kind: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """No graph is printed or logged."""
    plain = PlainModel(quantize_embeddings(Reads(kind)), [_batch([2, 3])])
    with caplog.at_level(logging.DEBUG), contextlib.redirect_stderr(io.StringIO()) as stderr:  # noqa: SIM117
        with pytest.raises(Exception, match=r"[Pp]ass desired_length") as raised:
            exported_program(plain)
    assert __file__ in raised.value.__notes__[0]
    for text in (*capfd.readouterr(), stderr.getvalue(), caplog.text, str(raised.value)):
        assert "GraphModule" not in text
        assert "torch.ops." not in text


def test_samples_are_parts_of_a_batch() -> None:
    keyed = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(7),
        torch.arange(7.0),
        torch.tensor([1, 0, 2, 3, 1, 0]),
    )
    jagged = JaggedTensor(torch.arange(8).view(4, 2), lengths=torch.tensor([1, 1, 2]))
    dense, constant = torch.arange(6).view(3, 2), torch.ones(5)
    inputs = [keyed, [jagged, dense], constant, 3]
    assert batch_sizes(inputs) == {3}
    for i, (ids, lengths, rows) in enumerate(
        [
            ([0, 3, 4, 5], [1, 3], [[0, 1]]),
            ([6], [0, 1], [[2, 3]]),
            ([1, 2], [2, 0], [[4, 5], [6, 7]]),
        ]
    ):
        one = samples_of(inputs, slice(i, i + 1))
        batch, [part, row], same, number = one  # type: ignore[misc]
        assert batch.values().tolist() == ids == batch.weights().long().tolist()
        assert batch.lengths().tolist() == lengths
        assert part.values().tolist() == rows
        assert part.lengths().tolist() == [len(rows)]
        assert row.tolist() == [dense[i].tolist()]
        assert same is constant
        assert number == 3
    none = samples_of(inputs, slice(0))[0]
    assert isinstance(none, KeyedJaggedTensor)
    assert (none.stride(), none.keys()) == (0, ["a", "b"])
