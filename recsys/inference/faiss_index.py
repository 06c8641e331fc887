"""Approximate search of items by faiss, for catalogues of millions.

Shapes: `B` queries, `I` items, `D` columns, `K` results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from recsys.base.arguments import path_of, whole
from recsys.base.checked import checked
from recsys.base.checksums import new_file, verify_if_present
from recsys.modules.item_index import check_item_ids, check_seen, select_items
from recsys.sparse import JaggedTensor, ops

__all__ = ["FaissIndex"]


@final
class FaissIndex:
    """Search with the arguments and results of `ItemIndex`, by an index of faiss on a CPU.

    Needs the extra `retrieval`.

    Args:
        items: `[I, D]` floating, the vectors. NaN and infinite vectors are left out of the index,
            as `ItemIndex` never finds them.
        ids: int64 `[I]`, ids of the items, distinct; None for 0 to `I - 1`.
        kind: Kind of the index, as of `faiss.index_factory`, such as "Flat" (exact), "HNSW32" or
            "IVF1024,PQ16".
        parameters: Parameters of the search, as of `faiss.ParameterSpace`, such as "nprobe=32" for
            "IVF..." or "efSearch=64" for "HNSW...". Larger numbers find more of the best items
            and take longer. Empty for the defaults of faiss, which search one cell of "IVF...".

    Raises:
        ImportError: Faiss is not installed.
        TypeError: `ids` are not whole numbers.
        RuntimeError: Faiss does not know the kind or a parameter.
        ValueError: There is not one id per item, ids are equal, or no vector is finite.

    Example:
        >>> index = FaissIndex(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]]), kind="Flat")
        >>> index(torch.tensor([[1.0, 0.5]]), 2)[1].tolist()
        [[2, 0]]
    """

    @checked
    def __init__(
        self,
        items: Tensor,
        ids: Tensor | None = None,
        kind: str = "HNSW32",
        parameters: str = "",
    ) -> None:
        faiss = _faiss()
        if ids is None:
            ids = torch.arange(items.shape[0])
        else:
            check_item_ids(items, ids)
        items = items.detach().float().cpu()
        items, self._ids = select_items(items, ids.long().cpu(), items.isfinite().all(1))
        vectors = items.contiguous().numpy()
        self._index = faiss.index_factory(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
        if not self._index.is_trained:
            self._index.train(vectors)
        self._index.add(vectors)
        if parameters:
            faiss.ParameterSpace().set_index_parameters(self._index, parameters)

    def __call__(
        self, queries: Tensor, k: int, seen: JaggedTensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return about the best items of each query, the best first.

        Args:
            queries: `[B, D]`.
            k: `K`.
            seen: Ids that a query must not find, one bag per query. The index is asked for as many
                more items as the longest bag has. None for none.

        Returns:
            Scores `[B, K]` and int64 ids `[B, K]`; -inf and -1 where the index found fewer, NaN and
            -1 for a query that is not finite.

        Raises:
            ValueError: `k` is below 1, or there is not one bag per query.
        """
        whole("k", k)
        check_seen(queries, seen)
        longest = 0 if seen is None or not len(seen.lengths()) else int(seen.lengths().max())
        queries = queries.detach().float().cpu()
        is_finite = queries.isfinite().all(1, keepdim=True)
        vectors = queries.where(is_finite, 0.0).contiguous().numpy()
        size = min(len(self._ids), k + longest)
        while True:
            similarities, places = self._index.search(vectors, size)
            scores, rows = torch.from_numpy(similarities), torch.from_numpy(places)
            # Scores that overflow are first, and are not found: search items after them.
            if size == len(self._ids) or not ((rows >= 0) & scores.isposinf()).any():
                break
            size = min(len(self._ids), 2 * size)
        ids = self._ids[rows.clamp(min=0)].masked_fill(rows < 0, -1)
        is_left = (rows >= 0) & scores.isfinite() & is_finite
        if seen is not None:
            is_left &= ~_is_in(ids, seen)
        scores = scores.masked_fill(~is_left, float("-inf"))
        ids = ids.masked_fill(~is_left, -1)
        missing = max(0, k - ids.shape[1])
        scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
        ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
        best, order = scores.topk(k, dim=1)
        return best.masked_fill(~is_finite, float("nan")), ids.gather(1, order)

    def save(self, folder: str | Path) -> None:
        """Write the index and the ids to a folder, each with its checksum.

        Args:
            folder: Created if missing. The files of an earlier save are replaced.
        """
        folder = path_of("FaissIndex.save.folder", folder)
        Path(folder, "ids.pt").unlink(missing_ok=True)  # never beside the items of another save
        with new_file(Path(folder, "items.faiss")) as path:
            _faiss().write_index(self._index, str(path))
        with new_file(Path(folder, "ids.pt")) as path:
            torch.save(self._ids, path)

    @staticmethod
    def load(folder: str | Path) -> FaissIndex:
        """Read an index. Files without checksums are read with a warning.

        Args:
            folder: Folder of `save`.

        Raises:
            FileNotFoundError: A file is missing, such as after a save that was interrupted.
            ValueError: A file is damaged.
        """
        folder = path_of("FaissIndex.load.folder", folder)
        for name in ("items.faiss", "ids.pt"):
            if not Path(folder, name).is_file():
                raise FileNotFoundError(
                    f"folder must have the files of FaissIndex.save; {folder} has no {name}. Save "
                    "the index again."
                )
            verify_if_present(Path(folder, name))
        index = FaissIndex.__new__(FaissIndex)
        index._index = _faiss().read_index(str(Path(folder, "items.faiss")))
        index._ids = torch.load(Path(folder, "ids.pt"), weights_only=True)
        return index


def _is_in(ids: Tensor, seen: JaggedTensor) -> Tensor:
    """Return whether each id `[B, K]` is in the bag of its row."""
    of_seen = seen.trim().values().long().cpu()
    known = torch.cat([ids.flatten(), of_seen]).unique()
    rows = torch.arange(ids.shape[0]).unsqueeze(1)
    keys = rows * len(known) + torch.searchsorted(known, ids)
    return torch.isin(
        keys, ops.bags_of(seen).cpu() * len(known) + torch.searchsorted(known, of_seen)
    )


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ImportError(
            "FaissIndex needs faiss. Install it: pip install 'recsys-torch[retrieval]'"
        ) from error
    return faiss
