import pytest
import torch

from recsys.datasets.utils import Batch
from recsys.modules.dlrm import DLRMTrain
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.modules.sequences.hstu import HSTU
from recsys.modules.sequences.ranking import Ranking
from recsys.sparse import JaggedTensor, KeyedJaggedTensor

DIM = 8
NAMES = ["history", "actions", "candidate", "times", "candidate_times"]


def build(tasks: int = 1) -> Ranking:
    torch.manual_seed(0)
    tables = [
        EmbeddingConfig(
            num_embeddings=20,
            embedding_dim=DIM,
            name="items",
            feature_names=["history", "candidate"],
        ),
        EmbeddingConfig(
            num_embeddings=5, embedding_dim=DIM, name="actions", feature_names=["actions"]
        ),
    ]
    encoder = HSTU(DIM, 12, num_heads=2, dropout=0.0, has_time=True)
    return Ranking(
        EmbeddingCollection(tables=tables), encoder, DIM, [6, tasks], times="times",
        candidate_times="candidate_times",
    )  # fmt: skip


def batch(histories: list[int], candidates: list[int], seed: int = 0) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(seed)
    num, most = sum(histories), sum(candidates)
    parts = [
        torch.randint(0, 20, (num,), generator=draw),
        torch.randint(0, 5, (num,), generator=draw),
        torch.randint(0, 20, (most,), generator=draw),
        torch.randint(0, 1000, (num,), generator=draw),
        torch.randint(1000, 2000, (most,), generator=draw),
    ]
    lengths = torch.tensor([*histories * 2, *candidates, *histories, *candidates])
    return KeyedJaggedTensor(NAMES, torch.cat(parts), lengths=lengths)


def test_each_candidate_is_scored_as_alone():
    model = build(tasks=2).eval()
    features = batch([4, 0, 2], [2, 1, 3])
    found = model(torch.zeros(3, 0), features).split([2, 1, 3])
    of_each = {name: features[name].to_dense() for name in NAMES}
    for sample, logits in enumerate(found):
        for place, logit in enumerate(logits):
            values = [of_each[name][sample] for name in NAMES]
            for name in ("candidate", "candidate_times"):
                values[NAMES.index(name)] = of_each[name][sample][place : place + 1]
            lengths = torch.tensor([len(value) for value in values])
            alone = KeyedJaggedTensor(NAMES, torch.cat(values), lengths=lengths)
            torch.testing.assert_close(model(torch.zeros(1, 0), alone)[0], logit)


def test_against_the_encoder_of_one_history():
    model = build().eval()
    features = batch([3], [1])
    items = model.embedding_collection.embeddings["items"].weight
    actions = model.embedding_collection.embeddings["actions"].weight
    of = {name: features[name].values() for name in NAMES}
    rows = torch.cat([items[of["history"]] + actions[of["actions"]], items[of["candidate"]]])
    times = torch.cat([of["times"], of["candidate_times"]])
    encoded = model.encoder(
        JaggedTensor(rows, lengths=torch.tensor([4])), times, torch.tensor([1])
    ).values()
    torch.testing.assert_close(
        model(torch.zeros(1, 0), features), model.out(model.mlp(encoded[3:]))
    )


def test_training_by_dlrm_train():
    model = DLRMTrain(build())
    labels = torch.tensor([1.0, 0.0, 1.0])
    loss, (_, logits, _) = model(Batch(torch.zeros(3, 0), batch([4, 0, 2], [1, 1, 1]), labels))
    loss.backward()
    assert logits.shape == (3,)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_errors():
    collection = build().embedding_collection
    for place, bag in ((3, "3 and 4 of bag 0"), (4, "1 and 2 of bag 0")):
        parts = [[3, 1], [3, 1], [1, 1], [3, 1], [1, 1]]
        parts[place] = [parts[place][0] + 1, parts[place][1] - 1]
        lengths = torch.tensor(parts).flatten()
        ids = torch.ones(int(lengths.sum()), dtype=torch.int64)
        with pytest.raises(ValueError, match=f"lengths must be equal; received {bag}"):
            build()(torch.zeros(2, 0), KeyedJaggedTensor(NAMES, ids, lengths=lengths))
    with pytest.raises(ValueError, match="given together"):
        Ranking(collection, HSTU(DIM, 4), DIM, [1], times="times")
