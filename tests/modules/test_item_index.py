import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.modules.item_index import ItemIndex, Recommend
from recsys.modules.sequences.next_item import NextItem
from recsys.modules.sequences.sasrec import SASRec
from recsys.sparse import JaggedTensor, KeyedJaggedTensor


@given(st.integers(0, 999), st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_against_a_sort_of_all_scores(seed, k, chunk, has_seen):
    draw = np.random.default_rng(seed)
    items, queries = draw.standard_normal((12, 3)), draw.standard_normal((4, 3))
    ids = draw.permutation(100)[:12]
    bags = [draw.choice([*ids, 777], draw.integers(0, 6), replace=False) for _ in queries]
    seen = JaggedTensor(
        torch.from_numpy(np.concatenate(bags)), lengths=torch.tensor([len(bag) for bag in bags])
    )
    index = ItemIndex(torch.from_numpy(items), torch.from_numpy(ids), chunk)
    scores, found = index(torch.from_numpy(queries), k, seen if has_seen else None)
    for query, bag, row, of_row in zip(queries, bags, scores, found, strict=True):
        expected = items @ query
        if has_seen:
            expected = np.where(np.isin(ids, bag), -np.inf, expected)
        order = np.argsort(-expected)[:k]
        np.testing.assert_allclose(row.numpy(), expected[order])
        is_left = np.isfinite(expected[order])
        assert of_row.numpy()[is_left].tolist() == ids[order][is_left].tolist()


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_scores_that_are_not_finite_are_never_found(value, chunk):
    items = torch.ones(5, 2)
    items[3, 0] = value
    index = ItemIndex(items, chunk_items=chunk)
    queries = torch.tensor([[1e10, 1.0], [-1e10, 1.0], [value, 1.0]])
    scores, found = index(queries, 5)
    for row, ids in zip(scores[:2], found[:2], strict=True):
        assert {*ids[:4].tolist()} == {0, 1, 2, 4}
        assert (row[4], ids[4]) == (-math.inf, -1)
    assert found[2, 4] == -1
    if value != 1e30:
        assert scores[2].isnan().all()  # the query is not finite
        assert (found[2] == -1).all()


def test_rows_that_are_no_items_are_left_out():
    items = torch.eye(3)
    items[1] = -math.inf
    index = ItemIndex(items, torch.tensor([7, 8, 9]))
    assert index.ids.tolist() == [7, 9]
    assert index(torch.ones(1, 3), 2)[1].sort().values.tolist() == [[7, 9]]
    assert ItemIndex(torch.eye(3)).without(torch.tensor([1])).ids.tolist() == [0, 2]
    with pytest.raises(ValueError, match=r"an item; received \[2, 2\] without"):
        ItemIndex(torch.full((2, 2), -math.inf))


def test_special_rows_are_not_recommended():
    """With the vectors of the model, and with the vectors of the table."""
    films = EmbeddingConfig(9, 8, "films", feature_names=["history", "target"], num_special_rows=2)
    model = NextItem(EmbeddingCollection(tables=[films]), SASRec(8, 9), "in_batch").eval()
    weight = model.embedding_collection.embeddings["films"].weight
    lengths = torch.tensor([1, 2, 0, 0])
    features = KeyedJaggedTensor(["history", "target"], torch.tensor([3, 0, 4]), lengths=lengths)
    for items in (model.items(9, torch.device("cpu")), weight):
        for history in ("history", None):
            found = Recommend(model, ItemIndex(items), 7, history)(features)[1]
            seen = [3, 4] if history else [-1, -1]
            for row, own in zip(found.tolist(), seen, strict=True):
                assert {*row} - {-1} == {2, 3, 4, 5, 6, 7, 8} - {own}
    own_ids = ItemIndex(weight, torch.arange(9))  # of another catalogue, without a history
    assert 0 in Recommend(model, own_ids, 9, None)(features)[1]


def recommend() -> Recommend:
    films = EmbeddingConfig(
        num_embeddings=20, embedding_dim=8, name="films", feature_names=["history"]
    )
    model = NextItem(EmbeddingCollection(tables=[films]), SASRec(8, 9), "in_batch").eval()
    return Recommend(model, ItemIndex(model.embedding_collection.embeddings["films"].weight), 5)


def batch(lengths: list[int]) -> KeyedJaggedTensor:
    ids = torch.randint(0, 20, (sum(lengths),))
    return KeyedJaggedTensor(["history"], ids, lengths=torch.tensor(lengths))


def test_items_of_users():
    module, features = recommend(), batch([3, 1, 4])
    scores, found = module(features)
    items = module.model.embedding_collection.embeddings["films"].weight
    expected = module.model.users(features) @ items.T
    for row, (bag, of_row) in enumerate(zip(features["history"].to_dense(), found, strict=True)):
        assert not {*bag.tolist()} & {*of_row.tolist()}
        torch.testing.assert_close(scores[row], expected[row, of_row])


def test_an_exported_program_has_the_index_inside():
    """With an item, and a query, that are not finite."""
    module = recommend()
    module.history = None
    module.index.items = module.index.items.clone()
    module.index.items[5] = math.nan
    given = batch([3, 1, 4])
    with torch.no_grad():
        table = module.model.embedding_collection.embeddings["films"].weight
        table[given["history"].values()[3]] = math.inf
        program = torch.export.export(module, (given,)).module()
        for one, other in zip(program(given), module(given), strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
    scores, found = program(given)
    assert 5 not in found
    assert scores[1].isnan().all()
    assert (found[1] == -1).all()


def test_errors():
    index = ItemIndex(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"k must .*1 to 3; .*4"):
        index(torch.ones(1, 2), 4)
    with pytest.raises(ValueError, match=r"queries must .*\[queries, 2\]; .*\[1, 3\]"):
        index(torch.ones(1, 3), 1)
    with pytest.raises(ValueError, match=r"one per item, \[3\]; .*\[2\]"):
        ItemIndex(torch.ones(3, 2), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"ids must .*received 2 .*of 3"):
        ItemIndex(torch.ones(3, 2), torch.tensor([1, 2, 1]))
    for lengths in ([1], [1, 0, 0]):
        seen = JaggedTensor(torch.tensor([1]), lengths=torch.tensor(lengths))
        with pytest.raises(ValueError, match=f"bag per query, 2; received {len(lengths)}"):
            index(torch.ones(2, 2), 1, seen)
    with pytest.raises(TypeError, match=r"ids must be whole .*torch\.float32"):
        ItemIndex(torch.ones(3, 2), torch.ones(3))
    with pytest.raises(ValueError, match=r"offsets \[2\]; received \[1\] and \[3\]"):
        index.rank(torch.ones(1, 2), torch.zeros(1), torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match="items must be floats"):
        ItemIndex(torch.ones(3))
