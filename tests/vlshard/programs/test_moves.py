import numpy as np
import pytest
import torch

from tests.dense_moves import dense_moves
from vlshard.comm.collectives import exchange_rows, move_rows
from vlshard.language.errors import LayoutError
from vlshard.programs.moves import Moves

HAVE = [np.arange(0, 5), np.arange(5, 5), np.arange(5, 7), np.arange(7, 12)]
WANT = [np.array([11, 3]), np.array([0, 11, 6]), np.arange(12), np.arange(0)]


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("rows", [[1, 2], [3, 0, 2], [2, 2, 0], []])
def test_local_exchange_takes_rows_and_sums_their_gradients(dim, rows):
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.manual_seed(0), requires_grad=True)
    moves = dense_moves([np.arange(4)], [np.array(rows, dtype=np.int64)], 0)
    y = exchange_rows(x, dim, moves, None)
    torch.testing.assert_close(
        y, x.index_select(dim, torch.tensor(rows, dtype=int)), rtol=0, atol=0
    )
    assert torch.autograd.gradcheck(lambda x: exchange_rows(x, dim, moves, None), x)
    assert torch.autograd.gradgradcheck(lambda x: exchange_rows(x, dim, moves, None), x)


def test_exchange_keeps_dtype_strides_and_grad_mode():
    moves = dense_moves([np.arange(4)], [np.array([3, 1])], 0)
    x = torch.arange(20, dtype=torch.bfloat16).reshape(5, 4).T
    assert exchange_rows(x, 0, moves, None).tolist() == [x[3].tolist(), x[1].tolist()]
    assert not exchange_rows(x, 0, moves, None).requires_grad
    with torch.no_grad():
        assert not exchange_rows(x.requires_grad_(), 0, moves, None).requires_grad
    assert exchange_rows(torch.arange(4), 0, moves, None).tolist() == [3, 1]


def test_exchange_hands_the_tensor_through_where_nothing_changes():
    x = torch.arange(4.0)
    assert exchange_rows(x, 0, dense_moves([np.arange(4)], [np.arange(4)], 0), None) is x


def test_exchange_gives_a_new_tensor_where_rows_are_cut_off():
    x = torch.arange(4.0)
    y = exchange_rows(x, 0, dense_moves([np.arange(4)], [np.arange(2)], 0), None)
    y += 1
    assert x.tolist() == [0, 1, 2, 3]


def test_gradients_of_halves_are_summed_in_fp32():
    moves = dense_moves([np.arange(1)], [np.zeros(257, dtype=np.int64)], 0)
    x = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    exchange_rows(x, 0, moves, None).backward(torch.ones(257, 2, dtype=torch.bfloat16))
    assert x.grad.tolist() == [[256.0, 256.0]]  # 257 to the nearest; sums in bf16 too stop at 256
    grads = torch.full((257, 2), 2**-8, dtype=torch.bfloat16)
    grads[0] = 1
    x.grad = None
    exchange_rows(x, 0, moves, None).backward(grads)
    assert x.grad.tolist() == [[2.0, 2.0]]  # 1 + 256/256; sums in bf16 would stay at 1


def test_exchange_refuses_other_rows_and_a_missing_group():
    moves = dense_moves(HAVE, WANT, 0)
    with pytest.raises(LayoutError, match="moves planned for 5 rows got 4 along dim 0"):
        exchange_rows(torch.zeros(4, 2), 0, moves, None)
    with pytest.raises(LayoutError, match="a process group is needed"):
        exchange_rows(torch.zeros(5, 2), 0, moves, None)


def test_move_rows_cuts_along_one_dim_and_puts_along_another():
    rows, columns = np.arange(2), np.arange(3)
    moves = Moves(0, {0: columns[::-1]}, {0: rows[::-1]}, rows=3, size=2, local=True)
    x = torch.arange(6.0).reshape(2, 3)
    assert move_rows(x, (1, 0), moves, None).tolist() == [[5, 4, 3], [2, 1, 0]]
