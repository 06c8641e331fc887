import pytest
import torch
from torch._dynamo.testing import CompileCounter

from recsys.sparse import JaggedTensor, KeyedJaggedTensor, is_debug, set_debug, validate

IDS = torch.arange(3)
ONE_EACH = torch.tensor([1, 2])


@pytest.fixture
def debug():
    set_debug(True)
    yield
    set_debug(False)


@pytest.mark.parametrize("build", [JaggedTensor, lambda *a, **k: KeyedJaggedTensor(["a"], *a, **k)])
class TestParts:
    def test_lengths_or_offsets(self, build):
        with pytest.raises(ValueError, match="needs lengths or offsets; received neither"):
            build(IDS)

    @pytest.mark.parametrize("part", ["lengths", "offsets"])
    def test_integers(self, build, part):
        with pytest.raises(TypeError, match=rf"{part} must be int32.*received torch\.float"):
            build(IDS, **{part: torch.tensor([0.0, 3.0])})

    @pytest.mark.parametrize("part", ["lengths", "offsets", "weights"])
    def test_devices(self, build, part):
        parts = {"lengths": ONE_EACH, part: torch.empty(3, dtype=torch.int64, device="meta")}
        with pytest.raises(ValueError, match=f"{part} must .*values' device; .*meta"):
            build(IDS, **parts)

    def test_weights(self, build):
        with pytest.raises(ValueError, match=r"per value; received .*shape \(2"):
            build(IDS, torch.ones(2), ONE_EACH)

    def test_scalar_values(self, build):
        with pytest.raises(ValueError, match=r"at least 1 dimension; .*scalar"):
            build(torch.tensor(1), lengths=ONE_EACH)
        with pytest.raises(TypeError, match=r"values must be a torch.Tensor.*list"):
            build([1], lengths=ONE_EACH)

    def test_offsets_shape(self, build):
        with pytest.raises(ValueError, match=r"must be 1-D .*\(0,\)"):
            build(IDS, offsets=IDS[:0])
        with pytest.raises(ValueError, match="received 2 offsets and 2 lengths"):
            build(IDS, lengths=ONE_EACH, offsets=torch.tensor([0, 3]))

    def test_offsets_span(self, build):
        with pytest.raises(ValueError, match=r"number of values, 3; .*to 4"):
            build(IDS, offsets=torch.tensor([0, 1, 4]))
        with pytest.raises(ValueError, match="received offsets from 1 to 3"):
            build(IDS, offsets=torch.tensor([1, 1, 3]))

    def test_length_sums_when_offsets_are_derived(self, build):
        with pytest.raises(ValueError, match="up to 4 for 3"):
            build(IDS, lengths=torch.tensor([2, 2])).offsets()

    def test_full_check_names_the_bag(self, build):
        with pytest.raises(ValueError, match=r"negative; received length -1 .*bag 1"):
            build(IDS, lengths=torch.tensor([4, -1])).validate()
        with pytest.raises(ValueError, match=r"decrease; received length -2 .*bag 1"):
            build(IDS, offsets=torch.tensor([0, 4, 2, 3])).validate()
        with pytest.raises(ValueError, match="up to 4 for 3"):
            build(IDS, lengths=torch.tensor([2, 2])).validate()
        with pytest.raises(ValueError, match=r"received length 1 .*2.*bag 0"):
            build(IDS, lengths=ONE_EACH, offsets=torch.tensor([0, 2, 3])).validate()

    def test_debug_checks_at_construction(self, build, debug):
        with pytest.raises(ValueError, match="up to 4 for 3"):
            build(IDS, lengths=torch.tensor([2, 2]))


def test_jagged_lengths_are_flat():
    with pytest.raises(ValueError, match=r"must be 1-D; .*\(1, 2\)"):
        JaggedTensor(IDS, lengths=ONE_EACH.view(1, 2))
    with pytest.raises(ValueError, match="up to 4 for 3"):
        JaggedTensor(IDS, lengths=torch.tensor([4])).to_dense()


def test_keys():
    with pytest.raises(ValueError, match=r"unique; .*more than once: \['a'\]"):
        KeyedJaggedTensor(["a", "b", "a"], IDS, lengths=torch.ones(3).long())


def test_keys_are_checked_again_when_they_change():
    keys, lengths = ["a", "b", "c"], torch.ones(3).long()
    kjt = KeyedJaggedTensor(keys, IDS, lengths=lengths)
    KeyedJaggedTensor(keys, IDS, lengths=lengths)
    keys[2] = "a"
    with pytest.raises(ValueError, match=r"received more than once: \['a'\]"):
        KeyedJaggedTensor(keys, IDS, lengths=lengths)
    assert kjt.keys() == ["a", "b", "c"]
    kjt.keys()[1] = "a"
    with pytest.raises(ValueError, match=r"received more than once: \['a'\]"):
        KeyedJaggedTensor(kjt.keys(), IDS, lengths=lengths)


def test_many_key_lists_take_bounded_memory():
    for i in range(200):
        validate.check_unique("Test", [f"{i}", "x"])
    assert len(validate._unique_lists) <= validate._MAX_UNIQUE_LISTS


def test_compiled_callers_do_not_depend_on_keys_seen_before():
    graphs = CompileCounter()

    @torch.compile(backend=graphs, fullgraph=True)
    def double(values, lengths):
        return KeyedJaggedTensor(["a", "b"], values, lengths=lengths).values() * 2

    for other in ("x", "y"):
        KeyedJaggedTensor(["a", other], IDS, lengths=ONE_EACH)
        assert double(IDS, ONE_EACH).tolist() == [0, 2, 4]
    assert graphs.frame_count == 1


def test_numbers_per_key():
    with pytest.raises(ValueError, match="3 lengths for 2 keys"):
        KeyedJaggedTensor(["a", "b"], IDS, lengths=torch.ones(3).long())
    with pytest.raises(ValueError, match=r"2 .*2 keys .*stride of 3"):
        KeyedJaggedTensor(["a", "b"], IDS, lengths=ONE_EACH, stride=3)
    with pytest.raises(ValueError, match=r"2 lengths for 0 keys"):
        KeyedJaggedTensor([], IDS, lengths=ONE_EACH)
    with pytest.raises(ValueError, match=r"stride_per_key must .*\[1, 2\].*2 keys.*2"):
        KeyedJaggedTensor(["a", "b"], IDS, lengths=ONE_EACH, stride_per_key=[1, 2])
    with pytest.raises(ValueError, match=r"\[keys \* samples\] .*samples\]; .*\(2, 1\)"):
        KeyedJaggedTensor(["a"], IDS, lengths=ONE_EACH.view(2, 1))
    with pytest.raises(ValueError, match=r"length_per_key must .*entry per key; .*1"):
        KeyedJaggedTensor(["a", "b"], IDS, lengths=ONE_EACH, length_per_key=[3])
    with pytest.raises(ValueError, match="length_per_key must agree with lengths"):
        KeyedJaggedTensor(["a", "b"], IDS, lengths=ONE_EACH, length_per_key=[1, 1])
    with pytest.raises(ValueError, match=r"index_per_key must .*'b': 1}; .*{'a': 0}"):
        KeyedJaggedTensor(["a", "b"], IDS, lengths=ONE_EACH, index_per_key={"a": 0})


def test_length_sums_when_features_are_told_apart():
    kjt = KeyedJaggedTensor(["a", "b"], IDS, lengths=torch.tensor([2, 2]))
    for read in (kjt.to_dict, kjt.length_per_key, kjt.sync, lambda: kjt["a"]):
        with pytest.raises(ValueError, match="up to 4 for 3"):
            read()


def test_negative_sums_of_a_feature():
    kjt = KeyedJaggedTensor(["a", "b"], IDS, lengths=torch.tensor([5, -2]))
    with pytest.raises(ValueError, match=r'lengths of feature "b".*to -2'):
        kjt.length_per_key()


def test_full_check_names_the_feature():
    kjt = KeyedJaggedTensor(["a", "b"], IDS, lengths=torch.tensor([1, 1, 3, -2]))
    with pytest.raises(ValueError, match=r'length -2 .*1 of feature "b"'):
        kjt.validate()
    with pytest.raises(ValueError, match=r"received \[2, 1\] for \[1, 2\]"):
        KeyedJaggedTensor(["a", "b"], IDS, lengths=ONE_EACH, length_per_key=[2, 1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ({"lengths": [2, -1, 2]}, "lengths must not .*negative.*-1.*bag 1"),
        ({"lengths": [4, -1, 0]}, "lengths must not .*negative.*-1.*bag 1"),
        (
            {"lengths": [2, 0, 2]},
            "lengths must .*4 for 3 values",
        ),
        ({"offsets": [0, 3, 1, 3]}, "offsets must not .*decrease.*-2.*bag 1"),
        ({"offsets": [0, 900_000, 2, 3]}, "offsets must not decrease; .*-899998.*1"),
        (
            {"lengths": [1, 1, 1], "offsets": [0, 2, 2, 3]},
            "lengths and offsets .*length 1.*2.*bag 0",
        ),
    ],
)
@pytest.mark.parametrize("look", ["offsets", "lengths", "check_bags", "to_padded_dense"])
def test_bags_that_do_not_fit_their_values(told, fault, dtype, look):
    told = {name: torch.tensor(numbers, dtype=dtype) for name, numbers in told.items()}
    if look == "to_padded_dense":

        def use():
            JaggedTensor(IDS, **told).to_padded_dense(3)
    else:

        def use():
            kjt = KeyedJaggedTensor(["a"], IDS, **told)
            getattr(kjt, look)()
            kjt.check_bags()

    with pytest.raises(ValueError, match=fault):
        use()


def test_lengths_that_wrap_around_int32():
    lengths = torch.full((3,), 2**31 - 1, dtype=torch.int32)
    lengths[2] = 5  # the running sum of int32 ends at 3
    with pytest.raises(ValueError, match="up to 4294967299 for 3"):
        KeyedJaggedTensor(["a"], IDS, lengths=lengths).offsets()


def test_sound_bags_pass():
    for told in (
        {"lengths": [1, 0, 2]},
        {"offsets": [0, 1, 1, 3]},
        {"lengths": [1, 0, 2], "offsets": [0, 1, 1, 3]},
    ):
        told = {name: torch.tensor(numbers) for name, numbers in told.items()}
        kjt = KeyedJaggedTensor(["a"], IDS, **told)
        kjt.check_bags()
        assert kjt.lengths().tolist() == [1, 0, 2]
        assert kjt.offsets().tolist() == [0, 1, 1, 3]
    KeyedJaggedTensor(["a"], IDS[:0], lengths=torch.zeros(0, dtype=torch.int64)).check_bags()


@pytest.mark.parametrize(("bag", "shown"), [(-1, "-1"), (2, "2")])
def test_inverse_indices_that_name_no_bag(bag, shown):
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        IDS,
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key=[2, 1],
        inverse_indices=(["b", "a"], torch.tensor([[0, 0], [1, bag]])),
    )
    with pytest.raises(ValueError, match=rf'feature "a" .*in 0\.\.1; received {shown}'):
        kjt.check_bags()


def test_inverse_indices():
    def build(keys, rows):
        return KeyedJaggedTensor(
            ["a", "b"],
            IDS,
            lengths=ONE_EACH,
            stride_per_key=[1, 1],
            inverse_indices=(keys, rows),
        )

    build(["b", "a"], torch.zeros(2, 3).long()).validate()
    assert build(["a"], torch.zeros(1, 3).long()).stride() == 3
    with pytest.raises(ValueError, match=r"2 keys .*int64.*shape \(1, 3\)"):
        build(["a", "b"], torch.zeros(1, 3).long())
    with pytest.raises(ValueError, match=r"2 keys and torch\.float32"):
        build(["a", "b"], torch.zeros(2, 3))
    with pytest.raises(ValueError, match="values' device; received inverse_indices on meta"):
        build(["a", "b"], torch.zeros(2, 3, device="meta").long())
    with pytest.raises(ValueError, match=r'feature "b" .*in 0\.\.0; received 1'):
        build(["a", "b"], torch.tensor([[0, 0], [0, 1]])).validate()


def test_meta_tensors_are_not_read():
    lengths = torch.empty(4, dtype=torch.int64, device="meta")
    kjt = KeyedJaggedTensor(["a", "b"], torch.empty(9, device="meta"), lengths=lengths)
    assert kjt.offsets().shape == (5,)
    assert repr(kjt) == "KeyedJaggedTensor(2 keys, stride 2, 9 values, float32, meta)"


def test_debug_is_off_at_first():
    assert not is_debug()  # and on with RECSYS_DEBUG=1: tests/test_lean_import.py


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int8])
def test_no_lengths_may_be_of_any_type(dtype: torch.dtype) -> None:
    none, ids = torch.empty(0, dtype=dtype), torch.empty(0, dtype=torch.int64)
    for made in (KeyedJaggedTensor(["a"], ids, lengths=none), JaggedTensor(ids, lengths=none)):
        assert made.lengths().dtype == torch.int64
        made.validate()
    with pytest.raises(TypeError, match="lengths must be int32 or int64"):
        KeyedJaggedTensor(["a"], ids, lengths=torch.zeros(1, dtype=dtype))
