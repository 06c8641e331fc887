"""Random batches for benchmarks and first experiments."""

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from recsys.base.checked import checked
from recsys.datasets.utils import Batch, of_worker
from recsys.sparse import KeyedJaggedTensor


def _setting_per_feature(
    name: str, one: int | None, many: list[int] | None, default: int, keys: list[str]
) -> list[int]:
    """Return the value of a setting for each feature."""
    if one is not None and many is not None:
        raise ValueError(f"only one of {name} and {name}s may be given; received {one} and {many}.")
    values = many if many is not None else [default if one is None else one] * len(keys)
    if len(values) != len(keys):
        raise ValueError(
            f"{name}s must have one value for each of the {len(keys)} keys; received {values}."
        )
    return values


class RandomRecDataset(IterableDataset[Batch]):
    """Batches of uniform ids, normal dense features and coin-flip labels.

    A few batches are generated in advance and repeated, so that benchmarks do not measure their
    generation. DataLoader workers (`batch_size=None`) take these batches in turn. If every batch is
    new, each worker generates its own.

    Args:
        keys: Names of the sparse features.
        batch_size: Samples per batch.
        hash_size: Upper bound (exclusive) of the ids of all features; 100 by default.
        hash_sizes: Upper bound of the ids of each feature.
        ids_per_feature: Number of ids per sample, for all features. By default from 0 to 2. With a
            minimum it is the maximum.
        ids_per_features: Maximum number of ids per sample for each feature. The minimum is 0 by
            default.
        num_dense: Columns of the dense features.
        manual_seed: Seed, for reproducible batches.
        num_batches: Length of an epoch; None for an endless one.
        num_generated_batches: Number of different batches; with 0 or less every batch is new.
        min_ids_per_feature: Minimum number of ids per sample, for all features.
        min_ids_per_features: Minimum number of ids per sample, for each feature.

    Raises:
        ValueError: A list does not have one value per key, a setting and its list are both given,
            or a value is out of range.

    Example:
        >>> batches = RandomRecDataset(["film"], batch_size=4, num_dense=13, num_batches=2)
        >>> [list(batch.dense_features.shape) for batch in batches]
        [[4, 13], [4, 13]]
    """

    @checked
    def __init__(
        self,
        keys: list[str],
        batch_size: int,
        hash_size: int | None = None,
        hash_sizes: list[int] | None = None,
        ids_per_feature: int | None = None,
        ids_per_features: list[int] | None = None,
        num_dense: int = 50,
        manual_seed: int | None = None,
        num_batches: int | None = None,
        num_generated_batches: int = 10,
        min_ids_per_feature: int | None = None,
        min_ids_per_features: list[int] | None = None,
    ) -> None:
        super().__init__()
        if not keys:
            raise ValueError(f"keys must be a list of feature names; received {keys!r}.")
        if batch_size < 0 or num_dense < 0 or (num_batches is not None and num_batches < 0):
            raise ValueError(
                "batch_size, num_dense and num_batches must not be negative; received "
                f"{batch_size}, {num_dense} and {num_batches}."
            )
        self.keys = keys
        self.batch_size = batch_size
        self.num_dense = num_dense
        self.num_batches = num_batches
        self.num_generated_batches = num_generated_batches
        self.hash_sizes = _setting_per_feature("hash_size", hash_size, hash_sizes, 100, keys)
        self.ids_per_features = _setting_per_feature(
            "ids_per_feature", ids_per_feature, ids_per_features, 2, keys
        )
        if min_ids_per_feature is None and min_ids_per_features is None:
            exact = ids_per_feature is not None
            min_ids_per_features = self.ids_per_features if exact else [0] * len(keys)
        self.min_ids_per_features = _setting_per_feature(
            "min_ids_per_feature", min_ids_per_feature, min_ids_per_features, 0, keys
        )
        for key, rows, least, most in zip(
            keys, self.hash_sizes, self.min_ids_per_features, self.ids_per_features, strict=True
        ):
            if rows < 1 or not 0 <= least <= most:
                raise ValueError(
                    f"feature {key!r} must have hash_size >= 1 and 0 <= min_ids_per_feature <= "
                    f"ids_per_feature; received {rows}, {least} and {most}."
                )
        self._manual_seed = manual_seed
        self._worker_seed: int | None = None
        self._generator = torch.Generator()
        if manual_seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(manual_seed)
        self._batches = [self._make_batch() for _ in range(num_generated_batches)]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch, the same in every epoch unless every batch is new.

        With `manual_seed`, restarted DataLoader workers repeat their batches in each epoch; with
        `persistent_workers=True` every batch is new.
        """
        if self._batches:
            return of_worker(itertools.islice(itertools.cycle(self._batches), self.num_batches))
        count = self.num_batches
        worker = get_worker_info()
        if worker is not None:
            self._seed_worker(worker.id, worker.seed)
            if count is not None:
                count = len(range(worker.id, count, worker.num_workers))
        return itertools.islice((self._make_batch() for _ in itertools.count()), count)

    def __len__(self) -> int:
        """Return the number of batches of an epoch.

        Raises:
            TypeError: The epoch is endless.
        """
        if self.num_batches is None:
            raise TypeError("RandomRecDataset has no length unless num_batches is given.")
        return self.num_batches

    def _seed_worker(self, number: int, seed: int) -> None:
        """Seed a new DataLoader worker: its generator is a copy that all workers share."""
        if seed != self._worker_seed:
            self._worker_seed = seed
            if self._manual_seed is not None:
                sequence = np.random.SeedSequence((self._manual_seed % 2**64, number))
                seed = int(sequence.generate_state(1, np.uint64)[0])
            self._generator.manual_seed(seed)

    def _make_batch(self) -> Batch:
        generator = self._generator
        lengths, values = [], []
        for rows, least, most in zip(
            self.hash_sizes, self.min_ids_per_features, self.ids_per_features, strict=True
        ):
            shape = (self.batch_size,)
            lengths.append(
                torch.randint(least, most + 1, shape, generator=generator, dtype=torch.int32)
            )
            count = (int(lengths[-1].sum()),)
            values.append(torch.randint(rows, count, generator=generator))
        return Batch(
            dense_features=torch.randn(self.batch_size, self.num_dense, generator=generator),
            sparse_features=KeyedJaggedTensor(
                keys=self.keys, values=torch.cat(values), lengths=torch.cat(lengths)
            ),
            labels=torch.randint(2, (self.batch_size,), generator=generator),
        )
