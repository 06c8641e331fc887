"""Training of BERT4Rec to find masked items.

Shapes: `M` samples, `N` values of all histories, `D` columns.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from recsys.base.arguments import check_input, whole
from recsys.base.checked import checked
from recsys.modules.sequences.bert4rec import BERT4Rec
from recsys.modules.sequences.next_item import special_rows
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, ops

__all__ = ["MaskedItem", "mask_items"]


@final
class MaskedItem(nn.Module):
    """Train `BERT4Rec` on batches of `NextItem`, with histories and their next items.

    In training, some of the items of a history and its last target are masked; in evaluation, a
    mask follows the history. The ids are masked in the forward pass: a pipeline must not look them
    up before, so use `Trainer(..., pipeline=False)`.

    Args:
        model: Its `max_len` is at least the length of a history plus 1.
        mask_id: Id of the mask, which no item has.
        probability: Share of the items that are masked in training.
        history: Feature of the ids of histories, the earliest first.
        target: Feature of the ids that follow, as many in each bag.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> model = MaskedItem(BERT4Rec(10, 5, 8, nhead=2, num_layers=1), mask_id=0)
        >>> ids, lengths = torch.tensor([1, 2, 3, 2, 5, 4]), torch.tensor([2, 1, 2, 1])
        >>> features = KeyedJaggedTensor(["history", "target"], ids, lengths=lengths)
        >>> loss, _ = model(features)
        >>> loss.backward()
        >>> model.users(features).shape
        torch.Size([2, 9])
    """

    @checked
    def __init__(
        self,
        model: BERT4Rec,
        mask_id: int,
        probability: float = 0.2,
        *,
        history: str = "history",
        target: str = "target",
    ) -> None:
        super().__init__()
        _check_probability(probability)
        self.model, self.probability = model, probability
        self.mask_id = whole("mask_id", mask_id, 0)
        num_items = model.out.out_features
        if mask_id >= num_items:
            raise ValueError(
                f"mask_id must be below vocab_size={num_items} of the model; received {mask_id}."
            )
        self.history, self.target = history, target

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the mean loss of the masked items; in evaluation, of the last targets.

        Args:
            batch: A `KeyedJaggedTensor`, or a batch with one as `sparse_features`. Its
                `sample_weights`, if it has them, multiply the losses of a sample's values.

        Returns:
            The loss for `backward`, 0 for a batch without values; and, detached, the loss, the
            vectors of the users `[M, D + 1]` and the ids of the last targets. Rank items in
            evaluation mode only: in training, the encoder may read a target.

        Raises:
            KeyError: A feature is missing.
            TypeError: `batch` is neither a `KeyedJaggedTensor` nor a batch with one.
        """
        features: KeyedJaggedTensor = getattr(batch, "sparse_features", batch)
        check_input("MaskedItem.batch", features, KeyedJaggedTensor)
        history, targets = features[self.history], features[self.target]
        last = ops.slice(targets, -1)
        if self.training:
            # targets are the history one item later: with its first item they are all items
            x = ops.concat([ops.slice(history, 0, 1), targets])
            x, labels = mask_items(x, self.mask_id, self.probability)
        else:
            x = self._followed(history)
            labels = x.values().new_full(x.values().shape, -100)
            # the last value of a bag is the mask; without a target its label stays -100
            labels[x.offsets()[1:][last.lengths() > 0] - 1] = last.values()
        encoded = self._encode(x)
        is_asked = labels >= 0
        # selected before the last layer, as a row of logits has vocab_size columns
        logits = self.model.out(encoded.values()[is_asked])
        losses = nn.functional.cross_entropy(logits, labels[is_asked].long(), reduction="none")
        weights = getattr(batch, "sample_weights", None)
        if weights is not None:
            losses = losses * weights[ops.bags_of(x)[is_asked]]
        loss = losses.sum() / max(1, losses.shape[0])
        users = _with_one(ops.sum(ops.slice(encoded, -1)))
        return loss, (loss.detach(), users.detach(), last.values())

    def users(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the vector of the value after each history, `[M, D + 1]`.

        Args:
            features: Histories.
        """
        encoded = self._encode(self._followed(features[self.history]))
        return _with_one(ops.sum(ops.slice(encoded, -1)))

    def items(self, num_items: int, device: torch.device) -> Tensor:
        """Return vectors `[num_items, D + 1]`, whose dot products with users are the scores.

        The mask and the special rows of the table are -inf, as they are not items.

        Args:
            num_items: Number of ids.
            device: Device of the model.
        """
        weight, bias = self.model.out.weight, self.model.out.bias
        vectors: Tensor = torch.cat([weight, bias.unsqueeze(1)], 1)[:num_items].to(device)
        ids = torch.arange(vectors.shape[0], device=device)
        is_special = torch.isin(ids, self.special_ids().to(device))
        return vectors.masked_fill(is_special.unsqueeze(1), float("-inf"))

    def special_ids(self) -> Tensor:
        """Return the ids that are not items, int64: the special rows of the table, and the mask."""
        rows = special_rows(self.model.embedding_collection, self.model.feature)
        ids: Tensor = torch.cat([rows, torch.tensor([self.mask_id])]).unique()
        return ids

    def _followed(self, history: JaggedTensor) -> JaggedTensor:
        """Return histories, each with a mask at its end."""
        num = history.lengths().shape[0]
        mask = history.values().new_full((num,), self.mask_id)
        return ops.concat([history, JaggedTensor(mask, lengths=torch.ones_like(history.lengths()))])

    def _encode(self, x: JaggedTensor) -> JaggedTensor:
        features = KeyedJaggedTensor([self.model.feature], x.values(), lengths=x.lengths())
        return self.model.encode(features)


def _check_probability(probability: float) -> None:
    if not 0 < probability <= 1:
        raise ValueError(f"probability must be above 0 and at most 1; received {probability}.")


def _with_one(users: Tensor) -> Tensor:
    """Append a column of ones, which multiplies the bias of items."""
    return torch.cat([users, users.new_ones(users.shape[0], 1)], 1)


@checked
def mask_items(
    x: JaggedTensor, mask_id: int, probability: float, generator: torch.Generator | None = None
) -> tuple[JaggedTensor, Tensor]:
    """Replace some items of histories by a mask, for training.

    Each item is masked with the same probability, and an item of each history is masked at least.
    To predict the next item, append the mask to the history.

    Args:
        x: int64 `[N]` ids.
        mask_id: Id of the mask.
        probability: Share of the items, above 0.
        generator: Generator of the draws, on the device of `x`; None for torch's own.

    Returns:
        The histories with masks; and int64 `[N]` targets: the id of a masked item, -100 elsewhere,
        which `cross_entropy` ignores.

    Raises:
        ValueError: The probability is not above 0, or above 1.

    Example:
        >>> x = JaggedTensor(torch.tensor([5, 6, 7]), lengths=torch.tensor([2, 1]))
        >>> masked, targets = mask_items(x, mask_id=0, probability=1.0)
        >>> masked.values().tolist(), targets.tolist()
        ([0, 0, 0], [5, 6, 7])
    """
    _check_probability(probability)
    x = x.trim()
    ids = x.values()
    draw = torch.rand(ids.shape, generator=generator, device=ids.device)
    # there is no ops.min; negation is exact, so that the comparison below finds the draw
    least = -ops.max(ops.with_values(x, -draw))  # a history's lowest draw is masked at least
    is_masked = (draw < probability) | (draw == ops.expand(least, x).values())
    return ops.with_values(x, ids.masked_fill(is_masked, mask_id)), ids.masked_fill(
        ~is_masked, -100
    )
