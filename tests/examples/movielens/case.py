"""A small made-up MovieLens, many of whose ratings fall in the same second."""

import numpy as np
from movielens.files import Item, MovieLensFiles, User

GENRES = ("Comedy", "Drama", "War")


def made_up_files(num_ratings=600, num_users=12, num_items=30, seed=0):
    generator = np.random.default_rng(seed)
    pairs = generator.permutation(num_users * num_items)[: min(num_ratings, 360)]
    num = len(pairs)
    return MovieLensFiles(
        user_N=100 + pairs // num_items,
        item_N=500 + pairs % num_items,
        rating_N=generator.integers(1, 6, num).astype(np.float32),
        timestamp_N=900_000_000 + 86_400 * generator.integers(0, 25, num),
        users={100 + k: User(20 + k, "MF"[k % 2], "writer", f"{k}0210") for k in range(num_users)},
        items={500 + k: Item(1950 + k, GENRES[: k % 4]) for k in range(num_items)},
    )
