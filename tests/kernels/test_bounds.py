from __future__ import annotations

import pytest
import torch

from recsys.kernels.bounds import find_bad_ids
from recsys.kernels.types import BoundsCheckMode

ROWS = torch.tensor([5, 3])


def test_find_bad_ids_uses_each_features_own_table() -> None:
    bad = find_bad_ids(torch.tensor([3, 3]), torch.tensor([0, 1, 2]), ROWS)
    assert bad.tolist() == [False, True]


def test_modes_by_fbgemms_numbers() -> None:
    modes = [BoundsCheckMode(number) for number in range(4)]
    assert modes == list(BoundsCheckMode)
    assert BoundsCheckMode("warning") is BoundsCheckMode(1) is BoundsCheckMode.WARNING
    for unknown in (4, -1, True, 1.0, "WARNING"):
        with pytest.raises(ValueError, match="is not a valid BoundsCheckMode"):
            BoundsCheckMode(unknown)
