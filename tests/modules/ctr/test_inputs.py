import pytest
import torch

from recsys.modules.ctr.inputs import FieldInput, FlatInput
from tests.modules.ctr.cases import DENSE, SIZE, batch, collection


def test_flat():
    tables = collection((3, 1, 2))
    flat, dense, ids = FlatInput(tables, DENSE), torch.randn(SIZE, DENSE), batch()
    assert flat.out_features == DENSE + 6
    assert torch.equal(flat(dense, ids), torch.cat([dense, tables(ids).values()], 1))


def test_fields():
    tables = collection()
    fields, dense, ids = FieldInput(tables, DENSE), torch.randn(SIZE, DENSE), batch()
    found = fields(dense, ids)
    assert (fields.dim, fields.num_fields) == (3, DENSE + 3)
    for i in range(DENSE):
        torch.testing.assert_close(found[:, i], dense[:, i : i + 1] * fields.vectors[i])
    for i, part in enumerate(tables(ids).to_dict().values()):
        assert torch.equal(found[:, DENSE + i], part)


def test_errors():
    with pytest.raises(ValueError, match="all of one embedding_dim"):
        FieldInput(collection((3, 1, 3)), 2)
    with pytest.raises(ValueError, match=r"must be \[samples, dense_in_features\]"):
        FlatInput(collection(), 3)(torch.randn(SIZE, DENSE), batch())
