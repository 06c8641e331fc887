"""The Criteo click logs: one sample a line, 40 fields between tabs.

A label, 13 counts and 26 categories; a count or category may be missing. The categories are 32-bit
numbers in hex; a table has fewer rows, so they are hashed into it. Lines are parsed a batch at a
time with array operations, from plain or gzipped files, and no file is ever held whole.

Shapes: `B` lines, `C` characters, `K` fields.
"""

import gzip
import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from recsys.datasets.utils import Batch, check_rank, rank_slice
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
        label_B: 0 or 1.
        counts_BK: 13 counts; 0 where missing.
        categories_BK: 26 categories as 32-bit numbers; -1 where missing.
    """

    label_B: NDArray[np.int64]
    counts_BK: NDArray[np.int64]
    categories_BK: NDArray[np.int64]


def parse_criteo(lines: Sequence[bytes], path: str, first_line: int = 1) -> CriteoRows:
    """Parse lines, all at once.

    Args:
        lines: with their newlines.
        path: file they come from, for error messages.
        first_line: number of the first of them, for error messages.

    Returns:
        Their fields.

    Raises:
        ValueError: a line is truncated, or a field is not a number.
    """
    text_C = np.frombuffer(b"".join(lines), np.uint8)
    ends = np.flatnonzero((text_C == _TAB) | (text_C == _NEWLINE))
    if (
        len(ends) != len(lines) * _NUM_FIELDS
        or not (text_C[ends[_NUM_FIELDS - 1 :: _NUM_FIELDS]] == _NEWLINE).all()
    ):
        _blame_line(lines, path, first_line)
    starts = np.concatenate([[0], ends + 1])[:-1]
    starts_BK = starts.reshape(len(lines), _NUM_FIELDS)
    ends_BK = ends.reshape(len(lines), _NUM_FIELDS)

    split = 1 + INT_FEATURE_COUNT
    negative_BK = text_C[starts_BK[:, :split]] == _MINUS
    decimal_BK, decimal_bad_BK = _numbers(
        text_C, starts_BK[:, :split] + negative_BK, ends_BK[:, :split], 10
    )
    hex_BK, hex_bad_BK = _numbers(text_C, starts_BK[:, split:], ends_BK[:, split:], 16)
    bad_BK = np.concatenate([decimal_bad_BK, hex_bad_BK], axis=1)
    bad_BK[:, 0] |= negative_BK[:, 0] | (decimal_BK[:, 0] > 1) | (starts_BK[:, 0] == ends_BK[:, 0])
    if bad_BK.any():
        row, column = np.argwhere(bad_BK)[0]
        field = text_C[starts_BK[row, column] : ends_BK[row, column]].tobytes()
        kind = "0 or 1" if column == 0 else "decimal" if column < split else "at most 8 hex digits"
        raise ValueError(
            f"{path}, line {first_line + row}: field {DEFAULT_COLUMN_NAMES[column]!r} must be "
            f"{kind}; received {field.decode(errors='replace')!r}. The file is damaged."
        )
    counts_BK = np.where(negative_BK, -decimal_BK, decimal_BK)[:, 1:]
    missing_BK = starts_BK[:, split:] == ends_BK[:, split:]
    return CriteoRows(decimal_BK[:, 0], counts_BK, np.where(missing_BK, -1, hex_BK))


def _numbers(
    text_C: NDArray[np.uint8],
    starts_BK: NDArray[np.int64],
    ends_BK: NDArray[np.int64],
    base: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Read the numbers between the positions, digit by digit; also say which are none."""
    longest = 8 if base == 16 else 18  # What 32 bits, and 63, surely hold.
    lengths_BK = ends_BK - starts_BK
    value_BK = np.zeros(starts_BK.shape, np.int64)
    bad_BK = lengths_BK > longest
    for place in range(int(min(lengths_BK.max(initial=0), longest))):
        inside_BK = place < lengths_BK
        digit_BK = _DIGIT[text_C[np.minimum(starts_BK + place, len(text_C) - 1)]]
        bad_BK |= inside_BK & (digit_BK >= base)
        value_BK = np.where(inside_BK, value_BK * base + digit_BK, value_BK)
    return value_BK, bad_BK


def _blame_line(lines: Sequence[bytes], path: str, first_line: int) -> NoReturn:
    if lines[0].startswith(b"\x1f\x8b"):
        raise ValueError(f"{path} is gzipped: its name must end in .gz. Rename it.")
    for number, line in enumerate(lines, first_line):
        num_fields = line.count(b"\t") + 1
        if num_fields != _NUM_FIELDS or not line.endswith(b"\n"):
            ended = "a newline at the end" if line.endswith(b"\n") else "no newline at the end"
            raise ValueError(
                f"{path}, line {number}: must have {_NUM_FIELDS} fields between tabs (a label, "
                f"{INT_FEATURE_COUNT} counts, {CAT_FEATURE_COUNT} categories) and a newline; "
                f"received {num_fields} fields and {ended}. "
                "The file is truncated or damaged: download it again."
            )
    raise AssertionError("some line must have had a wrong number of fields")


class CriteoDataset(IterableDataset[Batch]):
    """Batches of Criteo click logs, streamed from their files.

    All ranks read all lines and parse their own. The samples of a step are dealt in order, those of
    a file's last, smaller step evenly: all ranks take the same number of steps.

    Args:
        paths: the files, plain or `.gz`.
        batch_size: samples per rank and step.
        num_embeddings_per_feature: rows of the 26 tables, each at least 2; or one number for all.
            Row 0 is for a missing category, the others by the category modulo the rows left.
        rank: this process.
        world_size: number of processes.

    Raises:
        FileNotFoundError: a file is missing.
        TypeError: the paths are one path, or the numbers of rows no whole ones.
        ValueError: a number is out of its range; while iterating, a file is empty, or a line is
            damaged or truncated.

    Example:
        >>> CriteoDataset([], batch_size=2, num_embeddings_per_feature=1000).keys[:2]
        ['cat_0', 'cat_1']
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        batch_size: int,
        num_embeddings_per_feature: int | Sequence[int],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        check_rank(rank, world_size, batch_size)
        rows = num_embeddings_per_feature
        if isinstance(rows, float) or isinstance(paths, str | Path):
            raise TypeError(
                "CriteoDataset needs a list of paths and whole numbers of rows; received paths "
                f"{paths!r} and num_embeddings_per_feature {rows!r}."
            )
        rows = [int(rows)] * CAT_FEATURE_COUNT if isinstance(rows, int | np.integer) else list(rows)
        if len(rows) != CAT_FEATURE_COUNT or min(rows) < 2:
            raise ValueError(
                f"num_embeddings_per_feature must be {CAT_FEATURE_COUNT} numbers of at least 2; "
                f"received {rows}."
            )
        self.paths = [Path(path) for path in paths]
        for path in self.paths:
            if not path.is_file():
                found = "a folder" if path.is_dir() else "nothing"
                raise FileNotFoundError(
                    f"{path} must be a file of Criteo click logs; received {found}."
                )
        self.keys = DEFAULT_CAT_NAMES
        self._num_embeddings_K = np.array(rows)
        self._step_size = batch_size * world_size
        self._rank = rank
        self._world_size = world_size

    def __iter__(self) -> Iterator[Batch]:
        """Give the batches of all files once, in order."""
        for path in self.paths:
            for first_line, lines in _read_steps(path, self._step_size):
                mine = rank_slice(len(lines), self._rank, self._world_size)
                rows = parse_criteo(lines[mine], str(path), first_line + mine.start)
                yield self._to_batch(rows)

    def _to_batch(self, rows: CriteoRows) -> Batch:
        present_BK = rows.categories_BK >= 0
        hashed_BK = 1 + rows.categories_BK % (self._num_embeddings_K - 1)
        ids_BK = np.where(present_BK, hashed_BK, 0)
        return Batch(
            # Counts span six decades; the few negative ones mean the same as none.
            dense_features=torch.from_numpy(
                np.log1p(np.maximum(rows.counts_BK, 0)).astype(np.float32)
            ),
            sparse_features=KeyedJaggedTensor(
                keys=self.keys,
                values=torch.from_numpy(ids_BK.T.reshape(-1)),
                lengths=torch.ones(ids_BK.size, dtype=torch.int32),
            ),
            labels=torch.from_numpy(rows.label_B.astype(np.float32)),
        )


def _read_steps(path: Path, num_lines: int) -> Iterator[tuple[int, list[bytes]]]:
    """Give a file's lines some at a time, with the number of the first."""
    first_line = 1
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
            yield first_line, lines
            first_line += len(lines)
