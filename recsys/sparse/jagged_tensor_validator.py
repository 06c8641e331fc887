"""Full validation of a batch and of its ids, on request."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Protocol

from recsys.base.checked import checked
from recsys.kernels.bounds import bad_id_text
from recsys.sparse.keyed_jagged import KeyedJaggedTensor
from recsys.sparse.validate import check_parts, check_total, check_unique

__all__ = ["validate_keyed_jagged_tensor"]


class _Table(Protocol):
    """Attributes of a table config that the validation reads."""

    name: str
    num_embeddings: int
    feature_names: list[str]


@checked
def validate_keyed_jagged_tensor(
    kjt: KeyedJaggedTensor, configs: Iterable[_Table] | None = None
) -> bool:
    """Check all contents of a batch; waits for its device.

    Keys must be unique, lengths must not be negative, their sum must be the number of values, and
    offsets must be their running sum.

    Args:
        kjt: The batch.
        configs: The tables of its features, such as EmbeddingBagConfigs; None skips the check of
            the ids. Features that are not in the batch are ignored.

    Returns:
        True if all ids are below the size of their table. A warning names the feature, table and
        value of the first invalid id.

    Raises:
        ValueError: The parts of the batch are inconsistent.

    Example:
        >>> import torch
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> films = EmbeddingBagConfig(10, 4, "films", feature_names=["film"])
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 9]), lengths=torch.tensor([1, 1]))
        >>> validate_keyed_jagged_tensor(ids, [films])
        True
    """
    owner, keys = type(kjt).__name__, kjt.keys()
    if not keys:
        return True
    check_unique(owner, keys)
    lengths, offsets = kjt.lengths_or_none(), kjt.offsets_or_none()
    check_parts(owner, kjt.values(), kjt.weights_or_none(), lengths, offsets)
    kjt.validate()
    check_total(owner, int(kjt.offsets()[-1]), kjt.values(), is_exact=True)
    values = dict(zip(keys, kjt.values().split_with_sizes(kjt.length_per_key()), strict=True))
    for config in configs or ():
        for feature in config.feature_names:
            ids = values.get(feature)
            if ids is None or not ids.numel():
                continue
            rows = config.num_embeddings
            bad = ((ids < 0) | (ids >= rows)).nonzero().flatten()
            if bad.numel():
                text = bad_id_text(feature, int(ids[bad[0]]), int(bad[0]), rows)
                warnings.warn(f"{text} Table {config.name!r} has {rows} rows.", stacklevel=2)
                return False
    return True
