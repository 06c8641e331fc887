"""Data pipes, and helpers of clients' own tests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.compat.answers import raises


def _numbers(count: int) -> Any:
    from torch.utils.data.datapipes.iter import IterableWrapper

    return IterableWrapper(list(range(count)))


def split_by_number() -> Any:
    from torchrec.datasets.utils import idx_split_train_val, train_filter, val_filter

    by_share = [idx_split_train_val(_numbers(25), share, 1) for share in (0.3, 0.5)]
    by_key = idx_split_train_val(_numbers(12), 0.25, 2, lambda number: number * 30)
    return [
        [[list(part) for part in parts] for parts in (*by_share, by_key)],
        raises(lambda: idx_split_train_val(_numbers(2), 1.0)),
        [train_filter(int, 0.25, 2, number) for number in (0, 24, 25, 99, 100)],
        [val_filter(int, 0.25, 2, number) for number in (0, 24, 25, 99, 100)],
    ]


def split_by_chance() -> Any:
    from torchrec.datasets.utils import rand_split_train_val

    train, val = rand_split_train_val(_numbers(40), 0.6, 5)
    return [
        [list(train), list(val), list(train)],
        [
            raises(lambda share=share: rand_split_train_val(_numbers(2), share))
            for share in (0.0, 1)
        ],
    ]


def first_members() -> Any:
    from torch.utils.data.datapipes.iter import IterableWrapper
    from torchrec.datasets.utils import Limit

    read = []

    def counted() -> Any:
        for number in range(9):
            read.append(number)
            yield number

    lazy = Limit(IterableWrapper(counted(), deepcopy=False), 2)
    return [[list(Limit(_numbers(9), count)) for count in (0, 3, 20)], list(lazy), len(read) < 5]


def casts() -> Any:
    from torchrec.datasets.utils import safe_cast

    return [
        safe_cast("3", int, 0),
        safe_cast("x", int, 7),
        safe_cast("", float, 1.5),
        raises(lambda: safe_cast(None, int, 7)),
    ]


def rows_of_files() -> Any:
    from torchrec.datasets.utils import LoadFiles, ReadLinesFromCSV

    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, f"{name}.csv") for name in "xyz"]
        for number, path in enumerate(paths):
            Path(path).write_text(f"h,k\n{number},1\n{number},2\n")
        opened = [
            [os.path.basename(path), file.read(3)] for path, file in LoadFiles(paths, mode="r")
        ]
        binary = [file.read(2) == b"h," for _, file in LoadFiles(paths, mode="rb")]
        return [
            opened,
            binary,
            list(ReadLinesFromCSV(LoadFiles(paths, mode="r"), skip_first_line=True)),
            list(ReadLinesFromCSV(LoadFiles(paths[:1], mode="r"), delimiter="k")),
            len(LoadFiles(paths, length=7)),
            raises(lambda: len(LoadFiles(paths))),
        ]


def pipes_shared_by_workers() -> Any:
    from torch.utils.data.datapipes.iter import IterableWrapper
    from torchrec.datasets.utils import ParallelReadConcat

    pipe = ParallelReadConcat(*[IterableWrapper([number] * 2) for number in range(5)])
    shared = DataLoader(pipe, num_workers=2, batch_size=None)
    return [list(pipe), sorted(int(number) for number in shared)]


def equality_of_batches() -> Any:
    from torchrec import KeyedJaggedTensor
    from torchrec.sparse.test_utils import keyed_jagged_tensor_equals

    lengths = torch.tensor([2, 1, 0, 1])
    one = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4]), lengths=lengths)
    other = KeyedJaggedTensor(["a", "b"], torch.tensor([2, 1, 3, 4]), lengths=lengths)
    return [
        [keyed_jagged_tensor_equals(one, batch) for batch in (one, other, None)],
        keyed_jagged_tensor_equals(None, None),
        keyed_jagged_tensor_equals(one, other, is_pooled_features=True),
    ]


def states_of_models() -> Any:
    from torchrec.test_utils import (
        assert_state_buffers_parameters_equal,
        get_state_buffers_parameters,
    )

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    found = get_state_buffers_parameters(made(0))
    return [
        {name: sorted(dict(values)) for name, values in found.items()},
        raises(lambda: assert_state_buffers_parameters_equal(made(0), made(0))),
        raises(lambda: assert_state_buffers_parameters_equal(made(0), nn.Linear(2, 2))),
    ]


def files_of_tests() -> Any:
    import numpy as np
    from torchrec.datasets.test_utils.criteo_test_utils import CriteoTest

    with CriteoTest._create_dataset_tsv(num_rows=3) as path:
        rows = [line.split("\t") for line in Path(path).read_text().splitlines()]
    with CriteoTest._create_dataset_tsv(num_rows=2, train=False) as path:
        unlabeled = [line.split("\t") for line in Path(path).read_text().splitlines()]
    with CriteoTest._create_dataset_npys(num_rows=4) as paths:
        arrays = [np.load(path) for path in paths]
    with CriteoTest._create_dataset_npys(
        num_rows=2, generate_dense=False, labels=np.array([[1], [0]], dtype=np.int32)
    ) as paths:
        chosen = [os.path.basename(path) for path in paths]
        labels = np.load(paths[-1])
    return [
        [len(row) for row in (*rows, *unlabeled)],
        all(row[0] in "01" and len(row[-1]) == 8 for row in rows),
        [[str(array.dtype), list(array.shape)] for array in arrays],
        chosen,
        labels.tolist(),
        [CriteoTest.INT_FEATURE_COUNT, CriteoTest.CAT_FEATURE_COUNT],
    ]


def helpers_of_tests() -> Any:
    from torchrec.test_utils import get_free_port, is_asan, seed_and_log, skip_if_asan

    @seed_and_log
    def draws() -> Any:
        return torch.rand(2).shape

    @skip_if_asan
    def kept() -> int:
        return 3

    return [1024 < get_free_port() < 65536, is_asan(), kept(), draws()]


def parts_that_are_not_sharded() -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.utils import get_unsharded_module_names

    config = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])
    model = nn.ModuleDict(
        {
            "ebc": EmbeddingBagCollection(tables=[config]),
            "over": nn.Sequential(nn.Linear(4, 2), nn.ReLU()),
        }
    )
    return sorted(get_unsharded_module_names(model))


def batches_read_ahead() -> Any:
    from torchrec.distributed import DataLoadingThread

    thread = DataLoadingThread(torch.device("cpu"), iter([torch.ones(1), torch.zeros(1)]), False)
    thread.start()
    found = [thread.get_next_batch() for _ in range(4)]
    thread.stop()
    return [found, thread.daemon]


def rows_of_data_sets() -> Any:
    from torchrec.datasets.criteo import CriteoIterDataPipe, criteo_kaggle, criteo_terabyte
    from torchrec.datasets.movielens import movielens_20m

    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/day_{day}" for day in range(2)]
        for day, path in enumerate(paths):
            lines = ["\t".join([str(day), *["7", ""] * 6, "3", *["0a"] * 26]) for _ in range(3)]
            Path(path).write_text("\n".join(lines) + "\n")
        Path(f"{folder}/ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,3.5,4\n")
        labels = criteo_terabyte(paths).map(_label).batch(4)
        texts = CriteoIterDataPipe(paths, row_mapper=None)
        return [
            [list(batch) for batch in labels],
            [row[:3] for row in texts],
            [row["int_1"] for row in criteo_kaggle(paths[0])],
            list(movielens_20m(folder).batch(1)),
        ]


def _label(row: Any) -> Any:
    return row["label"]


def _criteo_lines(path: Path, rows: int, has_labels: bool = True) -> str:
    lines = []
    for row in range(rows):
        counts = [str(row + place) if place != 2 else "" for place in range(13)]
        ids = [f"{(row * place) % 4:x}" if place else "" for place in range(26)]
        lines.append("\t".join([*([str(row % 2)] if has_labels else []), *counts, *ids]))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def rows_of_criteo() -> Any:
    from torch.utils.data import IterDataPipe
    from torchrec.datasets.criteo import CriteoIterDataPipe

    with tempfile.TemporaryDirectory() as folder:
        path = _criteo_lines(Path(folder) / "day_0", 3)
        pipe = CriteoIterDataPipe([path, path])
        rows, again = list(pipe), list(pipe)
        return [
            isinstance(pipe, IterDataPipe),
            rows,
            len(again),
            list(CriteoIterDataPipe([path], row_mapper=None)),
            list(CriteoIterDataPipe([path], row_mapper=len)),
            sum(len(batch["label"]) for batch in DataLoader(pipe, batch_size=2)),
        ]


def files_of_scripts() -> Any:
    """Return the scripts' files: names, shapes, and categories; a shuffle keeps its values."""
    import numpy as np
    from torchrec.datasets.scripts import contiguous_preproc_criteo as contiguous
    from torchrec.datasets.scripts import npy_preproc_criteo as npy
    from torchrec.datasets.scripts import shuffle_preproc_criteo as shuffle

    def seen(folder: Path) -> Any:
        return {path.name: list(np.load(path).shape) for path in sorted(folder.iterdir())}

    with tempfile.TemporaryDirectory() as top:
        folders = [Path(top) / name for name in ("text", "npy", "ids", "mixed", "kaggle")]
        for folder in folders:
            folder.mkdir()
        text, arrays, ids, mixed, kaggle = folders
        for day in range(24):
            _criteo_lines(text / f"day_{day}", 3 + day % 3)
        npy.main(["--input_dir", str(text), "--output_dir", str(arrays)])
        contiguous.main(
            ["--input_dir", str(arrays), "--output_dir", str(ids), "--frequency_threshold", "20"]
        )
        found = [seen(arrays), seen(ids)]
        categories = np.load(ids / "day_1_sparse_contig_freq.npy").astype(np.int64)
        for path in list(ids.iterdir()):
            path.rename(ids / path.name.replace("_contig_freq", ""))
        given = ["--input_dir_labels_and_dense", str(arrays), "--input_dir_sparse", str(ids)]
        shuffle.main([*given, "--output_dir_shuffled", str(mixed)])
        last = np.load(mixed / "day_23_sparse.npy").astype(np.int64)
        _criteo_lines(kaggle / "train.txt", 2)
        folder = ["--input_dir", str(kaggle), "--output_dir", str(kaggle)]
        npy.main([*folder, "--dataset_name", "criteo_kaggle"])
        return [
            *found,
            torch.from_numpy(categories),
            seen(mixed),
            torch.from_numpy(last),
            torch.from_numpy(np.load(kaggle / "train_sparse.npy").astype(np.int64)),
            torch.from_numpy(np.load(kaggle / "train_labels.npy").astype(np.int64)),
            sorted(path.name for path in kaggle.glob("*.npy")),
            vars(npy.parse_args(folder)).keys() == {"input_dir", "output_dir", "dataset_name"},
            vars(contiguous.parse_args(folder))["frequency_threshold"],
            vars(shuffle.parse_args([*given, "--output_dir_shuffled", "x"]))["random_seed"],
            raises(lambda: contiguous.main(["--input_dir", str(text), "--output_dir", str(text)])),
            shuffle.INT_COLUMNS,
        ]
