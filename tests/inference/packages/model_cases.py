"""Models of clicks and of sequences, and random requests of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from recsys.inference import quantize_embeddings
from recsys.modules.ctr.autoint import AutoInt
from recsys.modules.ctr.dcn_v2 import DCNV2
from recsys.modules.ctr.din import DIN
from recsys.modules.ctr.final_mlp import FinalMLP
from recsys.modules.ctr.multi_task import PLE, MMoE, MultiTask
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.item_index import ItemIndex, Recommend
from recsys.modules.sequences.bert4rec import BERT4Rec
from recsys.modules.sequences.gru4rec import GRU4Rec
from recsys.modules.sequences.hstu import HSTU
from recsys.modules.sequences.masked_item import MaskedItem
from recsys.modules.sequences.next_item import NextItem
from recsys.modules.sequences.ranking import Ranking
from recsys.modules.sequences.sasrec import SASRec
from recsys.sparse import KeyedJaggedTensor

ROWS: Final = 30
LENGTH: Final = 6
DIM: Final = 8
DENSE: Final = 3
BAGS: Final = ["user", "film", "tags"]


@final
class Case(NamedTuple):
    """A model in evaluation mode, and its features."""

    model: nn.Module
    features: Sequence[str]
    """Names of the features. "film" and "candidate" have one id per sample; features of a history
    have equal lengths."""
    has_dense: bool


@final
class Together(nn.Module):
    """All models in one program, as each compilation costs many seconds before its first kernel."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.models = nn.ModuleList(case.model for case in cases)
        self.has_dense = [case.has_dense for case in cases]

    def forward(self, dense_features: Tensor, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        found = {}
        for number, (model, has_dense) in enumerate(zip(self.models, self.has_dense, strict=True)):
            parts = model(dense_features, features) if has_dense else model(features)
            for place, part in enumerate(parts if isinstance(parts, tuple) else [parts]):
                found[f"{number}_{place}"] = part
        return found


TOGETHER: Final = {
    "clicks": ("dcn_v2", "ple", "din", "ranking"),
    "sequences": ("hstu", "bert4rec"),
    "recurrent": ("gru4rec",),
}
"""Models that are compiled as one program."""


def together(kinds: Sequence[str]) -> Case:
    """Return the models as one."""
    cases = [build(kind) for kind in kinds]
    features = dict.fromkeys(name for case in cases for name in case.features)
    return Case(Together(cases).eval(), [*features], has_dense=True)


_OF_HISTORY: Final = ("history", "actions", "times")
_SINGLE: Final = ("film", "candidate", "candidate_times")


def request_of(case: Case, num_rows: int, seed: int) -> dict[str, Tensor]:
    """Return a request; some histories are empty, and some have the greatest length."""
    draw = torch.Generator().manual_seed(seed)
    request: dict[str, Tensor] = {}
    if case.has_dense:
        request["dense_features"] = torch.randn(num_rows, DENSE, generator=draw)
    lengths = torch.randint(0, LENGTH + 1, (num_rows,), generator=draw)
    for name in case.features:
        of_feature = lengths
        if name in _SINGLE:
            of_feature = torch.ones_like(lengths)
        elif name not in _OF_HISTORY:
            of_feature = torch.randint(0, 4, (num_rows,), generator=draw)
        most = 10**6 if name.endswith("times") else ROWS
        request[name] = torch.randint(0, most, (int(of_feature.sum()),), generator=draw)
        request[f"{name}.lengths"] = of_feature
    return request


def arguments_of(case: Case, request: dict[str, Tensor]) -> list[Any]:
    """Return the arguments of the model for a request."""
    values = torch.cat([request[name] for name in case.features])
    lengths = torch.cat([request[f"{name}.lengths"] for name in case.features])
    features = KeyedJaggedTensor(case.features, values, lengths=lengths)
    return [request["dense_features"], features] if case.has_dense else [features]


def build(kind: str) -> Case:
    """Return a quantized model of random weights."""
    torch.manual_seed(0)
    case = _of_clicks(kind) or _of_sequences(kind)
    for parameter in case.model.parameters():
        if parameter.shape and parameter.shape[0] != ROWS:
            nn.init.normal_(parameter, std=0.3)
    return case._replace(model=quantize_embeddings(case.model.eval(), torch.int8))


CLICKS: Final = ("dcn_v2", "autoint", "final_mlp", "mmoe", "ple", "din")
SEQUENCES: Final = ("ranking", "sasrec", "hstu", "gru4rec", "bert4rec", "masked_item")


def bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(ROWS, DIM, f"{name}s", feature_names=[name]) for name in BAGS]
    )


def clicks(kind: str) -> nn.Module:
    """Return a model of `bags()` and dense features."""
    columns = DENSE + DIM * len(BAGS)
    if kind == "dcn_v2":
        return DCNV2(bags(), DENSE, 2, [8])
    if kind == "autoint":
        return AutoInt(bags(), DENSE, 2, 2, 4, [8])
    if kind == "final_mlp":
        return FinalMLP(bags(), DENSE, [8], contexts=(["user"], []), gate_hidden=4)
    if kind == "mmoe":
        return MultiTask(bags(), DENSE, MMoE(columns, 2, 3, [8, 4], [4]))
    return MultiTask(bags(), DENSE, PLE(columns, 2, 2, 1, 2, [8, 4], [4]))


def _of_clicks(kind: str) -> Case | None:
    if kind == "din":
        rows = EmbeddingConfig(ROWS, DIM, "items", feature_names=["history", "candidate"])
        model = DIN(
            bags(), EmbeddingCollection(tables=[rows]), DENSE, pairs=[("history", "candidate")]
        )
        return Case(model, [*BAGS, "history", "candidate"], has_dense=True)
    return Case(clicks(kind), BAGS, has_dense=True) if kind in CLICKS else None


def _of_sequences(kind: str) -> Case:
    if kind == "bert4rec":
        model = BERT4Rec(ROWS, LENGTH, DIM, 2, 2, feature="history")
        return Case(model, ["history"], has_dense=False)
    if kind == "masked_item":
        masked = MaskedItem(BERT4Rec(ROWS, LENGTH + 1, DIM, 2, 2, feature="history"), ROWS - 1)
        index = ItemIndex(masked.items(ROWS, torch.device("cpu")))
        return Case(Recommend(masked, index, 5), ["history"], has_dense=False)
    if kind == "ranking":
        tables = [
            EmbeddingConfig(ROWS, DIM, "items", feature_names=["history", "candidate"]),
            EmbeddingConfig(ROWS, DIM, "actions", feature_names=["actions"]),
        ]
        encoder = HSTU(DIM, LENGTH + 1, num_heads=2, has_time=True)
        ranking = Ranking(
            EmbeddingCollection(tables=tables), encoder, DIM, [6, 2], times="times",
            candidate_times="candidate_times",
        )  # fmt: skip
        names = ["history", "actions", "candidate", "times", "candidate_times"]
        return Case(ranking, names, has_dense=True)
    items = EmbeddingConfig(ROWS, DIM, "items", feature_names=["history"])
    collection = EmbeddingCollection(tables=[items])
    weight = collection.embeddings["items"].weight.detach().clone()
    times = "times" if kind == "hstu" else None
    encoder_of = {"sasrec": SASRec, "gru4rec": GRU4Rec}
    encoder = (
        HSTU(DIM, LENGTH, num_heads=2, has_time=True)
        if kind == "hstu"
        else encoder_of[kind](DIM, LENGTH)
    )
    users = NextItem(collection, encoder, "in_batch", times=times)
    names = ["history", "times"] if times else ["history"]
    return Case(Recommend(users, ItemIndex(weight), 5), names, has_dense=False)
