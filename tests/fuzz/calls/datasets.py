"""Calls of `recsys.datasets`."""

from __future__ import annotations

from pathlib import Path

import torch

from recsys.datasets.criteo import CriteoDataset
from recsys.datasets.criteo_utils import BinaryCriteoUtils
from recsys.datasets.random import RandomRecDataset
from recsys.datasets.rows import criteo_kaggle, criteo_terabyte, movielens_20m
from recsys.datasets.utils import Batch
from tests.fuzz.argument_kinds import (
    DEVICE,
    KJT,
    Kind,
    anything,
    either,
    flag,
    function,
    many,
    mapping,
    maybe,
    path,
    tensor,
    text,
    texts,
    whole,
    wholes,
)
from tests.fuzz.calls.call import Call, method

ROW = "\t".join(["1", *map(str, range(13)), *(f"{n:08x}" for n in range(26))]) + "\n"


def _criteo() -> str:
    Path("day").write_text(ROW * 4)
    return "day"


def _movielens() -> str:
    Path("ml").mkdir(exist_ok=True)
    Path("ml/ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,3.5,4\n2,1,1.0,5\n")
    return "ml"


def batch() -> Batch:
    """Two samples."""
    return Batch(torch.ones(2, 1), KJT.right(), torch.ones(2))


RANKS = {"rank": whole(0, 0, 0), "world_size": whole(1)}
MAPPER = {"row_mapper": maybe(function(lambda row: row))}
COUNT = maybe(whole(2, 0))
COUNTS = maybe(Kind(lambda: None, wholes([1, 1]).is_legal))

CALLS = [
    Call("Batch", Batch, {
        "dense_features": maybe(tensor(lambda: torch.ones(2, 1))), "sparse_features": KJT,
        "labels": tensor(lambda: torch.ones(2)), "dense_names": texts(["x"]),
        "label_name": text("y"),
    }),
    Call("Batch.from_columns", Batch.from_columns, {
        "columns": anything(lambda: {"a": [[1], [2]], "x": [0.5, 1.0], "y": [0, 1]}),
        "sparse": texts(["a"]), "dense": texts(["x"]), "label": maybe(text("y")),
        "weights": maybe(Kind(lambda: None, mapping(dict, text("w")).is_legal)),
        "padding": maybe(whole(-1, None)),
    }),
    Call("Batch.to", method(batch, "to"), {
        "device": DEVICE, "non_blocking": Kind(lambda: False, flag(False).is_legal),
    }),
    Call("RandomRecDataset", lambda **given: next(iter(RandomRecDataset(**given))), {
        "keys": texts(["a", "b"], 1), "batch_size": whole(3, 0), "hash_size": maybe(whole(5)),
        "ids_per_feature": COUNT, "num_dense": whole(2, 0), "manual_seed": maybe(whole(3, None)),
        "num_batches": maybe(whole(2)), "num_generated_batches": whole(2, None),
        "min_ids_per_feature": COUNT, "hash_sizes": COUNTS, "ids_per_features": COUNTS,
        "min_ids_per_features": COUNTS,
    }),
    Call("CriteoDataset", lambda **given: next(iter(CriteoDataset(**given))), {
        "paths": many(lambda: [_criteo()], path(_criteo)), "batch_size": whole(2),
        "num_embeddings_per_feature": either(whole(10), wholes([10] * 26, 1, 26)),
        **{name: maybe(kind) for name, kind in RANKS.items()},
    }),
    Call("criteo_kaggle", lambda **given: next(iter(criteo_kaggle(**given))), {
        "path": path(_criteo), **MAPPER,
    }),
    Call("criteo_terabyte", lambda **given: next(iter(criteo_terabyte(**given))), {
        "paths": many(lambda: [_criteo()], path(_criteo)), **MAPPER,
    }),
    Call("movielens_20m", lambda **given: next(iter(movielens_20m(**given))), {
        "root": path(_movielens), "include_movies_data": flag(False), **MAPPER,
    }),
    Call("BinaryCriteoUtils.get_file_row_ranges_and_remainder",
         BinaryCriteoUtils.get_file_row_ranges_and_remainder, {
        "lengths": wholes([4, 4]), **RANKS, "start_row": whole(0, 0), "last_row": maybe(
            whole(5, -1)),
    }),
]  # fmt: skip
