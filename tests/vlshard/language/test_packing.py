import numpy as np
import pytest

from vlshard.language.errors import LayoutError
from vlshard.language.packing import Packing


def test_packing_is_frozen_hashable_and_counts_rows():
    packing = Packing([8, 4, 12], unit=4, home=[0, 1, 0], cost=(1, 2))
    assert packing == Packing((8, 4, 12), 4, (0, 1, 0), (1.0, 2.0))
    assert hash(packing) == hash(Packing((8, 4, 12), 4, (0, 1, 0), (1.0, 2.0)))
    assert packing.rows == 24
    assert (packing.lengths, packing.home, packing.cost) == ((8, 4, 12), (0, 1, 0), (1.0, 2.0))
    with pytest.raises(AttributeError):
        packing.unit = 2


def test_packing_hands_out_the_same_arrays():
    pack = Packing([4, 0, 8], unit=2, home=[1, 0, 1])
    assert (pack.lengths_array.tolist(), pack.home_array.tolist()) == ([4, 0, 8], [1, 0, 1])
    assert pack.lengths_array is pack.lengths_array
    for array in (pack.lengths_array, pack.home_array, Packing([]).home_array):
        assert (array.dtype, array.flags.writeable) == (np.int64, False)


def test_packing_may_be_empty():
    assert Packing([], unit=4, home=[]).rows == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([4, -4], 4), "packing: lengths[1] is -4, less than 0"),
        (([4, True],), "packing: lengths[1] is True, not an integer"),
        (
            ([8, 6], 4),
            "packing: segment 1 has 6 rows, no multiple of unit 4\n"
            "  a unit is never cut: pad it to 8 rows",
        ),
        (([4], 0), "packing: unit is 0, less than 1"),
        (([4, 4], 4, [0]), "packing: 2 lengths, but home names 1 segments"),
        (([4, 4], 4, [0, -1]), "packing: home[1] is -1, less than 0"),
    ],
)
def test_packing_refuses_wrong_numbers(arguments, message):
    with pytest.raises(LayoutError) as error:
        Packing(*arguments)
    assert str(error.value) == message
