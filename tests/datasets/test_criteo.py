import gzip
import math

import numpy as np
import pytest
import torch

from recsys.datasets.criteo import (
    CAT_FEATURE_COUNT,
    DEFAULT_INT_NAMES,
    NO_LABEL,
    CriteoDataset,
    log_counts,
    parse_criteo,
)
from recsys.modules.losses import mean_loss


def line(label=1, first_count="5", first_category="0000000a", num_categories=CAT_FEATURE_COUNT):
    counts = [first_count, "-2", ""] + ["7"] * 10
    categories = [first_category, ""] + ["ffffffff"] * (num_categories - 2)
    return "\t".join([str(label), *counts, *categories]) + "\n"


def test_fields_are_read():
    rows = parse_criteo([line().encode(), line(0, "1234567").encode()], "day_0")
    assert rows.label_B.tolist() == [1, 0]
    assert rows.counts_BK[:, :4].tolist() == [[5, -2, 0, 7], [1234567, -2, 0, 7]]
    assert rows.categories_BK[0, :3].tolist() == [10, -1, 0xFFFFFFFF]


def test_batch(tmp_path):
    path = tmp_path / "day_0"
    path.write_text(line() + line(0))
    (batch,) = CriteoDataset([path], batch_size=2, num_embeddings_per_feature=8)
    assert batch.labels.tolist() == [1.0, 0.0]
    assert batch.dense_features.shape == (2, 13)
    expected = torch.tensor([math.log(6), 0.0, 0.0])
    torch.testing.assert_close(batch.dense_features[0, :3], expected)
    ids = batch.sparse_features
    assert ids.stride() == 2
    assert ids["cat_0"].values().tolist() == [1 + 10 % 7] * 2
    assert ids["cat_1"].values().tolist() == [0, 0], "row 0 is for a missing category"
    assert ids["cat_2"].values().tolist() == [1 + 0xFFFFFFFF % 7] * 2


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_ranks_share_every_step_and_plain_equals_gzip(tmp_path, suffix):
    text = "".join(line(first_count=str(k)) for k in range(11))
    path = tmp_path / f"day_0{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix else text.encode())
    shares = [
        [batch.dense_features[:, 0] for batch in CriteoDataset([path], 2, 100, rank, 3)]
        for rank in range(3)
    ]
    assert [len(share) for share in shares] == [2, 2, 2], "all ranks take as many steps"
    assert [[len(step) for step in share] for share in shares] == [[2, 1], [2, 2], [2, 2]]
    in_order = torch.cat([share[step] for step in range(2) for share in shares])
    torch.testing.assert_close(in_order.expm1(), torch.arange(11.0))


def test_a_rank_without_lines_gets_an_empty_batch(tmp_path):
    path = tmp_path / "day_0"
    path.write_text(line())
    (batch,) = CriteoDataset([path], 2, 100, rank=0, world_size=2)
    assert batch.labels.shape == (0,)
    assert batch.dense_features.shape == (0, 13)
    assert batch.sparse_features.stride() == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(num_categories=25), "day_0, line .*received 39 fields"),
        (line()[:-1], "line 3: .*received 40 fields"),
        (line()[:30], r"line 3: must have 40 fields"),
        (line() + "\n", "line 4: .*received 1 fields"),
        (line(first_category="000000g"), "line 3: .*received '000000g"),
        (line(first_category="123456789"), "line 3: .*received '123456789'"),
        (line(first_count="5.5"), "line 3: .*received '5.5'"),
        (line(first_count="-"), "line 3: .*received '-'"),
        (line(first_count="5\r"), r"line 3: .*received '5\\r'"),
        (line().split("\t", 1)[1], "line 3: .*received 39 fields"),
        (line(label=2), "line 3: .*received '2'"),
        (line(label=""), "line 3: .*received ''"),
    ],
)  # fmt: skip
def test_damaged_line_is_named(tmp_path, bad, message):
    path = tmp_path / "day_0"
    path.write_text(line() + line() + bad)
    with pytest.raises(ValueError, match=message):
        list(CriteoDataset([path], batch_size=2, num_embeddings_per_feature=100))


def test_cut_off_gzip_is_named(tmp_path):
    path = tmp_path / "day_0.gz"
    path.write_bytes(gzip.compress(line().encode() * 100)[:-10])
    with pytest.raises(ValueError, match=r"day_0.gz, after line \d+.*whole gzip file"):
        list(CriteoDataset([path], batch_size=10, num_embeddings_per_feature=100))


def test_bad_arguments(tmp_path):
    with pytest.raises(FileNotFoundError, match="no_such_day must be a file"):
        CriteoDataset([tmp_path / "no_such_day"], 2, 100)
    with pytest.raises(FileNotFoundError, match="click logs; received a folder"):
        CriteoDataset([tmp_path], 2, 100)
    with pytest.raises(TypeError, match=r"paths must be a list.*'day_0'"):
        CriteoDataset("day_0", 2, 100)
    with pytest.raises(TypeError, match=r"feature must be a whole.* 100000\.0"):
        CriteoDataset([], 2, 1e5)
    with pytest.raises(ValueError, match="26 numbers of at least 2"):
        CriteoDataset([], 2, [100] * 25)
    with pytest.raises(ValueError, match="rank must be in"):
        CriteoDataset([], 2, 100, rank=2, world_size=2)


def test_empty_and_misnamed_files_are_refused(tmp_path):
    empty, misnamed = tmp_path / "day_0", tmp_path / "day_1"
    empty.touch()
    misnamed.write_bytes(gzip.compress(line().encode()))
    with pytest.raises(ValueError, match="day_0 must hold samples"):
        list(CriteoDataset([empty], 2, np.int64(100)))
    with pytest.raises(ValueError, match="day_1 is gzipped"):
        list(CriteoDataset([misnamed], 2, 100))


def test_the_same_count_is_the_same_number_in_every_file(tmp_path):
    for name, counts in (("a", ["-3", "0", "7"]), ("b", ["7", "-1", "1000000"])):
        (tmp_path / name).write_text("".join(line(first_count=count) for count in counts))
    first, second = CriteoDataset([tmp_path / "a", tmp_path / "b"], 3, 100)
    assert first.dense_features[2, 0] == second.dense_features[0, 0]
    numbers = [*first.dense_features[:, 0].tolist(), *second.dense_features[:, 0].tolist()]
    wanted = [0.0, 0.0, math.log(8), math.log(8), 0.0, math.log(1000001)]
    assert numbers == pytest.approx(wanted, rel=1e-6)
    assert log_counts(np.array([[-3], [7]])).tolist() == [[0.0], [pytest.approx(math.log(8))]]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("labeled", [True, False])
def test_files_without_labels_and_windows_line_ends(tmp_path, suffix, ending, labeled):
    lines = [line(label=k % 2, first_count=str(k)).rstrip("\n") for k in range(5)]
    if not labeled:
        lines = [text.split("\t", 1)[1] for text in lines]
    text = "".join(text + ending for text in lines).encode()
    path = tmp_path / f"test.txt{suffix}"
    path.write_bytes(gzip.compress(text) if suffix else text)
    batches = list(CriteoDataset([path], batch_size=2, num_embeddings_per_feature=8))
    labels = [label for batch in batches for label in batch.labels.tolist()]
    assert labels == ([0.0, 1.0, 0.0, 1.0, 0.0] if labeled else [NO_LABEL] * 5)
    counts = [count for batch in batches for count in batch.dense_features[:, 0].expm1().tolist()]
    assert counts == pytest.approx(range(5), abs=1e-5)
    ids = batches[0].sparse_features
    assert ids["cat_25"].values().tolist() == [1 + 0xFFFFFFFF % 7] * 2
    if not labeled:  # no loss is computed of labels that are not there
        with pytest.raises(ValueError, match=r"-1\.0 in row 0.*'label' \(2 such"):
            mean_loss(torch.zeros(2), batches[0].labels)


def test_a_file_is_with_labels_or_without(tmp_path):
    path = tmp_path / "test.txt"
    path.write_text(line().split("\t", 1)[1] * 2 + line())
    with pytest.raises(ValueError, match=r"line 3.* 39 fields.*no label.* 40"):
        list(CriteoDataset([path], batch_size=2, num_embeddings_per_feature=100))


def test_a_bad_number_is_named_by_its_column(tmp_path):
    (tmp_path / "day_0").write_text(line())
    (batch,) = CriteoDataset([tmp_path / "day_0"], 1, 100)
    assert batch.dense_names == tuple(DEFAULT_INT_NAMES)
    batch.labels[0] = math.nan
    with pytest.raises(ValueError, match=r"received nan in row 0.*'label'"):
        mean_loss(torch.zeros(1), batch.labels)
