import math
import sys

import pytest
import torch

from recsys.inference.faiss_index import FaissIndex
from recsys.modules.item_index import ItemIndex
from recsys.sparse import JaggedTensor


def test_the_message_without_faiss(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"recsys-torch\[retrieval\]"):
        FaissIndex(torch.ones(3, 2))


@pytest.mark.parametrize("kind", ["Flat", "HNSW32", "IVF4,Flat"])
def test_against_brute_force(kind, tmp_path):
    torch.manual_seed(0)
    items, queries = torch.randn(500, 8), torch.randn(20, 8)
    ids = torch.randperm(10_000)[:500]
    seen = JaggedTensor(ids[:60], lengths=torch.tensor([3] * 20))
    exact = ItemIndex(items, ids)
    index = FaissIndex(items, ids, kind)
    index.save(tmp_path)
    for given in (None, seen):
        scores, found = exact(queries, 10, given)
        of_faiss, found_by_faiss = FaissIndex.load(tmp_path)(queries, 10, given)
        torch.testing.assert_close(index(queries, 10, given)[0], of_faiss)
        if kind == "Flat":
            assert torch.equal(found_by_faiss, found)
            torch.testing.assert_close(of_faiss, scores)
        hits = sum(
            len({*one} & {*other})
            for one, other in zip(found.tolist(), found_by_faiss.tolist(), strict=True)
        )
        assert hits >= (0.95 if kind == "HNSW32" else 0.3) * 200
    if seen is not None:
        bags = seen.to_dense()
        rows = zip(bags, index(queries, 10, seen)[1].tolist(), strict=True)
        assert not any({*bag.tolist()} & {*row} for bag, row in rows)


@pytest.mark.parametrize(
    ("kind", "parameters"), [("IVF4,Flat", "nprobe=4"), ("HNSW8", "efSearch=500")]
)
def test_parameters_of_the_search(kind, parameters, tmp_path):
    torch.manual_seed(0)
    items, queries = torch.randn(500, 8), torch.randn(20, 8)
    wanted = ItemIndex(items)(queries, 10)[1]
    by_default = FaissIndex(items, kind=kind)(queries, 10)[1]
    FaissIndex(items, kind=kind, parameters=parameters).save(tmp_path)
    found = FaissIndex.load(tmp_path)(queries, 10)[1]
    assert torch.equal(found, wanted)
    assert not torch.equal(by_default, wanted)
    with pytest.raises(RuntimeError, match="cells"):
        FaissIndex(items, kind=kind, parameters="cells=4")


def test_an_interrupted_save_leaves_no_mixed_index(tmp_path, monkeypatch):
    FaissIndex(torch.eye(3), torch.tensor([7, 8, 9]), "Flat").save(tmp_path)
    other = FaissIndex(torch.eye(3).flip(0), torch.tensor([4, 5, 6]), "Flat")
    complete = {"items.faiss", "items.faiss.sha256", "ids.pt", "ids.pt.sha256"}
    assert {path.name for path in tmp_path.iterdir()} == complete
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("disk is full")))
        with pytest.raises(OSError, match="disk is full"):
            other.save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no ids\.pt"):
        FaissIndex.load(tmp_path)
    other.save(tmp_path)
    assert FaissIndex.load(tmp_path)(torch.eye(3)[:1], 1)[1].tolist() == [[6]]
    file = tmp_path / "items.faiss"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match="is damaged"):
        FaissIndex.load(tmp_path)


def test_fewer_items_than_asked_for():
    scores, found = FaissIndex(torch.eye(2), kind="Flat")(torch.ones(1, 2), 4)
    assert found.sort().values.tolist() == [[-1, -1, 0, 1]]
    assert scores.isinf().sum() == 2


def test_values_that_are_not_finite_are_never_found():
    items = torch.ones(6, 2)
    items[1, 0], items[2, 0], items[3] = math.nan, math.inf, -math.inf
    queries = torch.tensor([[1.0, 1.0], [math.nan, 1.0]])
    for ids in (None, torch.arange(10, 16)):
        scores, found = FaissIndex(items, ids, kind="Flat")(queries, 4)
        assert found[0].sort().values.tolist() == (
            [-1, 0, 4, 5] if ids is None else [-1, 10, 14, 15]
        )
        assert scores[0].tolist() == [2.0, 2.0, 2.0, -math.inf]
        assert scores[1].isnan().all()
        assert (found[1] == -1).all()


def test_scores_that_overflow_are_never_found():
    items = torch.tensor([[1e30], [1e30], [1.0], [2.0], [1e30]])
    scores, found = FaissIndex(items, kind="Flat")(torch.tensor([[1e30], [1.0]]), 2)
    assert found[0].tolist() == [3, 2]
    assert scores[0].isfinite().all()
    assert scores[1].tolist() == [torch.tensor(1e30).item()] * 2


def test_errors():
    with pytest.raises(ValueError, match=r"one per item, \[2\]; received \[3\]"):
        FaissIndex(torch.eye(2), torch.arange(3), "Flat")
    seen = JaggedTensor(torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"one bag per query, 2; .*1"):
        FaissIndex(torch.eye(2), kind="Flat")(torch.ones(2, 2), 1, seen)
