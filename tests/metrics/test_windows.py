import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.metrics import windows
from recsys.metrics.windows import RowWindow, SumWindow


@settings(deadline=None, max_examples=100)
@given(sizes=st.lists(st.integers(1, 9), max_size=30), max_rows=st.integers(1, 20))
def test_rows_are_the_last(sizes, max_rows):
    window = RowWindow(max_rows)
    seen = torch.empty(2, 0)
    for place, size in enumerate(sizes):
        batch = torch.arange(2.0 * size).view(2, size) + 100 * place
        window.add(batch, batch[:1].long())
        seen = torch.cat([seen, batch], dim=1)
        rows, extra = window.rows() if place % 3 == 0 else (None, None)
        if rows is not None:
            assert torch.equal(rows, seen[:, -max_rows:])
            assert torch.equal(extra, rows[:1].long())
        assert window.num_rows == min(max_rows, seen.size(1))


def test_no_rows():
    assert RowWindow(3).rows() is None


@settings(deadline=None, max_examples=100)
@given(sizes=st.lists(st.integers(1, 9), max_size=30), max_samples=st.integers(9, 20))
def test_sums_are_of_the_last_batches_that_fit(sizes, max_samples):
    window = SumWindow(max_samples)
    for place, size in enumerate(sizes):
        window.add(torch.tensor([[float(2**place)]]), size)
    kept = 0
    while kept < len(sizes) and sum(sizes[len(sizes) - kept - 1 :]) <= max_samples:
        kept += 1
    expected = sum(2**place for place in range(len(sizes) - kept, len(sizes)))
    assert sum(sums.item() for sums in window.sums) == expected


def test_memory_is_constant(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(windows, "MAX_PARTS", 10)
    window = SumWindow(1000)
    for _ in range(500):
        window.add(torch.ones(1, 1), 7)
    assert len(window.sums) <= 21
    # It forgets a tenth at a time at most.
    assert 900 <= 7 * sum(sums.item() for sums in window.sums) <= 1000
