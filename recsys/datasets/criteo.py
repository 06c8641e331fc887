"""The Criteo click logs: one sample a line, 40 fields between tabs.

The fields are a label, 13 counts and 26 categories; counts and categories may be missing. The test
file of the Kaggle release has no labels, so 39 fields. Categories are 32-bit numbers in hex, hashed
into the rows of a table. Files, plain or gzipped, are streamed, and each batch is parsed with array
operations.

Shapes: `B` lines, `C` characters, `K` fields.
"""

import gzip
import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from recsys.base.checked import checked
from recsys.datasets.utils import Batch, check_rank, of_worker, rank_in_job, rank_slice
from recsys.sparse import KeyedJaggedTensor

INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DAYS = 24
"""Files of the terabyte release, `day_0` to `day_23`."""
TOTAL_TRAINING_SAMPLES = 4_195_197_692
"""Lines of the terabyte release's first 23 days; the last day is for validation and test."""

DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES: list[str] = [f"int_{k}" for k in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES: list[str] = [f"cat_{k}" for k in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES: list[str] = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]

NO_LABEL = -1
"""The label of lines without labels. Log losses raise an error for it."""

_NUM_FIELDS = len(DEFAULT_COLUMN_NAMES)
_TAB, _NEWLINE, _MINUS = 9, 10, 45
_NOT_A_DIGIT = 255
_DIGIT = np.full(256, _NOT_A_DIGIT, np.uint8)
_DIGIT[ord("0") : ord("9") + 1] = range(10)
_DIGIT[ord("a") : ord("f") + 1] = range(10, 16)
_DIGIT[ord("A") : ord("F") + 1] = range(10, 16)


@final
@dataclass(frozen=True, slots=True)
class CriteoRows:
    """Parsed lines.

    Args:
        label_B: 0 or 1; `NO_LABEL` in a file without labels.
        counts_BK: 13 counts; 0 where missing.
        categories_BK: 26 categories as 32-bit numbers; -1 where missing.
    """

    label_B: NDArray[np.int64]
    counts_BK: NDArray[np.int64]
    categories_BK: NDArray[np.int64]


def log_counts(counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """Convert counts to dense features: `log(1 + max(count, 0))`.

    Counts span six decades. Negative counts, from -1 to -3 in the published files, mean 0. All
    files share this function, so equal counts are equal features.

    Args:
        counts: Any shape.

    Returns:
        The same shape.

    Example:
        >>> log_counts(np.array([-2, 0, 1])).tolist()
        [0.0, 0.0, 0.6931471824645996]
    """
    logarithms: NDArray[np.float32] = np.log1p(np.maximum(counts, 0)).astype(np.float32)
    return logarithms


def parse_criteo(
    lines: Sequence[bytes], path: str, first_line: int = 1, *, labeled: bool = True
) -> CriteoRows:
    """Parse lines with array operations.

    Args:
        lines: Lines with their newlines, LF or CR LF.
        path: The file of the lines, for error messages.
        first_line: Number of the first line, for error messages.
        labeled: False for the test file of the Kaggle release, whose lines have no label.

    Returns:
        The fields.

    Raises:
        ValueError: A line is truncated, or a field is not a number.
    """
    text = b"".join(lines)
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n")
    text_C = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero((text_C == _TAB) | (text_C == _NEWLINE))
    names = DEFAULT_COLUMN_NAMES if labeled else DEFAULT_COLUMN_NAMES[1:]
    num_fields = len(names)
    if (
        len(ends) != len(lines) * num_fields
        or not (text_C[ends[num_fields - 1 :: num_fields]] == _NEWLINE).all()
    ):
        _blame_line(lines, path, first_line, num_fields)
    starts = np.concatenate([[0], ends + 1])[:-1]
    starts_BK = starts.reshape(len(lines), num_fields)
    ends_BK = ends.reshape(len(lines), num_fields)

    split = num_fields - CAT_FEATURE_COUNT
    negative_BK = text_C[starts_BK[:, :split]] == _MINUS
    decimal_BK, decimal_bad_BK = _numbers(
        text_C, starts_BK[:, :split] + negative_BK, ends_BK[:, :split], 10
    )
    # a minus sign needs digits
    decimal_bad_BK |= negative_BK & (starts_BK[:, :split] + 1 == ends_BK[:, :split])
    hex_BK, hex_bad_BK = _numbers(text_C, starts_BK[:, split:], ends_BK[:, split:], 16)
    bad_BK = np.concatenate([decimal_bad_BK, hex_bad_BK], axis=1)
    if labeled:
        is_empty_B = starts_BK[:, 0] == ends_BK[:, 0]
        bad_BK[:, 0] |= negative_BK[:, 0] | (decimal_BK[:, 0] > 1) | is_empty_B
    if bad_BK.any():
        row, column = np.argwhere(bad_BK)[0]
        field = text_C[starts_BK[row, column] : ends_BK[row, column]].tobytes()
        name = names[column]
        kind = "at most 8 hex digits" if column >= split else "decimal"
        raise ValueError(
            f"{path}, line {first_line + row}: field {name!r} must be "
            f"{'0 or 1' if name == DEFAULT_LABEL_NAME else kind}; received "
            f"{field.decode(errors='replace')!r}. The file is damaged."
        )
    counts_BK = np.where(negative_BK, -decimal_BK, decimal_BK)[:, -INT_FEATURE_COUNT:]
    missing_BK = starts_BK[:, split:] == ends_BK[:, split:]
    label_B = decimal_BK[:, 0] if labeled else np.full(len(lines), NO_LABEL)
    return CriteoRows(label_B, counts_BK, np.where(missing_BK, -1, hex_BK))


def _numbers(
    text_C: NDArray[np.uint8],
    starts_BK: NDArray[np.int64],
    ends_BK: NDArray[np.int64],
    base: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Parse the numbers between the positions; return them, and a mask of invalid ones."""
    longest = 8 if base == 16 else 18  # fits into 32 bits, and into 63
    lengths_BK = ends_BK - starts_BK
    value_BK = np.zeros(starts_BK.shape, np.int64)
    bad_BK = lengths_BK > longest
    for place in range(int(min(lengths_BK.max(initial=0), longest))):
        inside_BK = place < lengths_BK
        digit_BK = _DIGIT[text_C[np.minimum(starts_BK + place, len(text_C) - 1)]]
        bad_BK |= inside_BK & (digit_BK >= base)
        value_BK = np.where(inside_BK, value_BK * base + digit_BK, value_BK)
    return value_BK, bad_BK


def _blame_line(lines: Sequence[bytes], path: str, first_line: int, num_fields: int) -> NoReturn:
    if lines[0].startswith(b"\x1f\x8b"):
        raise ValueError(f"{path} is gzipped: its name must end in .gz. Rename it.")
    for number, line in enumerate(lines, first_line):
        num_found = line.count(b"\t") + 1
        if num_found != num_fields or not line.endswith(b"\n"):
            ended = "a newline at the end" if line.endswith(b"\n") else "no newline at the end"
            label = "a label" if num_fields == _NUM_FIELDS else "no label"
            raise ValueError(
                f"{path}, line {number}: must have {num_fields} fields between tabs ({label}, "
                f"{INT_FEATURE_COUNT} counts, {CAT_FEATURE_COUNT} categories) and a newline; "
                f"received {num_found} fields and {ended}. "
                "The file is truncated or damaged: download it again."
            )
    raise AssertionError("some line must have had a wrong number of fields")


class CriteoDataset(IterableDataset[Batch]):
    """Batches of Criteo click logs, streamed from their files.

    All ranks read all lines and parse their own. Ranks get consecutive samples of each step, and
    equal shares of the last, smaller step of a file: all ranks take the same number of steps.
    Workers of a DataLoader (`batch_size=None`) take the steps in turn, so batches and their order
    do not depend on `num_workers`.

    `log_counts` converts counts to dense features. Files without labels, such as the test file of
    the Kaggle release, yield the label `NO_LABEL`, -1.

    Args:
        paths: The files, plain or `.gz`.
        batch_size: Samples per rank and step.
        num_embeddings_per_feature: Rows of the 26 tables, each at least 2; or one number for all.
            A missing category is row 0, any other category `1 + category % (rows - 1)`.
        rank: Rank of this process; None: its rank in the process group, if there is one, else 0.
        world_size: Number of processes; None: as for `rank`, else 1.

    Raises:
        FileNotFoundError: A file is missing.
        TypeError: `paths` is a single path, or a number of rows is not an integer.
        ValueError: A number is out of its range; while iterating, a file is empty, or a line is
            damaged or truncated.

    Example:
        >>> CriteoDataset([], batch_size=2, num_embeddings_per_feature=1000).keys[:2]
        ['cat_0', 'cat_1']
    """

    @checked
    def __init__(
        self,
        paths: Sequence[str | Path],
        batch_size: int,
        num_embeddings_per_feature: int | Sequence[int],
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        rank, world_size = rank_in_job(rank, world_size)
        check_rank(rank, world_size, batch_size)
        rows = num_embeddings_per_feature
        rows = [int(rows)] * CAT_FEATURE_COUNT if isinstance(rows, int | np.integer) else list(rows)
        if len(rows) != CAT_FEATURE_COUNT or min(rows) < 2:
            raise ValueError(
                f"num_embeddings_per_feature must be {CAT_FEATURE_COUNT} numbers of at least 2; "
                f"received {rows}."
            )
        self.paths = [Path(path) for path in paths]
        for path in self.paths:
            if not path.is_file():
                what = "a folder" if path.is_dir() else "nothing"
                raise FileNotFoundError(
                    f"{path} must be a file of Criteo click logs; received {what}."
                )
        self.keys = DEFAULT_CAT_NAMES
        self._num_embeddings_K = np.array(rows)
        self._step_size = batch_size * world_size
        self._rank = rank
        self._world_size = world_size

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of all files once, in order."""
        steps = (step for path in self.paths for step in read_blocks(path, self._step_size))
        for step in of_worker(steps):
            mine = rank_slice(len(step.lines), self._rank, self._world_size)
            first_line = step.first_line + mine.start
            rank_step = step._replace(lines=step.lines[mine], first_line=first_line)
            yield self._to_batch(rank_step.parse())

    def _to_batch(self, rows: CriteoRows) -> Batch:
        present_BK = rows.categories_BK >= 0
        hashed_BK = 1 + rows.categories_BK % (self._num_embeddings_K - 1)
        ids_BK = np.where(present_BK, hashed_BK, 0)
        return criteo_batch(log_counts(rows.counts_BK), ids_BK, rows.label_B.astype(np.float32))


def criteo_batch(dense: NDArray[Any], ids: NDArray[Any], labels: NDArray[Any]) -> Batch:
    """Build a batch of arrays.

    Args:
        dense: `[B, 13]` floats.
        ids: `[B, 26]` signed integers.
        labels: `[B]` or `[B, 1]`.

    Returns:
        The batch, with the column names of Criteo.
    """
    features = KeyedJaggedTensor(
        keys=DEFAULT_CAT_NAMES,
        values=torch.from_numpy(np.ascontiguousarray(ids.T).reshape(-1)),
        lengths=torch.ones(ids.size, dtype=torch.int32),
        stride=len(ids),
    )
    return Batch(
        dense_features=torch.from_numpy(dense),
        sparse_features=features,
        labels=torch.from_numpy(labels.reshape(-1)),
        dense_names=DEFAULT_INT_NAMES,
        label_name=DEFAULT_LABEL_NAME,
    )


class Block(NamedTuple):
    """Consecutive lines of a file; arguments of `parse_criteo`."""

    lines: list[bytes]
    path: Path
    first_line: int
    labeled: bool

    def parse(self) -> CriteoRows:
        """Parse the lines."""
        return parse_criteo(self.lines, str(self.path), self.first_line, labeled=self.labeled)


def read_blocks(path: Path, num_lines: int) -> Iterator[Block]:
    """Read a file, plain or `.gz`, in blocks of lines.

    Args:
        path: The file.
        num_lines: Lines per block; the last block may have fewer.

    Raises:
        ValueError: The file is empty, or a gzip file is damaged.
    """
    first_line, labeled = 1, True
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        while True:
            try:
                lines = list(itertools.islice(file, num_lines))
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(
                    f"{path}, after line {first_line - 1}: must be a whole gzip file; received: "
                    f"{error}. The file is truncated or damaged: download it again."
                ) from error
            if not lines:
                if first_line == 1:
                    raise ValueError(f"{path} must hold samples; it is empty. Download it again.")
                return
            if first_line == 1:
                labeled = lines[0].count(b"\t") + 1 != _NUM_FIELDS - 1
            yield Block(lines, path, first_line, labeled)
            first_line += len(lines)
