import gzip

import pytest

from recsys.datasets.criteo import DEFAULT_COLUMN_NAMES
from recsys.datasets.rows import criteo_kaggle, criteo_terabyte, movielens_20m, movielens_25m

LINES = [
    ["1", *map(str, range(13)), *(f"{i:08x}" for i in range(26))],
    ["0", "-2", *[""] * 12, "ee6b2800", *[""] * 25],
]


def write(path, lines):
    text = "".join("\t".join(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def test_criteo_rows(tmp_path):
    path = write(tmp_path / "train.txt", LINES)
    data = criteo_kaggle(path)
    for _ in range(2):  # epochs
        first, second = data
        assert list(first) == DEFAULT_COLUMN_NAMES
        assert list(first.values()) == [1, *range(13), *LINES[0][14:]]
        assert list(second.values()) == [0, -2, *[0] * 12, "ee6b2800", *[""] * 25]
    days = [path, write(tmp_path / "day_1.gz", LINES[:1])]
    assert list(criteo_terabyte(iter(days))) == [first, second, first]
    assert list(criteo_kaggle(path, row_mapper=None)) == LINES
    assert list(criteo_kaggle(path, row_mapper=lambda f: f[1], encoding="ascii")) == ["0", "-2"]


def test_damaged_criteo_rows(tmp_path):
    path = write(tmp_path / "train.txt", [LINES[0], LINES[1][:7]])
    with pytest.raises(ValueError, match=r"train.txt, line 2: must be a whole line"):
        list(criteo_kaggle(path))
    path = write(tmp_path / "train.txt", [["x", *LINES[0][1:]]])
    with pytest.raises(ValueError, match="invalid literal"):
        list(criteo_kaggle(path))
    with pytest.raises(FileNotFoundError):
        list(criteo_kaggle(str(tmp_path / "nothing")))


@pytest.mark.parametrize("read", [movielens_20m, movielens_25m])
def test_movielens_rows(tmp_path, read):
    header = "userId,movieId,rating,timestamp\n"
    (tmp_path / "ratings.csv").write_text(header + "1,10,3.5,1112486027\n2,20,4.0,5\n")
    (tmp_path / "movies.csv").write_text(
        'movieId,title,genres\n10,"One, the film (1995)",X|Y\n20,Zoë,Z\n', encoding="utf-8"
    )
    rated = {"userId": 2, "movieId": 20, "rating": 4.0, "timestamp": 5}
    first, second = read(str(tmp_path))
    assert second == rated
    assert [type(value) for value in first.values()] == [int, int, float, int]
    first, second = read(str(tmp_path), include_movies_data=True)
    assert first["title"] == "One, the film (1995)"
    assert second == rated | {"title": "Zoë", "genres": "Z"}
    assert list(read(str(tmp_path), row_mapper=None))[1] == ["2", "20", "4.0", "5"]
    (tmp_path / "ratings.csv").write_text(header + "1,10,3.5,1112486027\n2,21,4.0,5\n")
    with pytest.raises(ValueError, match=r"line 3: must rate a film that is in movies\.csv"):
        list(read(str(tmp_path), include_movies_data=True))
    (tmp_path / "ratings.csv").write_text(header + "1,10,3.5\n")
    with pytest.raises(ValueError, match=r"line 2: must be a whole line .* received 3 fields"):
        list(read(str(tmp_path)))
