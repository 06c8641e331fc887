"""Epochs of any iterable of batches: a reader, a DataLoader, a list."""

from __future__ import annotations

from typing import Any

__all__ = ["begin_epoch", "epoch_length"]


def begin_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of a loader, its samplers and its data set, where they have it.

    Args:
        loader: An iterable of batches, such as a reader or a DataLoader.
        epoch: Number of the epoch, from 0.

    Example:
        >>> from torch.utils.data import DataLoader, DistributedSampler
        >>> sampler = DistributedSampler([1, 2], num_replicas=1, rank=0)
        >>> begin_epoch(DataLoader([1, 2], sampler=sampler), 3)
        >>> sampler.epoch
        3
    """
    inner = (getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))
    for part in (loader, *inner):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def spec_of(loader: Any) -> Any:
    """Return the FeatureSpec of a reader, or of the reader in a DataLoader; None: there is none.

    Args:
        loader: An iterable of batches.

    Example:
        >>> from recsys import datasets
        >>> from recsys.features import FeatureSpec, Ids
        >>> spec = FeatureSpec([Ids("film", rows=9)])
        >>> spec_of(datasets.table({"film": [3, 4]}, spec, batch_size=2)) is spec
        True
    """
    for part in (loader, getattr(loader, "dataset", None)):
        spec = getattr(getattr(part, "selection", None), "spec", None)
        if hasattr(spec, "fingerprints"):
            return spec
    return None


def epoch_length(loader: Any) -> int | None:
    """Return the number of batches of the current epoch; None if the loader does not know it.

    Args:
        loader: An iterable of batches, such as a reader or a DataLoader.

    Example:
        >>> epoch_length([1, 2, 3]), epoch_length(iter([1]))
        (3, None)
    """
    known = getattr(loader, "num_batches", None)  # of a TableReader
    if isinstance(known, int):
        return known
    try:
        return len(loader)
    except TypeError:  # such as of a DataLoader of an iterable without a length
        return None
