"""Command lines that prepare the Criteo files with `BinaryCriteoUtils`."""

from __future__ import annotations

import argparse
from pathlib import Path

from recsys.datasets.criteo import DAYS
from recsys.datasets.criteo_utils import BinaryCriteoUtils

_FILES = {
    "criteo_1tb": [f"day_{day}" for day in range(DAYS)],
    "criteo_kaggle": ["train.txt", "test.txt"],
}


def parse_npy_args(argv: list[str]) -> argparse.Namespace:
    """Read the arguments of `convert_files`."""
    parser = argparse.ArgumentParser(description="Convert Criteo's text files to .npy files.")
    parser.add_argument("--input_dir", required=True, help="has day_0, ... or train.txt, test.txt")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--dataset_name", choices=list(_FILES), default="criteo_1tb")
    return parser.parse_args(argv)


def convert_files(argv: list[str]) -> None:
    """Run `BinaryCriteoUtils.tsv_to_npys` on each existing file of a data set."""
    args = parse_npy_args(argv)
    names = [n for n in _FILES[args.dataset_name] if (Path(args.input_dir) / n).exists()]
    if not names:
        raise FileNotFoundError(f"{args.input_dir} has no file of {args.dataset_name}.")
    for name in names:
        path, start = Path(args.input_dir) / name, Path(args.output_dir) / name.removesuffix(".txt")
        dense, sparse, labels = (f"{start}_{kind}.npy" for kind in ("dense", "sparse", "labels"))
        BinaryCriteoUtils.tsv_to_npys(str(path), dense, sparse, labels, args.dataset_name)


def parse_contiguous_args(argv: list[str]) -> argparse.Namespace:
    """Read the arguments of `make_ids_contiguous`."""
    parser = argparse.ArgumentParser(description="Give Criteo's categories ids without gaps.")
    parser.add_argument("--input_dir", required=True, help="has day_0_sparse.npy, ...")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--frequency_threshold", type=int, default=0)
    return parser.parse_args(argv)


def make_ids_contiguous(argv: list[str]) -> None:
    """Run `BinaryCriteoUtils.sparse_to_contiguous` on the files of all days."""
    args = parse_contiguous_args(argv)
    paths = [str(Path(args.input_dir) / f"day_{day}_sparse.npy") for day in range(DAYS)]
    BinaryCriteoUtils.sparse_to_contiguous(paths, args.output_dir, args.frequency_threshold)


def parse_shuffle_args(argv: list[str]) -> argparse.Namespace:
    """Read the arguments of `shuffle_files`."""
    parser = argparse.ArgumentParser(description="Shuffle the rows of all days but the last.")
    parser.add_argument("--input_dir_labels_and_dense", required=True)
    parser.add_argument("--input_dir_sparse", required=True)
    parser.add_argument("--output_dir_full_set", help="must be left out: see BinaryCriteoUtils")
    parser.add_argument("--output_dir_shuffled", required=True)
    parser.add_argument("--random_seed", type=int, default=0)
    return parser.parse_args(argv)


def shuffle_files(argv: list[str]) -> None:
    """Run `BinaryCriteoUtils.shuffle` on the files of all days."""
    args = parse_shuffle_args(argv)
    labels = [f"{args.input_dir_labels_and_dense}/day_{day}_labels.npy" for day in range(DAYS)]
    rows = {day: BinaryCriteoUtils.get_shape_from_npy(path)[0] for day, path in enumerate(labels)}
    BinaryCriteoUtils.shuffle(**vars(args), rows_per_day=rows)
