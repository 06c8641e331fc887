"""Recommend the next item: SASRec, BERT4Rec, GRU4Rec and HSTU on histories of users.

- `python examples/sequences/train.py --model hstu`
- `torchrun --standalone --nproc-per-node=2 examples/sequences/train.py --model sasrec`
- `python examples/sequences/train.py --data FOLDER`: another release of MovieLens
- `python examples/sequences/train.py --data FILE`: a `.parquet` or `.csv` file with the columns
  `user`, `item` and `time`, such as Amazon Beauty

Each user's last item is for test, the one before for validation. Each is ranked among all items
that the user has not read. Models read the user's last `--max-length` items. Users with fewer than
3 items are left out, and so are items that only they have; a 5-core must be made before. `--model
popularity` and `--model knn` are baselines without training.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import torch
from torch import Tensor, nn

from recsys import datasets
from recsys.datasets.histories import leave_one_out
from recsys.datasets.utils import Batch
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.features import Categorical, FeatureSpec, Ids
from recsys.metrics.retrieval import RetrievalMetrics
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.modules.item_index import ItemIndex
from recsys.modules.sequences.bert4rec import BERT4Rec
from recsys.modules.sequences.gru4rec import GRU4Rec
from recsys.modules.sequences.hstu import HSTU
from recsys.modules.sequences.masked_item import MaskedItem
from recsys.modules.sequences.next_item import NextItem, with_catalogue
from recsys.modules.sequences.sasrec import SASRec
from recsys.optim import Adam, apply_optimizer_in_backward, in_backward_optimizer_filter
from recsys.sparse import ops
from recsys.training import Trainer
from recsys.training.full_ranking import FullRanking

sys.path.insert(0, str(Path(__file__).parents[1]))
from arguments import positive, whole
from launch import run
from movielens.data import fetch_movielens_100k
from movielens.files import read_movielens

MODELS = ("hstu", "sasrec", "gru4rec", "bert4rec")
BASELINES = ("popularity", "knn")
SEEN = ["history", "earlier"]
KS, CPU = [10], torch.device("cpu")


def read_file(path: Path, names: Sequence[str]) -> pa.Table:
    """Read columns of a file of interactions."""
    rule = f"--data {path} must be a folder of MovieLens, or a .csv or .parquet file"
    if path.suffix not in (".csv", ".parquet") or not path.is_file():
        received = f"the suffix {path.suffix!r}" if path.is_file() else "no such file"
        raise SystemExit(f"{rule}; received {received}.")
    data = ds.dataset(path, format=path.suffix.removeprefix("."))
    if missing := sorted({*names} - {*data.schema.names}):
        raise SystemExit(
            f"{rule} with the columns user, item and time; {missing} are missing, and the columns "
            f"are {data.schema.names}. Rename the columns, or add a first line with their names."
        )
    return data.to_table(columns=list(names))


def load(path: Path | None, max_length: int) -> tuple[dict[str, pa.Table], FeatureSpec, int]:
    """Return the parts of the interactions, their description, and the number of ids of items."""
    if path is None or path.is_dir():
        names = ("user_id", "item_id", "timestamp")
        data = read_movielens(fetch_movielens_100k() if path is None else path)
    else:
        names = ("user", "item", "time")
        data = read_file(path, names)
    parts = leave_one_out(
        data, **dict(zip(("user", "item", "time"), names, strict=True)), max_length=max_length
    )
    columns = [Categorical(name, is_list=True, table="items") for name in (*SEEN, "target")]
    spec = FeatureSpec([*columns, Ids("times", rows=2**62, is_list=True)])
    spec.fit(pa.concat_tables([parts["train"], parts["test"]]))  # all items of the catalogue
    return parts, spec, spec.fitted.vocabularies["items"].num_rows


def build(arguments: argparse.Namespace, num_items: int, special: int) -> nn.Module:
    """Build a model with its loss; the first ids are special, such as missing and unknown."""
    torch.manual_seed(arguments.seed)
    dim, length, dropout = arguments.dim, arguments.max_length, arguments.dropout
    if arguments.model == "bert4rec":
        bert = BERT4Rec(
            num_items, length + 1, dim, nhead=2, num_layers=2, dropout=dropout,
            num_special_rows=special,
        )  # fmt: skip
        return MaskedItem(bert, mask_id=0)  # the row of missing items
    items = EmbeddingConfig(
        name="items",
        num_embeddings=num_items,
        embedding_dim=dim,
        feature_names=["history", "target", "candidates"],
        init_fn=lambda weight: nn.init.normal_(weight, std=0.02),
        num_special_rows=special,
    )
    encoders = {
        "hstu": lambda: HSTU(dim, length, num_heads=2, dropout=dropout, has_time=True),
        "sasrec": lambda: SASRec(dim, length, dropout=dropout),
        "gru4rec": lambda: GRU4Rec(dim, length, dropout=dropout),
    }
    encoder = encoders[arguments.model]()
    return NextItem(EmbeddingCollection(tables=[items]), encoder, "full", times="times")


class Batches:
    """Batches of a part, with all items as candidates; their state is the reader's."""

    def __init__(self, reader: Any, num_items: int) -> None:
        self.reader, self.num_items = reader, num_items
        self.state_dict, self.load_state_dict = reader.state_dict, reader.load_state_dict
        self.load_state_dicts, self.set_epoch = reader.load_state_dicts, reader.set_epoch

    def __iter__(self):
        for batch in self.reader:
            features = with_catalogue(batch.sparse_features, self.num_items)
            yield Batch(batch.dense_features, features, batch.labels)


def train(arguments: argparse.Namespace) -> dict[str, float]:
    """Train a model; return the metrics of the test."""
    env = ShardingEnv.default()
    parts, spec, num_items = load(arguments.data, arguments.max_length)
    loaders = {
        name: Batches(
            datasets.table(
                part, spec, arguments.batch_size, rank=env.rank, world_size=env.world_size,
                divide="batches", shuffle=name == "train", seed=arguments.seed, labels=False,
            ),
            num_items,
        )
        for name, part in parts.items()
    }  # fmt: skip
    model = build(arguments, num_items, spec.fitted.vocabularies["items"].num_special_rows)
    settings = {"lr": arguments.lr}
    for module in model.modules():
        if isinstance(module, EmbeddingCollection):
            apply_optimizer_in_backward(Adam, module.parameters(), settings)
    model = DistributedModelParallel(model, env=env, device=CPU)
    dense = dict(in_backward_optimizer_filter(model.named_parameters())).values()
    trainer = Trainer(
        model,
        torch.optim.Adam(dense, **settings),
        arguments.out / arguments.model,
        epochs=arguments.epochs,
        metrics=lambda device: FullRanking(model, num_items, device, KS, ["earlier"]),
        monitor="ndcg@10",
        patience=arguments.patience,
        overwrite=True,
        pipeline=arguments.model != "bert4rec",  # its masks are drawn in the forward pass
        log_every=None,
    )
    trainer.fit(loaders["train"], loaders["validation"])
    return trainer.evaluate(loaders["test"])


def baseline(arguments: argparse.Namespace) -> dict[str, float]:
    """Rank by the number of readers, or by items that were read together (cosine of columns)."""
    parts, spec, num_items = load(arguments.data, arguments.max_length)
    features = {
        part: spec.transform(table, labels=False).sparse_features for part, table in parts.items()
    }

    def read(part: str, columns: Sequence[str]) -> Tensor:
        """Return which user has which item in these columns."""
        x = ops.concat([features[part][name] for name in columns])
        found = torch.zeros(len(parts[part]), num_items)
        found[ops.bags_of(x), x.values()] = 1.0
        return found

    train, test = read("train", [*SEEN, "target"]), read("test", SEEN)
    items, queries = train.sum(0).unsqueeze(1), torch.ones(len(test), 1)
    if arguments.model == "knn":
        columns = nn.functional.normalize(train, dim=0)
        alike = (columns.T @ columns).fill_diagonal_(0.0)
        nearest = alike.topk(min(100, num_items), dim=1)
        items = torch.zeros_like(alike).scatter(1, nearest.indices, nearest.values)
        queries = test
    special = torch.arange(spec.fitted.vocabularies["items"].num_special_rows)
    index = ItemIndex(items).without(special)
    last = ops.slice(features["test"]["target"], -1)
    seen = ops.concat([features["test"][name] for name in SEEN])
    metrics = RetrievalMetrics(KS, CPU)
    ranks = index.rank(queries, last.values(), last.offsets(), seen)
    metrics.update_ranks(*ranks, last.offsets())
    return metrics.compute()


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", choices=[*MODELS, *BASELINES], default="hstu")
    parser.add_argument("--data", type=Path, help="file or folder; default: fetch MovieLens 100K")
    parser.add_argument("--max-length", type=whole(1), default=100, help="items of a history")
    parser.add_argument("--dim", type=whole(1), default=64, help="of items and models")
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--lr", type=positive, default=0.001)
    parser.add_argument("--batch-size", type=whole(1), default=64, help="users per rank and step")
    parser.add_argument("--epochs", type=whole(1), default=200, help="at most")
    parser.add_argument("--patience", type=whole(1), default=15, help="epochs without a better one")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/sequences"))
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_options()
    run(partial(baseline if arguments.model in BASELINES else train, arguments))


if __name__ == "__main__":
    main()
