"""The array operations equal a loop over ratings, and no feature knows its own future."""

import numpy as np
import pyarrow.compute as pc
import pytest
from movielens.features import LIKED, past_of, with_features

from recsys.datasets import Split
from tests.examples.movielens.case import made_up_ratings, with_column

RATINGS = made_up_ratings()
USER, ITEM, RATING, TIME = (
    RATINGS[name].to_numpy() for name in ("user_id", "item_id", "rating", "timestamp")
)
NUM = len(RATINGS)
SPLITS = {
    "time": np.ones(NUM, bool),
    "random": Split().parts_of(RATINGS, "", np.arange(NUM)) == 0,
}
PAST = ("history", "user_like_rate", "user_mean", "item_ratings", "item_like_rate", "item_mean")
PAST += ("item_days", "film_age", "zip", "year", "genres", "age")


def standing(table, names=PAST):
    return table.select(names).to_pylist()


@pytest.mark.parametrize("visible", SPLITS.values(), ids=SPLITS)
def test_history_equals_a_loop(visible):
    found = with_features(RATINGS, visible, history=5)["history"].to_pylist()
    for row in range(NUM):
        earlier = [
            (TIME[other], ITEM[other])
            for other in range(NUM)
            if USER[other] == USER[row]
            and TIME[other] < TIME[row]
            and RATING[other] >= LIKED
            and visible[other]
        ]
        assert found[row] == [item for _, item in sorted(earlier)[-5:]]
    assert max(map(len, found)) == 5


@pytest.mark.parametrize("group_N", [USER, ITEM])
def test_past_sums_equal_a_loop(group_N):
    (found,) = past_of(group_N, TIME, RATING.astype(float))
    for row in range(NUM):
        earlier = (group_N == group_N[row]) & (TIME[row] > TIME)
        assert found[row] == RATING[earlier].sum()


@pytest.mark.parametrize("visible", SPLITS.values(), ids=SPLITS)
def test_the_present_and_the_future_cannot_change_a_feature(visible):
    """Features of all samples up to a moment do not depend on the ratings after it."""
    moment = np.quantile(TIME, 0.6)
    other = np.random.default_rng(1).integers(1, 6, NUM)
    changed = with_column(RATINGS, "rating", np.where(moment <= TIME, other, RATING))
    one, two = (with_features(ratings, visible, 20) for ratings in (RATINGS, changed))
    assert one["liked"] != two["liked"]
    differ = [a != b for a, b in zip(standing(one), standing(two), strict=True)]
    assert not any(differ[row] for row in range(NUM) if TIME[row] <= moment)
    assert sum(differ) > 20, "later features do see the ratings"


def test_random_split_features_know_training_labels_only():
    visible = SPLITS["random"]
    flipped = with_column(RATINGS, "rating", np.where(visible, RATING, 6 - RATING))
    one, two = (with_features(ratings, visible, 20) for ratings in (RATINGS, flipped))
    assert standing(one) == standing(two)


def test_order_of_the_file_does_not_matter():
    order = np.random.default_rng(2).permutation(NUM)
    visible = SPLITS["random"]
    one = with_features(RATINGS, visible, 20).take(order)
    two = with_features(RATINGS.take(order), visible[order], 20)
    for name in PAST:
        if name in ("user_mean", "item_mean", "user_like_rate", "item_like_rate"):
            np.testing.assert_allclose(one[name].to_numpy(), two[name].to_numpy(), atol=1e-12)
        else:
            assert one[name].to_pylist() == two[name].to_pylist()


def test_known_values():
    table = with_features(RATINGS, SPLITS["time"], 20)
    wanted = (pc.field("item_id") == 503) & (pc.field("user_id") == 104)
    (row,) = table.filter(wanted).to_pylist()
    assert (row["zip"], row["year"], row["genres"]) == ("04", 1953, ["Comedy", "Drama", "War"])
    earlier = (ITEM == 503) & (row["timestamp"] > TIME)
    assert row["item_ratings"] == earlier.sum() > 0
    before = row["timestamp"] > TIME
    base = (np.sum(RATING[before] >= 4) + 1) / (before.sum() + 2)
    likes = np.sum(RATING[earlier] >= 4)
    assert row["item_like_rate"] == pytest.approx((likes + 10 * base) / (earlier.sum() + 10))
    first = TIME[ITEM == 503].min()
    assert row["item_days"] == pytest.approx((row["timestamp"] - first) / 86_400)
    assert row["film_age"] == pytest.approx(
        1970 + row["timestamp"] / (365.25 * 86_400) - 1953, abs=1e-9
    )
    (first_row, *_) = table.filter(
        (pc.field("item_id") == 503) & (pc.field("timestamp") == first)
    ).to_pylist()
    assert first_row["item_days"] is None
    assert table.filter(pc.field("item_id") == 500)["film_age"].null_count == 12
