"""The Criteo click logs: one sample a line, 40 fields between tabs.

A label, 13 counts and 26 categories; a count or category may be missing. The test file of the
Kaggle release has no labels: 39 fields. The categories are 32-bit numbers in hex; a table has fewer
rows, so they are hashed into it. Lines are parsed a batch at a time with array operations, from
plain or gzipped files, and no file is ever held whole.

Shapes: `B` lines, `C` characters, `K` fields.
"""

import gzip
import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from recsys.datasets.utils import Batch, check_rank, of_worker, rank_slice
from recsys.kernels.checked import checked
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
"""The label of a line without one. A log loss refuses it."""

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
    """Return the dense features that counts become: `log(1 + max(count, 0))`.

    Counts span six decades. The negative ones, from -1 to -3 in the published files, mean the same
    as none. The function is the same for all files, so that a count is the same number in each.

    Args:
        counts: any shape.

    Returns:
        The same shape.

    Example:
        >>> log_counts(np.array([-2, 0, 1])).tolist()
        [0.0, 0.0, 0.6931471824645996]
    """
    logarithms: NDArray[np.float32] = np.log1p(np.maximum(counts, 0)).astype(np.float32)
    return logarithms


def has_labels(line: bytes) -> bool:
    """Return whether a file has labels.

    Args:
        line: its first.

    Returns:
        False for the test file of the Kaggle release, whose lines have a field less.
    """
    return line.count(b"\t") + 1 != _NUM_FIELDS - 1


def parse_criteo(
    lines: Sequence[bytes], path: str, first_line: int = 1, *, labeled: bool = True
) -> CriteoRows:
    """Parse lines, all at once.

    Args:
        lines: with their newlines, LF or CR LF.
        path: file they come from, for error messages.
        first_line: number of the first of them, for error messages.
        labeled: whether they have a label; see `has_labels`.

    Returns:
        Their fields.

    Raises:
        ValueError: a line is truncated, or a field is not a number.
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
    # a minus alone is no number
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


def _blame_line(lines: Sequence[bytes], path: str, first_line: int, num_fields: int) -> NoReturn:
    if lines[0].startswith(b"\x1f\x8b"):
        raise ValueError(f"{path} is gzipped: its name must end in .gz. Rename it.")
    for number, line in enumerate(lines, first_line):
        found = line.count(b"\t") + 1
        if found != num_fields or not line.endswith(b"\n"):
            ended = "a newline at the end" if line.endswith(b"\n") else "no newline at the end"
            label = "a label" if num_fields == _NUM_FIELDS else "no label"
            raise ValueError(
                f"{path}, line {number}: must have {num_fields} fields between tabs ({label}, "
                f"{INT_FEATURE_COUNT} counts, {CAT_FEATURE_COUNT} categories) and a newline; "
                f"received {found} fields and {ended}. "
                "The file is truncated or damaged: download it again."
            )
    raise AssertionError("some line must have had a wrong number of fields")


class CriteoDataset(IterableDataset[Batch]):
    """Batches of Criteo click logs, streamed from their files.

    All ranks read all lines and parse their own. The samples of a step are dealt in order, those of
    a file's last, smaller step evenly: all ranks take the same number of steps. Under a DataLoader
    (`batch_size=None`), its workers take the steps in turn, so that it gives the same batches in
    the same order with any `num_workers`.

    Counts become dense features by `log_counts`. A file without labels, such as the test file of
    the Kaggle release, has the label `NO_LABEL`, -1, in every line.

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

    @checked
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
        steps = (step for path in self.paths for step in _read_steps(path, self._step_size))
        for step in of_worker(steps):
            mine = rank_slice(len(step.lines), self._rank, self._world_size)
            first_line = step.first_line + mine.start
            yield self._to_batch(
                parse_criteo(step.lines[mine], str(step.path), first_line, labeled=step.labeled)
            )

    def _to_batch(self, rows: CriteoRows) -> Batch:
        present_BK = rows.categories_BK >= 0
        hashed_BK = 1 + rows.categories_BK % (self._num_embeddings_K - 1)
        ids_BK = np.where(present_BK, hashed_BK, 0)
        return Batch(
            dense_features=torch.from_numpy(log_counts(rows.counts_BK)),
            sparse_features=KeyedJaggedTensor(
                keys=self.keys,
                values=torch.from_numpy(ids_BK.T.reshape(-1)),
                lengths=torch.ones(ids_BK.size, dtype=torch.int32),
            ),
            labels=torch.from_numpy(rows.label_B.astype(np.float32)),
            dense_names=DEFAULT_INT_NAMES,
            label_name=DEFAULT_LABEL_NAME,
        )


class _Step(NamedTuple):
    path: Path
    labeled: bool
    first_line: int
    lines: list[bytes]


def _read_steps(path: Path, num_lines: int) -> Iterator[_Step]:
    """Give a file's lines some at a time."""
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
                labeled = has_labels(lines[0])
            yield _Step(path, labeled, first_line, lines)
            first_line += len(lines)
