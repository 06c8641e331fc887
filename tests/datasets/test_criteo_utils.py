import gzip
import math
from collections import Counter

import numpy as np
import pytest

from recsys.datasets import criteo_utils
from recsys.datasets.criteo import CriteoDataset
from recsys.datasets.criteo_utils import BinaryCriteoUtils, gather_rows

LINES = [
    "\t".join(["1", *map(str, range(13)), *(f"{i * 1000 + 5:08x}" for i in range(26))]),
    "\t".join(["0", "-2", *[""] * 12, "ee6b2800", *[""] * 25]),
    "\t".join(["1", *["7"] * 13, *["00000001"] * 26]),
]


def write_tsv(path):
    text = ("\n".join(LINES) + "\n").encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


@pytest.mark.parametrize("name", ["day_0", "day_0.gz"])
def test_text_to_arrays(tmp_path, name):
    paths = [str(tmp_path / f"{kind}.npy") for kind in ("dense", "sparse", "labels")]
    BinaryCriteoUtils.tsv_to_npys(write_tsv(tmp_path / name), *paths)
    dense, sparse, labels = (np.load(path) for path in paths)
    assert (dense.dtype, sparse.dtype, labels.dtype) == (np.float32, np.int64, np.int32)
    assert labels.tolist() == [[1], [0], [1]]
    for row, line in enumerate(LINES):
        fields = line.split("\t")
        expected = [math.log(1 + max(int(field or 0), 0)) for field in fields[1:14]]
        np.testing.assert_allclose(dense[row], expected, rtol=1e-6)
        assert sparse[row].tolist() == [int(field or "0", 16) for field in fields[14:]]


def test_arrays_have_the_numbers_of_the_text_whatever_else_is_in_the_file(tmp_path):
    (tmp_path / "whole").write_text("\r\n".join(LINES) + "\r\n")
    (tmp_path / "part").write_text(LINES[2] + "\n")  # whose smallest count is another
    dense = []
    for name in ("whole", "part"):
        paths = [str(tmp_path / f"{name}_{kind}.npy") for kind in ("dense", "sparse", "labels")]
        BinaryCriteoUtils.tsv_to_npys(str(tmp_path / name), *paths)
        dense.append(np.load(paths[0]))
    np.testing.assert_array_equal(dense[0][2], dense[1][0])
    (batch,) = CriteoDataset([tmp_path / "whole"], 3, 1000)
    np.testing.assert_array_equal(batch.dense_features.numpy(), dense[0])


def test_a_file_without_labels(tmp_path):
    paths = [str(tmp_path / f"{kind}.npy") for kind in ("dense", "sparse", "labels")]
    (tmp_path / "test.txt").write_text("\n".join(x.split("\t", 1)[1] for x in LINES) + "\n")
    BinaryCriteoUtils.tsv_to_npys(str(tmp_path / "test.txt"), *paths, dataset_name="criteo_kaggle")
    assert np.load(paths[2]).tolist() == [[-1]] * 3
    assert np.load(paths[1])[0, 25] == 25 * 1000 + 5


def test_bad_text(tmp_path):
    paths = [str(tmp_path / f"{kind}.npy") for kind in ("dense", "sparse", "labels")]
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="must hold samples; it is empty"):
        BinaryCriteoUtils.tsv_to_npys(str(tmp_path / "empty"), *paths)
    (tmp_path / "cut").write_text(LINES[0] + "\n" + LINES[1][:30] + "\n")
    with pytest.raises(ValueError, match="line 2: must have 40 fields"):
        BinaryCriteoUtils.tsv_to_npys(str(tmp_path / "cut"), *paths)
    with pytest.raises(ValueError, match="dataset_name must be 'criteo_1tb' or"):
        BinaryCriteoUtils.tsv_to_npys(write_tsv(tmp_path / "x"), *paths, dataset_name="avazu")
    with pytest.raises(ValueError, match="path_manager_key must be 'torchrec'"):
        BinaryCriteoUtils.get_shape_from_npy(paths[0], "cloud")


def test_rows_of_an_array(tmp_path):
    path = str(tmp_path / "a.npy")
    np.save(path, np.arange(12).reshape(6, 2))
    assert BinaryCriteoUtils.get_shape_from_npy(path) == (6, 2)
    for mmap_mode in (False, True):
        rows = BinaryCriteoUtils.load_npy_range(path, 2, 3, mmap_mode=mmap_mode)
        assert rows.tolist() == [[4, 5], [6, 7], [8, 9]]
        assert isinstance(rows, np.memmap) == mmap_mode
        with pytest.raises(ValueError, match="start_row 4 and num_rows 3 for"):
            BinaryCriteoUtils.load_npy_range(path, 4, 3, mmap_mode=mmap_mode)


@pytest.mark.parametrize("lengths", [[5, 8], [1, 1], [3, 0, 4], [10]])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("start", [0, 1])
def test_ranges_deal_all_rows(lengths, world_size, start):
    flat = [(number, row) for number, length in enumerate(lengths) for row in range(length)]
    for last in (None, len(flat) - 2):
        wanted = flat[start:] if last is None else flat[start : last + 1]
        found, sizes = [], []
        for rank in range(world_size):
            ranges, remainder = BinaryCriteoUtils.get_file_row_ranges_and_remainder(
                lengths, rank, world_size, start, last
            )
            mine = [(n, row) for n, (low, high) in ranges.items() for row in range(low, high + 1)]
            found += mine
            sizes.append(len(mine))
            assert remainder == len(wanted) % world_size
        assert found == wanted
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1
    with pytest.raises(ValueError, match="rank must be in"):
        BinaryCriteoUtils.get_file_row_ranges_and_remainder(lengths, world_size, world_size)


def test_contiguous_ids(tmp_path):
    generator = np.random.default_rng(0)
    days = [generator.integers(0, 6, (size, 3)) * 1000 for size in (9, 0, 8)]
    paths = [str(tmp_path / f"day_{day}_sparse.npy") for day in range(3)]
    for path, day in zip(paths, days, strict=True):
        np.save(path, day)
    BinaryCriteoUtils.sparse_to_contiguous(paths, str(tmp_path), frequency_threshold=3, columns=3)
    found = [np.load(tmp_path / f"day_{day}_sparse_contig_freq.npy") for day in range(3)]
    assert [part.dtype for part in found] == [np.int32] * 3
    for column in range(3):
        values = [int(value) for day in days for value in day[:, column]]
        counts = Counter(values)
        ids = {}
        for value in values:
            if counts[value] >= 3:
                ids.setdefault(value, len(ids) + 2)
        expected = [ids.get(value, 1) for value in values]
        assert [int(value) for part in found for value in part[:, column]] == expected
        assert 1 in expected
        assert 2 in expected
    with pytest.raises(ValueError, match="must hold 26 columns; received shape"):
        BinaryCriteoUtils.sparse_to_contiguous(paths, str(tmp_path))


def write_days(folder, sizes):
    start = 0
    for day, size in enumerate(sizes):
        rows = np.arange(start, start + size)[:, None]
        np.save(folder / f"day_{day}_dense.npy", np.repeat(rows, 2, 1).astype(np.float32))
        np.save(folder / f"day_{day}_sparse.npy", np.repeat(rows, 3, 1))
        np.save(folder / f"day_{day}_labels.npy", rows.astype(np.int32))
        start += size


def test_shuffle_keeps_every_row_once_and_together(tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    sizes = [40, 30, 5]
    write_days(source, sizes)
    settings = dict(days=3, int_columns=2, sparse_columns=3)
    arguments = (str(source), str(source), str(out), dict(enumerate(sizes)))
    BinaryCriteoUtils.shuffle(*arguments, **settings)
    kinds = [
        [np.load(out / f"day_{day}_{kind}.npy") for day in range(3)]
        for kind in ("dense", "sparse", "labels")
    ]
    assert [[len(day) for day in days] for days in kinds] == [sizes] * 3
    labels = np.concatenate(kinds[2])[:, 0]
    for days in kinds:
        assert (np.concatenate(days) == labels[:, None]).all()
    assert sorted(labels[:70]) == list(range(70))
    assert list(labels[:70]) != list(range(70))
    assert any(row >= 40 for row in labels[:40])  # across days
    assert labels[70:].tolist() == list(range(70, 75))
    first = np.load(out / "day_0_sparse.npy")
    BinaryCriteoUtils.shuffle(*arguments[:3], {0: 40, 1: 30}, **settings)
    assert (np.load(out / "day_0_sparse.npy") == first).all()
    with pytest.raises(ValueError, match=r"received .* without \[1\]"):
        BinaryCriteoUtils.shuffle(*arguments[:3], {0: 40, 2: 5}, **settings)
    BinaryCriteoUtils.shuffle(*arguments, **settings, random_seed=1)
    assert np.load(out / "day_0_labels.npy")[:, 0].tolist() != labels[:40].tolist()
    with pytest.raises(ValueError, match="output_dir_full_set must be None"):
        BinaryCriteoUtils.shuffle(*arguments, output_dir_full_set=str(out), **settings)
    with pytest.raises(ValueError, match=r"^output_dir_shuffled must"):
        BinaryCriteoUtils.shuffle(str(out), str(source), str(out), arguments[-1], **settings)
    with pytest.raises(ValueError, match=r"rows_per_day \[4, 30\]; received \[40, 30\]"):
        BinaryCriteoUtils.shuffle(*arguments[:3], {0: 4, 1: 30, 2: 5}, **settings)


@pytest.mark.parametrize("step", ["tsv_to_npys", "sparse_to_contiguous", "shuffle"])
def test_incomplete_files_do_not_have_their_names(tmp_path, monkeypatch, step):
    """A process that is killed leaves no file with rows of zeros."""
    out, seen = tmp_path / "out", []
    out.mkdir()
    write_days(tmp_path, [4, 3])
    sparse = [str(tmp_path / f"day_{day}_sparse.npy") for day in range(2)]
    outputs = [str(out / f"{kind}.npy") for kind in ("dense", "sparse", "labels")]
    run, owner, name = {
        "tsv_to_npys": (lambda text: (text, *outputs), criteo_utils, "log_counts"),
        "sparse_to_contiguous": (lambda _: (sparse, str(out), 3, 3), np, "unique"),
        "shuffle": (
            lambda _: (str(tmp_path), str(tmp_path), str(out), {0: 4}, None, 2, 2, 3),
            criteo_utils,
            "gather_rows",
        ),
    }[step]
    arguments = run(write_tsv(tmp_path / "day_0"))

    def look(*args, **kwargs):
        seen.append([path.name for path in out.iterdir() if path.suffix == ".npy"])
        raise OSError("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, look)
        with pytest.raises(OSError, match="stopped"):
            getattr(BinaryCriteoUtils, step)(*arguments)
    assert seen == [[]]
    assert not list(out.iterdir())
    getattr(BinaryCriteoUtils, step)(*arguments)
    assert {path.suffix for path in out.iterdir()} == {".npy"}


def test_gather_rows_of_several_arrays():
    arrays = [np.arange(6).reshape(3, 2), np.zeros((0, 2), int), np.arange(6, 10).reshape(2, 2)]
    rows = np.array([4, 0, 0, 3, 2])
    assert gather_rows(arrays, rows).tolist() == np.concatenate(arrays)[rows].tolist()
