from __future__ import annotations

import pytest
import torch

from recsys.kernels.bounds import IdGuard, find_bad_ids
from recsys.kernels.types import BoundsCheckMode

ROWS = torch.tensor([5, 3])
NAMES = (["user", "item"], ["users", "items"])


def guard(mode: BoundsCheckMode) -> IdGuard:
    return IdGuard([5, 3], *NAMES, mode, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_good_ids_pass(dtype: torch.dtype) -> None:
    guard(BoundsCheckMode.FATAL)(
        torch.tensor([0, 4, 2], dtype=dtype), torch.tensor([0, 1, 2, 3, 3])
    )
    guard(BoundsCheckMode.FATAL)(torch.empty(0, dtype=dtype), torch.zeros(5, dtype=dtype))
    guard(BoundsCheckMode.FATAL)(torch.empty(0, dtype=dtype), torch.zeros(1, dtype=dtype))


def test_the_message_names_feature_table_id_position_and_size() -> None:
    indices, offsets = torch.tensor([4, 0, 1, 3, -1]), torch.tensor([0, 1, 2, 3, 5])
    with pytest.raises(IndexError) as caught:
        guard(BoundsCheckMode.FATAL)(indices, offsets)
    assert str(caught.value) == (
        "Id 3 of feature 'item' is out of range for table 'items' with 3 rows (position 1 of the "
        "feature's ids, sample 1; 2 bad ids in the batch). Ids must be in [0, 3): hash or remap "
        "them, enlarge num_embeddings, or choose another BoundsCheckMode."
    )


def test_a_negative_id_is_bad() -> None:
    with pytest.raises(IndexError, match="Id -1 of feature 'user'"):
        guard(BoundsCheckMode.FATAL)(torch.tensor([-1, 0]), torch.tensor([0, 1, 2]))


def test_empty_bags_before_a_bad_id_do_not_shift_its_sample() -> None:
    offsets = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    with pytest.raises(IndexError, match=r"feature 'user'.*sample 2"):
        guard(BoundsCheckMode.FATAL)(torch.tensor([5]), offsets)


def test_find_bad_ids_uses_each_features_own_table() -> None:
    bad = find_bad_ids(torch.tensor([3, 3]), torch.tensor([0, 1, 2]), ROWS)
    assert bad.tolist() == [False, True]


OFFSETS = torch.tensor([0, 1, 2])


@pytest.mark.parametrize("mode", list(BoundsCheckMode))
def test_a_guard_passes_good_ids_untouched(mode: BoundsCheckMode) -> None:
    indices = torch.tensor([4, 2])
    assert guard(mode)(indices, OFFSETS) is indices
    guard(mode).check()


def test_a_guard_does_what_its_mode_says() -> None:
    indices = torch.tensor([4, 3])
    with pytest.raises(IndexError, match="Id 3 of feature 'item'"):
        guard(BoundsCheckMode.FATAL)(indices, OFFSETS)
    with pytest.warns(UserWarning, match="Id 3 of feature 'item'"):
        assert guard(BoundsCheckMode.WARNING)(indices, OFFSETS).tolist() == [4, 0]
    assert guard(BoundsCheckMode.IGNORE)(indices, OFFSETS).tolist() == [4, 0]
    assert guard(BoundsCheckMode.NONE)(indices, OFFSETS) is indices


def test_modes_by_fbgemms_numbers() -> None:
    modes = [BoundsCheckMode(number) for number in range(4)]
    assert modes == list(BoundsCheckMode)
    assert BoundsCheckMode("warning") is BoundsCheckMode(1) is BoundsCheckMode.WARNING
    for unknown in (4, -1, True, 1.0, "WARNING"):
        with pytest.raises(ValueError, match="is not a valid BoundsCheckMode"):
            BoundsCheckMode(unknown)
