"""Bad dense features, labels and weights are found where they come in; a GPU is not waited for."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import (
    KeyedJaggedTensor,
    finish_value_checks,
    has_value_checks,
    set_value_checks,
)
from recsys.sparse.value_checks import (
    FINITE,
    check_dense_values,
    check_labels,
    check_values,
    name_columns,
)
from tests.needs_triton import needs_triton
from tests.pretended_cuda import CUDA, PretendedCuda

NAN = math.nan


@pytest.fixture
def without_checks() -> Iterator[None]:
    set_value_checks(False)
    yield
    set_value_checks(True)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_dense_values_are_named_by_row_and_column(bad: float, dtype: torch.dtype) -> None:
    dense = torch.randn(4, 3).to(dtype)
    assert check_dense_values(dense) is dense
    dense[2, 1] = dense[3, 0] = bad
    message = rf"^dense_features must .*{bad}.*row 2.*\(2 such"
    with pytest.raises(ValueError, match=message):
        check_dense_values(dense)
    name_columns(dense, ["age", "price", "day"])
    with pytest.raises(ValueError, match=r"row 2 .*'price' \(2 .*turns this"):
        check_dense_values(dense)
    with pytest.raises(ValueError, match="in row 0 of column 3"):
        check_dense_values(dense.t())


@pytest.mark.parametrize("bad", [NAN, math.inf, -0.5, 1.5, 5.0])
def test_labels_are_named_by_row(bad: float) -> None:
    labels = torch.tensor([0.0, 1.0, 0.25])
    assert check_labels(labels) is labels
    labels[1] = bad
    rule = rf"^labels must .*0 to 1.*{bad}.*row 1\."
    with pytest.raises(ValueError, match=rule):
        check_labels(labels)
    name_columns(labels, ("liked",))
    with pytest.raises(ValueError, match=f"received {bad} in row 1.*'liked'"):
        check_labels(labels)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.int32, torch.uint8, torch.uint32, torch.uint64]
)
def test_labels_of_every_dtype(dtype: torch.dtype) -> None:
    labels = torch.tensor([0, 1]).to(dtype)
    assert check_labels(labels) is labels
    if dtype is not torch.bool:
        with pytest.raises(ValueError, match=r"received 5.* in row 1"):
            check_labels(torch.tensor([0, 5]).to(dtype))


def test_what_is_legal() -> None:
    limits = torch.finfo(torch.float32)
    dense = torch.tensor([[limits.max, limits.min, limits.tiny, -0.0]])
    assert check_dense_values(dense) is dense
    for empty in (torch.zeros(0, 3), torch.zeros(3, 0)):
        assert check_dense_values(empty) is empty
    assert check_labels(torch.zeros(0)).shape == (0,)


@pytest.mark.usefixtures("without_checks")
def test_they_can_be_turned_off() -> None:
    assert not has_value_checks()
    bad = torch.tensor([[NAN]])
    assert check_dense_values(bad) is bad
    assert check_labels(bad) is bad
    with PretendedCuda():
        moved = bad.to(CUDA)
        assert check_dense_values(moved) is moved
        finish_value_checks()


@pytest.mark.parametrize(("value", "is_on"), [("0", False), ("1", True), ("", True)])
def test_the_environment_turns_them_off(value: str, is_on: bool) -> None:
    code = "from recsys.sparse import has_value_checks as h; print(h())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "RECSYS_VALUE_CHECKS": value},
        check=True,
    )
    assert done.stdout.strip() == str(is_on)


def _compiled(bad: Tensor) -> None:
    torch._dynamo.reset()
    torch.compile(check_labels, fullgraph=True, backend="eager")(bad)


def _exported(bad: Tensor) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return check_labels(x) + 1

    for strict in (True, False):
        torch.export.export(Module(), (bad,), strict=strict)


@pytest.mark.parametrize(
    "record",
    [
        _compiled,
        _exported,
        lambda bad: torch.fx.symbolic_trace(check_dense_values),
        lambda bad: torch.jit.trace(check_dense_values, (bad,), check_trace=False),
        lambda bad: make_fx(check_dense_values)(bad),
        lambda bad: make_fx(check_dense_values, tracing_mode="symbolic")(bad),
        lambda bad: torch.vmap(check_dense_values)(bad),
        lambda bad: torch.func.grad(lambda x: check_dense_values(x).sum())(bad),
        lambda bad: check_dense_values(bad.to("meta")),
        lambda bad: check_dense_values(FakeTensorMode().from_tensor(bad)),
    ],
    ids=["compile", "export", "fx", "jit", "make_fx", "symbolic", "vmap", "grad", "meta", "fake"],
)
def test_nothing_runs_while_a_model_is_recorded(record: Callable[[Tensor], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit
        record(torch.tensor([[1.0, NAN], [5.0, 1.0]]))


def test_a_gpu_is_not_waited_for_and_computes_on_with_zeros() -> None:
    with PretendedCuda() as cuda:
        dense = torch.tensor([[1.0, NAN], [-math.inf, 2.0]]).to(CUDA)
        labels = torch.tensor([0.0, 5.0, NAN]).to(CUDA)
        name_columns(dense, ["age", "price"])
        cuda.forget()
        cuda.is_behind = True
        safe = check_dense_values(dense)
        assert check_labels(labels).tolist() == [0.0, 5.0, 0.0]
        assert cuda.notes == [("read", "tolist", cuda.notes[0][2])]  # the line above's
        assert safe.tolist() == [[1.0, 0.0], [0.0, 2.0]]
        cuda.forget()
        check_labels(torch.tensor([1.0]).to(CUDA))
        cuda.is_behind = False
        with pytest.raises(ValueError, match=r"earlier batch.*nan in row 0.*'price'"):
            check_labels(torch.tensor([1.0]).to(CUDA))
        with pytest.raises(ValueError, match=r"^labels of an earlier batch.*5\.0"):
            finish_value_checks()
        finish_value_checks()


def test_memory_that_was_overwritten_since() -> None:
    with PretendedCuda() as cuda:
        cuda.is_behind = True
        labels = torch.tensor([0.0, 5.0]).to(CUDA)
        check_labels(labels)
        labels.zero_()
        with pytest.raises(ValueError, match=r"received values from 0\.0 to 5\.0"):
            finish_value_checks()


def test_threads_do_not_raise_each_others_errors() -> None:
    with PretendedCuda() as cuda:
        cuda.is_behind = True
        bad = torch.tensor([5.0]).to(CUDA)
        raised: list[Exception] = []

        def other() -> None:
            with cuda:
                check_labels(bad)
                try:
                    finish_value_checks()
                except ValueError as error:
                    raised.append(error)

        check_labels(torch.tensor([1.0]).to(CUDA))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        finish_value_checks()
        assert len(raised) == 1


def test_nothing_is_sent_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    with PretendedCuda():
        bad = torch.tensor([NAN]).to(CUDA)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert check_labels(bad) is bad
        finish_value_checks()


def test_shown_values_are_those_before_they_were_converted() -> None:
    given = torch.tensor([1e300], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^x must be finite; .*1e\+300 here"):
        check_values(given.float(), FINITE, "x", lambda place: "here", shown=given)


def _weighted() -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name=f"t{f}", feature_names=[f])
        for f in ("a", "b")
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=True)


def _batch(weights: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 3]), weights, lengths=torch.tensor([1, 0, 1, 1])
    )


@pytest.mark.parametrize(
    ("place", "where"),
    [(0, "bag 0 of feature 'a'"), (1, "bag 0 of feature 'b'"), (2, "bag 1 of feature 'b'")],
)
@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_weights_of_ids_are_named_by_feature_and_bag(place: int, where: str, bad: float) -> None:
    weights = torch.ones(3)
    ebc = _weighted()
    assert ebc(_batch(weights)).values().isfinite().all()
    weights[place] = bad
    message = f"weights must .*{bad} in {where}"
    with pytest.raises(ValueError, match=message):
        ebc(_batch(weights))
    # a value computed from parameters does not count as input
    assert not ebc(_batch(weights.requires_grad_())).values().isfinite().all()


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=needs_triton)])
def test_weights_on_a_gpu(triton: bool) -> None:
    with PretendedCuda(triton=triton) as cuda:
        ebc = _weighted().to(CUDA)
        good = _batch(torch.ones(3)).to(CUDA)
        ebc(good)
        bad = _batch(torch.tensor([1.0, NAN, 1.0])).to(CUDA)
        cuda.forget()
        cuda.is_behind = True
        ebc(bad)
        assert not [note for note in cuda.notes if note[0] == "read"]
        with pytest.raises(ValueError, match=r"of an earlier batch.*nan in"):
            finish_value_checks()
