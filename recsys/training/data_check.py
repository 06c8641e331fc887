"""Check that the batches of a job are of one fit, the one of the model's tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import nn

from recsys.modules.tables.fingerprints import check_fingerprints

__all__ = ["DataCheck"]


@final
class DataCheck:
    """Compares the fingerprints of batches with the model and with earlier batches.

    Args:
        model: The model. Tables without a fingerprint take it from the first batch.

    Attributes:
        fingerprints: Fingerprints of the fitted values, by feature.

    Example:
        >>> import torch
        >>> from recsys import EmbeddingBagCollection
        >>> from recsys.features import Categorical, FeatureSpec
        >>> spec = FeatureSpec([Categorical("city")]).fit({"city": ["Oslo", "Rome", "Rome"]})
        >>> check = DataCheck(EmbeddingBagCollection(tables=spec.tables(4)))
        >>> check(spec.transform({"city": ["Oslo"]}))
        >>> other = FeatureSpec([Categorical("city")]).fit({"city": ["Oslo"]})
        >>> check(other.transform({"city": ["Oslo"]}))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: Batches must be of the fit that made table 'city'; ...
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.fingerprints: dict[str, str] = {}

    def __call__(self, batch: Any) -> None:
        """Check a batch.

        Args:
            batch: A `Batch`; other batches have no fingerprints and pass.

        Raises:
            ValueError: It is of another fit.
        """
        found = getattr(batch, "fingerprints", None)
        if not isinstance(found, Mapping) or found == self.fingerprints:
            return
        check_fingerprints(self._model, found, "Batches", takes=True)
        for feature, fingerprint in found.items():
            if self.fingerprints.setdefault(feature, fingerprint) != fingerprint:
                raise ValueError(
                    f"Batches must be of one fit; feature {feature!r} is of another fit than in "
                    "earlier batches, which scales or numbers its values in another way. Read all "
                    "data by one spec: save it by FeatureSpec.save and load it by "
                    "FeatureSpec.load."
                )
