"""Loaded programs: the inputs that they refuse, and their results for strided tensors."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recsys.base.checksums import checksum_file
from recsys.inference import export_aoti, export_torchscript, load_aoti, load_torchscript
from recsys.inference.programs import AOTIProgram
from recsys.sparse import KeyedJaggedTensor
from tests.base.test_checksums import flip
from tests.inference.test_export import dlrm, inputs_of, plain_tensors

NAMES = ["dense", "ids", "lengths", "weights"]
METADATA = {
    "inputs": NAMES,
    "outputs": ["output"],
    "dtypes": ["float32", "int64", "int64", "float32"],
    "shapes": ["n0 5", "n1", "n2", "n1"],
}


class Compiled:
    """Stands for a compiled program: it needs what `AOTIProgram` promises to give it."""

    def __init__(self, metadata: dict[str, Any] = METADATA) -> None:
        self._metadata = metadata

    def get_metadata(self) -> dict[str, str]:
        return {"AOTI_DEVICE_KEY": "cpu"} | {k: json.dumps(v) for k, v in self._metadata.items()}

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        for tensor in tensors:
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
            assert not tensor.is_neg()
            assert not tensor.is_conj()
        return list(tensors)


def _strided(tensor: Tensor) -> Tensor:
    """The same values, every other one in memory that has others."""
    wide = torch.full((*tensor.shape, 2), 7, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def _weighted(size: int) -> list[Tensor]:
    return plain_tensors(*inputs_of(size, is_weighted=True))


def _laid_out_otherwise(tensors: list[Tensor]) -> list[list[Tensor]]:
    """The same batch in other layouts."""
    dense, ids, lengths, weights = tensors
    return [
        [_strided(tensor) for tensor in tensors],
        [_strided(dense), ids, lengths, weights],
        [dense.t().contiguous().t(), _strided(ids), lengths, weights],
        [dense, ids, _strided(lengths), weights],
        [dense, ids, lengths, _strided(weights)],
        [dense, ids.flip(0).flip(0)[:], lengths.repeat(2)[: len(lengths)], weights],
        [torch.complex(dense, -dense).conj().imag, ids, lengths, weights],
        [dense, ids, lengths, weights.clone().requires_grad_()],
    ]


def _change(at: int, by: Callable[[Tensor], object]) -> Callable[[list[Tensor]], list[Any]]:
    return lambda tensors: [by(t) if i == at else t for i, t in enumerate(tensors)]


REFUSED: list[tuple[Callable[[list[Tensor]], list[Any]], type[Exception], str]] = [
    (lambda t: t[:3], TypeError, r"takes 4 tensors \(.*\); received 3"),
    (lambda t: [*t, t[0]], TypeError, r"takes 4 tensors \(.*\); received 5"),
    (_change(1, Tensor.int), TypeError, r"int64, .*; received torch.int32. Convert .*int64\)"),
    (_change(1, Tensor.float), TypeError, "received torch.float32"),
    (_change(1, Tensor.bool), TypeError, "received torch.bool"),
    (_change(2, Tensor.int), TypeError, "received torch.int32"),
    (_change(2, Tensor.byte), TypeError, "received torch.uint8"),
    (_change(0, Tensor.double), TypeError, "received torch.float64"),
    (_change(3, Tensor.half), TypeError, "received torch.float16"),
    (_change(3, Tensor.long), TypeError, "received torch.int64"),
    (_change(0, Tensor.to_sparse), TypeError, "dense tensor; received torch.sparse_coo"),
    (_change(2, Tensor.tolist), TypeError, "dense tensor; received list"),
    (_change(1, lambda t: None), TypeError, "dense tensor; received NoneType"),
    (_change(1, lambda t: t.to("meta")), ValueError, r"on cpu, .*received a tensor on meta"),
    (_change(0, lambda t: t[:, 1:]), ValueError, r"shape \[n0, 5\], where n0 = 6; received \[6, 4"),
    (_change(0, lambda t: t.view(-1)), ValueError, r"shape \[n0, 5\]; received \[30\]"),
    (_change(0, lambda t: t[0, 0]), ValueError, r"shape \[n0, 5\]; received \[\]"),
    (_change(1, lambda t: t[:, None]), ValueError, r"shape \[n1\]; received \[\d+, 1\]"),
    (_change(2, lambda t: t.view(3, -1)), ValueError, r"shape \[n2\]; received \[3, 6\]"),
    (_change(3, lambda t: t[1:]), ValueError, r"weights must .* \[n1\], where n1 = \d+; received"),
    (_change(3, lambda t: t[:0]), ValueError, r"\[n1\], where n1 = \d+; received \[0\]"),
    (_change(1, lambda t: t[1:]), ValueError, r"\[n1\], where n1 = \d+; received"),
]


def _check_refusals(program: AOTIProgram) -> None:
    for change, kind, message in REFUSED:
        with pytest.raises(kind, match=message):
            program(*change(_weighted(6)))


def test_inputs_are_validated_before_the_compiled_code_reads_them() -> None:
    program = AOTIProgram(Compiled(), "model.pt2")  # type: ignore[arg-type]
    _check_refusals(program)
    assert program.outputs == ["output"]
    assert [found.name for found in program.inputs] == NAMES
    assert repr(program).startswith("AOTIProgram(dense: float32[n0, 5], ids: int64[n1], ")


@pytest.mark.parametrize("size", [6, 1, 0])
def test_strided_tensors_become_contiguous(size: int) -> None:
    program = AOTIProgram(Compiled(), "model.pt2")  # type: ignore[arg-type]
    tensors = _weighted(size)
    for others in _laid_out_otherwise(tensors):
        torch.testing.assert_close(program(*others), tensors, rtol=0, atol=0)


def test_what_is_contiguous_is_not_copied() -> None:
    tensors = _weighted(6)
    found = AOTIProgram(Compiled(), "model.pt2")(*tensors)  # type: ignore[arg-type]
    assert [t.data_ptr() for t in found] == [t.data_ptr() for t in tensors]


def test_a_package_of_another_kind_is_refused() -> None:
    for key in METADATA:
        others = {k: v for k, v in METADATA.items() if k != key}
        with pytest.raises(ValueError, match=f"m.pt2 must be .*without '{key}' in"):
            AOTIProgram(Compiled(others), "m.pt2")  # type: ignore[arg-type]


JAGGED = {
    "inputs": ["a_values", "a_lengths", "b_values", "b_lengths"],
    "outputs": ["output"],
    "dtypes": ["int64"] * 4,
    "shapes": ["n0", "n1", "n2", "n3"],
    "jagged": [
        {
            "input": "a",
            "features": [
                {"name": "x", "rows": 9, "table": "t", "module": "bags"},
                {"name": "y", "rows": None, "table": None, "module": None},
                {"name": "z", "rows": 5, "table": "u", "module": "rows.last"},
            ],
        },
        {
            "input": "b",
            "features": [{"name": "b", "rows": None, "table": None, "module": None}],
        },
    ],
}


def test_bad_ids_are_named_before_the_compiled_code_reads_them() -> None:
    program = AOTIProgram(Compiled(JAGGED), "model.pt2")  # type: ignore[arg-type]
    ids, lengths = torch.tensor([8, 0, 99, -9, 4]), torch.tensor([1, 1, 0, 2, 1, 0])
    other = torch.tensor([-1]), torch.tensor([7])
    program(ids, lengths, *other)
    program(ids[:0], lengths[:0], *other)
    for position, bad, message in (
        (1, 9, "a: Id 9 at position 1 of feature 'x' must be from 0 to 8. Module 'bags' looks it "
         "up in table 't' with 9 rows."),
        (0, -1, "a: Id -1 at position 0 of feature 'x' must be from 0 to 8. "),
        (4, 5, "a: Id 5 at position 0 of feature 'z' must be from 0 to 4. Module 'rows.last' "),
        (4, 2**62, f"Id {2**62} at "),
    ):  # fmt: skip
        changed = ids.clone()
        changed[position] = bad
        with pytest.raises(IndexError, match=re.escape(message)):
            program(changed, lengths, *other)
    for wrong, message in (
        (lengths[:4], "a: lengths must have one value per feature and sample, 3 features"),
        (lengths + 1, "a: lengths must not be negative and must add up to the number of ids, 5"),
        (lengths * torch.tensor([1, -1, 1, 1, 3, 1]), "received 1 negative lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            program(ids, wrong, *other)


class Scores(nn.Module):
    """A model of dense features, and tables."""

    def __init__(self) -> None:
        super().__init__()
        self.model = dlrm(True)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor, prior: Tensor) -> Tensor:
        found: Tensor = self.model(dense, ids) + prior.sum()
        return found


def _strided_example() -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Return one row with the stride of a wider row, and strided parts."""
    _, ids, lengths, weights = _weighted(1)
    wide = torch.ones(1, 9)[:, :5]
    features = KeyedJaggedTensor(["x", "y", "z"], _strided(ids), _strided(weights), lengths)
    return wide, features, _strided(torch.ones(3))


def test_a_package_reads_what_it_is_given(tmp_path: Path) -> None:
    """One package, of a strided example: the compiler takes 20 seconds for each."""
    path = tmp_path / "model.pt2"
    model = Scores().eval()
    prior = torch.rand(3)
    programs = [export_aoti(model, path, _strided_example()), load_aoti(path)]
    for program in programs:
        assert [found.shape for found in program.inputs] == [
            ("n0", "5"), ("n1",), ("n2",), ("n1",), ("n3",),
        ]  # fmt: skip
        for size in (6, 1, 0, 130):
            tensors = _weighted(size)
            for others in _laid_out_otherwise(tensors):
                dense, ids, lengths, weights = (t.resolve_neg().contiguous() for t in others)
                batch = KeyedJaggedTensor(["x", "y", "z"], ids, weights, lengths)
                for last in (prior, _strided(prior)):
                    found = program(*others, last)
                    torch.testing.assert_close(found, model(dense, batch, prior))
        for change, kind, _ in REFUSED:
            with pytest.raises(kind):
                program(*change(_weighted(6)), prior)
        with pytest.raises(ValueError, match=r"prior must .*\[n3\]; .*\[1, 3\]"):
            program(*_weighted(6), prior[None])
        with pytest.raises(ValueError, match="ids: lengths must not be negative"):
            program(*_change(2, lambda t: t + 1)(_weighted(6)), prior)
    _check_flips(path, load_aoti)


def _check_flips(path: Path, load: Callable[[Path], object]) -> None:
    rng = random.Random(0)
    for _ in range(50):
        bit = rng.randrange(8 * path.stat().st_size)
        flip(path, bit)
        with pytest.raises(ValueError, match=r"damaged: .*not match its checksum"):
            load(path)
        flip(path, bit)
    checksum_file(path).unlink()
    with pytest.warns(UserWarning, match="has no checksum"):
        load(path)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load(path.with_name("other.pt"))


def test_torchscript_reads_what_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    model = dlrm(True)
    export_torchscript(model, path, inputs_of(3, is_weighted=True))
    program = load_torchscript(path, "cpu")
    for size in (6, 1, 0):
        tensors = _weighted(size)
        others = [
            *_laid_out_otherwise(tensors),
            [t.int() if i in (1, 2) else t for i, t in enumerate(tensors)],
        ]
        for other in others:
            dense, ids, lengths, weights = other
            batch = KeyedJaggedTensor(["x", "y", "z"], ids.long(), weights, lengths.long())
            torch.testing.assert_close(program(*other), model(dense, batch))
    checked = 0
    for change, _, _ in REFUSED:
        tensors = change(_weighted(6))
        try:
            found = program(*tensors)
        except Exception:
            checked += 1
            continue  # refused
        dense, ids, lengths, weights = tensors
        batch = KeyedJaggedTensor(["x", "y", "z"], ids.long(), weights, lengths.long().view(-1))
        torch.testing.assert_close(found, model(dense.to_dense(), batch))
    assert checked > len(REFUSED) / 2
    _check_flips(path, load_torchscript)
