import pytest
import torch.distributed as dist

from vlshard.comm.agreement import AgreedError, MAX_BYTES, agree, raise_together, together


def own_facts():
    rank = dist.get_rank()
    return agree({"rank": rank, "rows": list(range(rank * 100)), "text": "é" * rank})


def text_of_error(function, *args):
    try:
        function(*args)
    except AgreedError as error:
        return str(error)
    return None


def errors_of_some_ranks(errors):
    return text_of_error(raise_together, errors[dist.get_rank()])


def too_much_on_last_rank():
    last = dist.get_rank() == dist.get_world_size() - 1
    return text_of_error(agree, "x" * (MAX_BYTES if last else 1))


def mistake_on_last_rank(kind):
    try:
        with together(OSError):
            if dist.get_rank() == dist.get_world_size() - 1:
                raise kind("a mistake")
    except Exception as error:
        return type(error).__name__, str(error)


def on_own_group():
    group = dist.new_group(backend="gloo")
    return agree(dist.get_rank(), group)


def test_agree_gives_every_rank_all_payloads(ranks):
    expected = [
        {"rank": rank, "rows": list(range(rank * 100)), "text": "é" * rank} for rank in range(4)
    ]
    assert ranks(4).run(own_facts) == [expected] * 4


def test_agree_takes_a_group(ranks):
    assert ranks(2).run(on_own_group) == [[0, 1]] * 2


def test_agree_refuses_too_much_on_every_rank(ranks):
    (text,) = set(ranks(2).run(too_much_on_last_rank))
    assert text == f"rank 1 has {MAX_BYTES + 2} bytes to tell, more than {MAX_BYTES}"


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        ([None, None], None),
        ([None, "row 7 is empty"], "row 7 is empty"),
        (["row 2 is empty", "row 7 is empty"], "row 2 is empty\nrow 7 is empty"),
    ],
)
def test_raise_together_raises_one_text_everywhere(ranks, errors, text):
    assert ranks(2).run(errors_of_some_ranks, errors) == [text] * 2


def test_together_raises_an_expected_error_everywhere(ranks):
    outcomes = ranks(2).run(mistake_on_last_rank, OSError)
    assert outcomes == [("AgreedError", "a mistake")] * 2


def test_together_leaves_a_surprise_to_its_rank_and_names_it_elsewhere(ranks):
    told = ("AgreedError", "rank 1: KeyError: 'a mistake'")
    assert ranks(2).run(mistake_on_last_rank, KeyError) == [told, ("KeyError", "'a mistake'")]
