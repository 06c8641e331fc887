import torch

from recsys.sparse.features import FeatureViews


def test_cuts_every_part_once_and_only_when_asked():
    values, lengths = torch.arange(5), torch.tensor([2, 0, 3])
    views = FeatureViews(values, values + 0.5, lengths, sizes=[2, 3], strides=[2, 1])
    assert views.values[1].tolist() == [2, 3, 4]
    assert views.weights[0].tolist() == [0.5, 1.5]
    assert views.lengths[1].tolist() == [3]
    assert views.values is views.values


def test_without_weights():
    one = torch.ones(1, dtype=torch.int64)
    assert FeatureViews(one, None, one, sizes=[1], strides=[1]).weights is None
