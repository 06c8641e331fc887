"""Conversion of Criteo text files to arrays on disk, contiguous ids, and shuffling.

A day has three files: `[N, 13]` float32 counts, `[N, 26]` categories and `[N, 1]` int32 labels.
Arrays are read and written through memory maps, in blocks of rows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import DTypeLike, NDArray

from recsys.base.checked import checked
from recsys.datasets.criteo import (
    CAT_FEATURE_COUNT,
    DAYS,
    INT_FEATURE_COUNT,
    log_counts,
    read_blocks,
)
from recsys.datasets.utils import PATH_MANAGER_KEY, check_path_manager_key

FREQUENCY_THRESHOLD = 3
"""Occurrences from which a category gets its own id."""
_ROWS = 1 << 16  # rows per block
_RARE, _FIRST_OWN = 1, 2  # ids of `sparse_to_contiguous`


@final
class BinaryCriteoUtils:
    """Steps from Criteo text files to the arrays that `InMemoryBinaryCriteoIterDataPipe` reads."""

    @staticmethod
    @checked
    def tsv_to_npys(
        in_file: str,
        out_dense_file: str,
        out_sparse_file: str,
        out_labels_file: str,
        dataset_name: str = "criteo_1tb",
        path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:
        """Convert one text file.

        `recsys.datasets.criteo.log_counts` converts counts to dense features. Missing counts and
        categories are 0. The label of a file without labels is -1 in every row.

        Args:
            in_file: Text file of Criteo lines, plain or `.gz`.
            out_dense_file: Output, `[N, 13]` float32.
            out_sparse_file: Output, `[N, 26]` int64.
            out_labels_file: Output, `[N, 1]` int32.
            dataset_name: "criteo_1tb" or "criteo_kaggle", which have the same line format.
            path_manager_key: Must be `PATH_MANAGER_KEY`: only local files are supported.

        Raises:
            FileNotFoundError: The file is missing.
            ValueError: The file is empty, a line is damaged or truncated, or `dataset_name` is
                unknown.
        """
        check_path_manager_key(path_manager_key)
        if dataset_name not in ("criteo_1tb", "criteo_kaggle"):
            raise ValueError(
                f"dataset_name must be 'criteo_1tb' or 'criteo_kaggle'; received {dataset_name!r}."
            )
        path = Path(in_file)
        num_rows = sum(len(block.lines) for block in read_blocks(path, _ROWS))
        with _new_arrays(
            (out_dense_file, np.float32, (num_rows, INT_FEATURE_COUNT)),
            (out_sparse_file, np.int64, (num_rows, CAT_FEATURE_COUNT)),
            (out_labels_file, np.int32, (num_rows, 1)),
        ) as (dense, sparse, labels):
            for block in read_blocks(path, _ROWS):
                rows, start = block.parse(), block.first_line - 1
                here = slice(start, start + len(rows.label_B))
                dense[here] = log_counts(rows.counts_BK)
                sparse[here] = np.maximum(rows.categories_BK, 0)
                labels[here, 0] = rows.label_B

    @staticmethod
    @checked
    def get_shape_from_npy(path: str, path_manager_key: str = PATH_MANAGER_KEY) -> tuple[int, ...]:
        """Return the shape of an array without reading its contents.

        Args:
            path: An `.npy` file.
            path_manager_key: Must be `PATH_MANAGER_KEY`: only local files are supported.
        """
        check_path_manager_key(path_manager_key)
        return tuple(np.load(path, mmap_mode="r").shape)

    @staticmethod
    @checked
    def get_file_row_ranges_and_remainder(
        lengths: list[int],
        rank: int,
        world_size: int,
        start_row: int = 0,
        last_row: int | None = None,
    ) -> tuple[dict[int, tuple[int, int]], int]:
        """Return the rows of each file that belong to a rank, if ranks get contiguous ranges.

        Args:
            lengths: Rows of each file.
            rank: Rank of this process.
            world_size: Number of processes. The first ranks get one row more if the rows cannot be
                divided equally.
            start_row: First row, counted over all files.
            last_row: Last row, inclusive; None for the last row of all files.

        Returns:
            First and last row (inclusive) by file number, and the remainder of the number of rows
            divided by `world_size`.

        Raises:
            ValueError: The rank is not below the world size, or the files do not have these rows.

        Example:
            >>> BinaryCriteoUtils.get_file_row_ranges_and_remainder([5, 8], rank=0, world_size=2)
            ({0: (0, 4), 1: (0, 1)}, 1)
        """
        if min(lengths, default=0) < 0:
            raise ValueError(f"lengths must be numbers of rows, at least 0; received {lengths}.")
        last_row = sum(lengths) - 1 if last_row is None else last_row
        if not 0 <= rank < world_size or not 0 <= start_row <= last_row + 1 <= sum(lengths):
            raise ValueError(
                "rank must be in [0, world_size) and rows in the files; received rank "
                f"{rank} of {world_size}, rows {start_row} to {last_row} of {sum(lengths)}."
            )
        share, remainder = divmod(last_row + 1 - start_row, world_size)
        first = start_row + rank * share + min(rank, remainder)
        stop = first + share + (rank < remainder)
        ranges: dict[int, tuple[int, int]] = {}
        file_start = 0
        for number, length in enumerate(lengths):
            low, high = max(first, file_start), min(stop, file_start + length)
            if low < high:
                ranges[number] = (low - file_start, high - 1 - file_start)
            file_start += length
        return ranges, remainder

    @staticmethod
    @checked
    def load_npy_range(
        fname: str,
        start_row: int,
        num_rows: int,
        path_manager_key: str = PATH_MANAGER_KEY,
        mmap_mode: bool = False,
    ) -> NDArray[Any]:
        """Read a range of rows of an array.

        Args:
            fname: An `.npy` file of two dims.
            start_row: First row.
            num_rows: Number of rows.
            path_manager_key: Must be `PATH_MANAGER_KEY`: only local files are supported.
            mmap_mode: Return a memory map of the file instead of a copy.

        Returns:
            `[num_rows, columns]`.

        Raises:
            ValueError: The array does not have two dims, or not these rows.
        """
        check_path_manager_key(path_manager_key)
        whole = np.load(fname, mmap_mode="r")
        if whole.ndim != 2 or not 0 <= start_row <= start_row + num_rows <= len(whole):
            raise ValueError(
                f"{fname} must hold the rows asked for, in two dims; received start_row "
                f"{start_row} and num_rows {num_rows} for shape {list(whole.shape)}."
            )
        rows: NDArray[Any] = whole[start_row : start_row + num_rows]
        return rows if mmap_mode else np.array(rows)

    @staticmethod
    @checked
    def sparse_to_contiguous(
        in_files: list[str],
        output_dir: str,
        frequency_threshold: int = FREQUENCY_THRESHOLD,
        columns: int = CAT_FEATURE_COUNT,
        path_manager_key: str = PATH_MANAGER_KEY,
        output_file_suffix: str = "_contig_freq.npy",
    ) -> None:
        """Map the frequent categories of each column to ids 2, 3, ... in the order of occurrence.

        Categories with fewer than `frequency_threshold` occurrences in all files become 1.

        Args:
            in_files: Files of `[N, columns]` integers; one column of all files must fit in memory.
            output_dir: Folder of the int32 outputs, `NAME` + `output_file_suffix` for `NAME.npy`.
            frequency_threshold: Occurrences from which a category has its own id.
            columns: Number of columns of the files.
            path_manager_key: Must be `PATH_MANAGER_KEY`: only local files are supported.
            output_file_suffix: Suffix of the output names.

        Raises:
            ValueError: A file has another number of columns.
        """
        check_path_manager_key(path_manager_key)
        read = [_with_columns(path, columns) for path in in_files]
        names = [Path(path).name.removesuffix(".npy") + output_file_suffix for path in in_files]
        ends = np.cumsum([len(array) for array in read])
        with _new_arrays(
            *(
                (Path(output_dir) / name, np.int32, array.shape)
                for name, array in zip(names, read, strict=True)
            )
        ) as written:
            for column in range(columns):
                categories = np.concatenate([array[:, column] for array in read])
                _, first, place, count = np.unique(
                    categories, return_index=True, return_inverse=True, return_counts=True
                )
                ids = np.full(len(first), _RARE, np.int32)
                frequent = np.flatnonzero(count >= frequency_threshold)
                by_occurrence = frequent[np.argsort(first[frequent])]
                ids[by_occurrence] = np.arange(len(frequent), dtype=np.int32) + _FIRST_OWN
                for array, part in zip(written, np.split(ids[place], ends[:-1]), strict=True):
                    array[:, column] = part

    @staticmethod
    @checked
    def shuffle(
        input_dir_labels_and_dense: str,
        input_dir_sparse: str,
        output_dir_shuffled: str,
        rows_per_day: Mapping[int, int],
        output_dir_full_set: str | None = None,
        days: int = DAYS,
        int_columns: int = INT_FEATURE_COUNT,
        sparse_columns: int = CAT_FEATURE_COUNT,
        path_manager_key: str = PATH_MANAGER_KEY,
        random_seed: int = 0,
    ) -> None:
        """Shuffle the rows of all days but the last, across days; the last is copied as it is.

        Input and output files are named `day_0_dense.npy`, `day_0_sparse.npy`, `day_0_labels.npy`
        and so on. The permutation takes 8 bytes of memory per row.

        Args:
            input_dir_labels_and_dense: Folder of the counts and labels.
            input_dir_sparse: Folder of the categories.
            output_dir_shuffled: Another folder, for outputs of the same names and sizes.
            rows_per_day: Number of rows of each day; the last day may be omitted.
            output_dir_full_set: Must be None: a single file would store ids as floats.
            days: Number of days.
            int_columns: Columns of the counts.
            sparse_columns: Columns of the categories.
            path_manager_key: Must be `PATH_MANAGER_KEY`: only local files are supported.
            random_seed: Seed of the permutation.

        Raises:
            ValueError: A day is not in `rows_per_day`, a file has another shape,
                `output_dir_full_set` is given, or the output folder is one of the inputs.
        """
        check_path_manager_key(path_manager_key)
        if output_dir_full_set is not None:
            raise ValueError(
                "output_dir_full_set must be None: floats cannot represent ids; received "
                f"{output_dir_full_set!r}. Read the shuffled files instead."
            )
        output = Path(output_dir_shuffled)
        if output.resolve() in {
            Path(folder).resolve() for folder in (input_dir_labels_and_dense, input_dir_sparse)
        }:
            raise ValueError(
                f"output_dir_shuffled must differ from the input folders; received {output}."
            )
        missing = sorted(set(range(days - 1)) - rows_per_day.keys())
        if missing:
            raise ValueError(
                f"rows_per_day must have all {days} days except the last; received "
                f"{dict(rows_per_day)}, without {missing}."
            )
        sizes = [rows_per_day[day] for day in range(days - 1)]
        order = np.random.default_rng(random_seed).permutation(sum(sizes))
        kinds = {
            "dense": (input_dir_labels_and_dense, int_columns),
            "sparse": (input_dir_sparse, sparse_columns),
            "labels": (input_dir_labels_and_dense, 1),
        }
        for kind, (folder, columns) in kinds.items():
            names = [f"day_{day}_{kind}.npy" for day in range(days)]
            read = [_with_columns(Path(folder) / name, columns) for name in names]
            rows_per_day_read = [len(array) for array in read[:-1]]
            if rows_per_day_read != sizes:
                raise ValueError(
                    f"The {kind} files in {folder} must have the rows of rows_per_day {sizes}; "
                    f"received {rows_per_day_read}."
                )
            start = 0
            for name, size in zip(names[:-1], sizes, strict=True):
                with _new_arrays((output / name, read[0].dtype, (size, columns))) as (written,):
                    for first in range(0, size, _ROWS):
                        here = slice(first, min(first + _ROWS, size))
                        rows = order[start + here.start : start + here.stop]
                        written[here] = gather_rows(read[:-1], rows)
                start += size
            last = read[-1]
            with _new_arrays((output / names[-1], last.dtype, last.shape)) as (written,):
                written[:] = last


def gather_rows(arrays: Sequence[NDArray[Any]], rows: NDArray[np.int64]) -> NDArray[Any]:
    """Read rows of several arrays, numbered over all arrays.

    Args:
        arrays: `[N, columns]` each.
        rows: Row numbers, in any order.

    Returns:
        `[len(rows), columns]`.

    Example:
        >>> gather_rows([np.array([[0], [1]]), np.array([[2], [3]])], np.array([3, 0])).tolist()
        [[3], [0]]
    """
    starts = np.cumsum([0, *(len(array) for array in arrays)])
    result = np.empty((len(rows), *arrays[0].shape[1:]), arrays[0].dtype)
    of_array = np.searchsorted(starts, rows, side="right") - 1
    for number in np.unique(of_array):
        chosen = of_array == number
        result[chosen] = arrays[number][rows[chosen] - starts[number]]
    return result


@contextlib.contextmanager
def _new_arrays(
    *arrays: tuple[str | Path, DTypeLike, tuple[int, ...]],
) -> Iterator[list[np.memmap[Any, Any]]]:
    """Create files of arrays. They have their names when all are complete.

    Args:
        arrays: Path, dtype and shape of each.
    """
    paths = [path for path, *_ in arrays]
    parts = [Path(f"{path}.part") for path in paths]
    try:
        written = [
            open_memmap(part, "w+", dtype, shape)
            for part, (_, dtype, shape) in zip(parts, arrays, strict=True)
        ]
        yield written
        for array, part, path in zip(written, parts, paths, strict=True):
            array.flush()
            os.replace(part, path)
    except BaseException:
        for part in parts:
            part.unlink(missing_ok=True)
        raise


def _with_columns(path: str | Path, columns: int) -> NDArray[Any]:
    array: NDArray[Any] = np.load(path, mmap_mode="r")
    if array.ndim != 2 or array.shape[1] != columns:
        raise ValueError(f"{path} must hold {columns} columns; received shape {list(array.shape)}.")
    return array
