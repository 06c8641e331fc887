"""Numbers per key that a caller gives: the wrong argument is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.per_key_checks import check_counts, check_length_per_key

KEYS, VALUES = ["a", "b"], torch.tensor([10, 20, 21, 22])
LENGTHS = torch.tensor([1, 0, 2, 1])  # [1, 3] per key

BOUNDS = "running sum of"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"length_per_key": [2, 3]}, r"length_per_key must .* \[2, 3\]"),
        ({"length_per_key": [5, -1]}, "length_per_key must"),
        ({"length_per_key": [4]}, "length_per_key must .*received 1"),
        ({"offset_per_key": [0, 1, 5]}, "offset_per_key must"),
        ({"offset_per_key": [1, 2, 5]}, "offset_per_key must"),
        ({"offset_per_key": [0, 4]}, "offset_per_key must"),
        ({"length_per_key": [1, 3], "offset_per_key": [0, 2, 4]}, "offset_per_key must"),
        ({"index_per_key": {"a": 1, "b": 0}}, "index_per_key must be .*of each key"),
        ({"jt_dict": {"a": None, "c": None}}, r"jt_dict must .* \['a', 'c'\]"),
        ({"lengths_offset_per_key": [0, 2, 5]}, r"lengths_offset_per_key must .* \[0, 2, 4\]"),
        ({"stride_per_key": [1, 2]}, "stride_per_key must .*and 4 lengths"),
        ({"stride_per_key": [5, -1]}, "stride_per_key must .* none negative"),
        ({"stride_per_key_per_rank": [[1], [2]]}, "stride_per_key_per_rank must have one"),
        (
            {"stride_per_key_per_rank": [[2], [2]], "stride_per_key": [1, 3]},
            "stride_per_key must be .*sums of stride_per_key_per_rank",
        ),
    ],
)
def test_the_argument_that_does_not_fit_is_named(
    given: dict[str, Any], message: str, device: str
) -> None:
    parts = VALUES.to(device), None, LENGTHS.to(device)
    with pytest.raises(ValueError, match=rf"^KeyedJaggedTensor\.{message}"):
        KeyedJaggedTensor(KEYS, *parts, **given)


def test_wrong_lengths_are_blamed_on_lengths() -> None:
    lengths = torch.tensor([1, 0, 3, 1])
    with pytest.raises(ValueError, match=r"^KeyedJaggedTensor\.lengths must add up"):
        KeyedJaggedTensor(KEYS, VALUES, lengths=lengths, length_per_key=[1, 4])
    with pytest.raises(ValueError, match=r"^KeyedJaggedTensor\.lengths must add up"):
        KeyedJaggedTensor(KEYS, VALUES, lengths=lengths).sync()
    with pytest.raises(ValueError, match=r'lengths must not .*"b".* to -1'):
        check_length_per_key(KEYS, [5, -1], VALUES, "lengths")
    with pytest.raises(ValueError, match=r'length_per_key must not .*-1 .*"b"'):
        check_length_per_key(KEYS, [5, -1], VALUES)


def test_right_numbers_are_kept() -> None:
    for given in ({"length_per_key": (1, 3)}, {"offset_per_key": (0, 1, 4)}):
        kjt = KeyedJaggedTensor(KEYS, VALUES, lengths=LENGTHS, **given)  # type: ignore[arg-type]
        assert kjt.length_per_key_or_none() == [1, 3]
        assert kjt.offset_per_key() == [0, 1, 4]
    assert check_counts(KEYS, VALUES, None, [0, 1, 4]) == [1, 3]
