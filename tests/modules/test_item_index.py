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
    module = recommend()
    module.history = None
    given = batch([3, 1, 4])
    with torch.no_grad():
        program = torch.export.export(module, (given,)).module()
        for one, other in zip(program(given), module(given), strict=True):
            torch.testing.assert_close(one, other)


def test_errors():
    index = ItemIndex(torch.ones(3, 2))
    with pytest.raises(ValueError, match="k must be from 1 to 3; received 4"):
        index(torch.ones(1, 2), 4)
    with pytest.raises(ValueError, match=r"queries must be \[queries, 2\]; received \[1, 3\]"):
        index(torch.ones(1, 3), 1)
    with pytest.raises(ValueError, match=r"ids must be one per item, \[3\]; received \[2\]"):
        ItemIndex(torch.ones(3, 2), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="ids must be distinct; received 2 different of 3"):
        ItemIndex(torch.ones(3, 2), torch.tensor([1, 2, 1]))
    for lengths in ([1], [1, 0, 0]):
        seen = JaggedTensor(torch.tensor([1]), lengths=torch.tensor(lengths))
        with pytest.raises(ValueError, match=f"one bag per query, 2; received {len(lengths)}"):
            index(torch.ones(2, 2), 1, seen)
    with pytest.raises(ValueError, match="items must be floats"):
        ItemIndex(torch.ones(3))
