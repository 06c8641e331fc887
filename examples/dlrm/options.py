"""The command line of the DLRM example."""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from arguments import folder, new_folder, positive, whole

SPLITS = ["time", "random"]


def parse_options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--dataset", choices=["movielens", "criteo", "random"], default="movielens")
    parser.add_argument(
        "--data", type=folder, help="folder of the data; default: fetch MovieLens 100K"
    )
    parser.add_argument("--split", choices=SPLITS, help=f"of MovieLens; default: {SPLITS[0]}")
    parser.add_argument("--epochs", type=whole(1), help="default: what suits the data")
    parser.add_argument(
        "--batch-size", type=whole(1), default=256, help="samples per rank and step"
    )
    parser.add_argument("--embedding-dim", type=whole(1), default=64)
    parser.add_argument("--embedding-lr", type=positive, default=0.3)
    parser.add_argument(
        "--embedding-eps", type=positive, default=3e-3, help="large: tame rare rows"
    )
    parser.add_argument("--dense-lr", type=positive, default=0.001)
    parser.add_argument(
        "--num-embeddings", type=whole(2), help="rows of the random data's tables; default: 100000"
    )
    parser.add_argument("--bits", type=int, choices=[8, 4], default=8, help="of quantized rows")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0)
    parser.add_argument("--out", type=new_folder, default=Path("runs/dlrm"))
    parser.add_argument(
        "--resume", choices=["never", "auto"], default="never", help="save, and go on from there"
    )
    parser.add_argument(
        "--save-every", type=whole(1), help="steps, with --resume auto; default: 50"
    )
    parser.add_argument(
        "--tf32", action=argparse.BooleanOptionalAction, default=True, help="of a GPU's matmuls"
    )
    parser.add_argument(
        "--graph-dense", action="store_true", help="launch dense parts as CUDA graphs"
    )
    arguments = parser.parse_args()
    if arguments.graph_dense and not torch.cuda.is_available():
        parser.error("--graph-dense needs a CUDA device; torch sees none. Leave it out on a CPU.")
    dataset, with_dataset = arguments.dataset, f"with --dataset {arguments.dataset}"
    for option, value, is_read, when in (
        ("data", arguments.data, dataset != "random", with_dataset),
        ("split", arguments.split, dataset == "movielens", with_dataset),
        ("num-embeddings", arguments.num_embeddings, dataset == "random", with_dataset),
        ("save-every", arguments.save_every, arguments.resume == "auto", "without --resume auto"),
    ):
        if value is not None and not is_read:
            parser.error(f"--{option} does nothing {when}. Leave it out.")
    arguments.split = arguments.split or SPLITS[0]
    arguments.num_embeddings = arguments.num_embeddings or 100_000
    if arguments.resume == "auto":
        arguments.save_every = arguments.save_every or 50
    return arguments
