"""A small made-up MovieLens, many of whose ratings fall in the same second."""

import numpy as np
import pyarrow as pa

GENRES = ("Comedy", "Drama", "War")


def made_up_ratings(num_users=12, num_items=30, seed=0):
    generator = np.random.default_rng(seed)
    pairs = generator.permutation(num_users * num_items)
    user, item = pairs // num_items, pairs % num_items
    num = len(pairs)
    return pa.table(
        {
            "user_id": 100 + user,
            "item_id": 500 + item,
            "rating": generator.integers(1, 6, num).astype(np.float32),
            "timestamp": 900_000_000 + 86_400 * generator.integers(0, 25, num),
            "year": pa.array(1950 + item, mask=item == 0),
            "genres": [list(GENRES[: k % 4]) for k in item],
            "age": 20 + user,
            "gender": ["MF"[k % 2] for k in user],
            "occupation": ["writer"] * num,
            "zip": [f"{k:02}210" for k in user],
        }
    )


def with_column(table, name, values):
    """Return a table with other values in a column."""
    return table.set_column(table.column_names.index(name), name, pa.array(values))
