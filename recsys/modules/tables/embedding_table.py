"""One table of a collection as a module, and the module that holds tables by name."""

from __future__ import annotations

from typing import Any, Self, final

import torch
from torch import Tensor, nn

from recsys.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig
from recsys.modules.ids.table_index import TableIndex
from recsys.modules.tables.aliased_storage import detach_storage
from recsys.optim.apply_optimizer_in_backward import is_marked

__all__ = ["EmbeddingTable", "TableDict"]


@final
class TableDict(nn.ModuleDict):
    """Tables by name; a name may equal a method name of a dict, such as `items`."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a table without the check for attributes of that name."""
        self._modules[name] = module  # type: ignore[assignment]

    def train(self, mode: bool = True) -> Self:
        """Set the mode, also beside a table of the name `training`."""
        self.__dict__["training"] = mode
        for table in self._modules.values():
            if table is not None:
                table.train(mode)
        return self

    def _get_name(self) -> str:
        return "ModuleDict"  # for print


@final
class EmbeddingTable(nn.Module):
    """One table of a collection: its parameter under the public name.

    A call looks up ids of this table alone, as `nn.EmbeddingBag` or `nn.Embedding` does. The
    collection looks up all of its tables at once and is faster. With hashed ids, `index` has the
    row of each id, and a call takes rows.

    Args:
        config: The table.
        weight: [num_embeddings, embedding_dim].
    """

    def __init__(self, config: BaseEmbeddingConfig, weight: Tensor) -> None:
        super().__init__()
        self.num_embeddings = config.num_embeddings
        self.embedding_dim = config.embedding_dim
        self.weight = nn.Parameter(weight)
        if config.ids is not None:
            self.index = TableIndex(config, weight.device)
        self._mode = config.pooling.name.lower() if isinstance(config, EmbeddingBagConfig) else ""

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Look up ids of this table alone.

        Args:
            input: Ids, int32 or int64: [N] of bags that `offsets` delimits, or [B, L]. Any shape
                in a collection without pooling.
            offsets: [B], the start of each bag; only with [N] ids.
            per_sample_weights: Shape of `input`, dtype of the table; only with sum pooling.

        Returns:
            [B, embedding_dim], or [*input.shape, embedding_dim] without pooling.

        Raises:
            ValueError: The collection updates the table in backward and would miss this gradient.
            RuntimeError: An id is outside the table.

        Example:
            >>> import torch
            >>> from recsys import EmbeddingBagCollection, EmbeddingBagConfig
            >>> config = EmbeddingBagConfig(10, 4, "films", feature_names=["film"])
            >>> table = EmbeddingBagCollection(tables=[config]).embedding_bags["films"]
            >>> table(torch.tensor([1, 2, 3]), torch.tensor([0, 2])).shape
            torch.Size([2, 4])
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            self._refuse_training()
        if not self._mode:
            return nn.functional.embedding(input, self.weight)
        return nn.functional.embedding_bag(
            input, self.weight, offsets, mode=self._mode, per_sample_weights=per_sample_weights
        )

    @torch.jit.unused
    def _refuse_training(self) -> None:
        if torch.is_grad_enabled() and is_marked(self.weight):
            raise ValueError(
                "A table with an optimizer in backward is trained by its collection; received a "
                "lookup of one table with gradients. Call the collection, or use torch.no_grad()."
            )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            detach_storage(destination, f"{prefix}weight")

    def _get_name(self) -> str:
        return "EmbeddingBag" if self._mode else "Embedding"  # for print

    def extra_repr(self) -> str:
        """Rows, columns and pooling, for repr."""
        size = f"{self.num_embeddings}, {self.embedding_dim}"
        return f"{size}, mode={self._mode!r}" if self._mode else size
