from examples import reshard_tour


def tour():
    """In a rank: the lines, and how far off a wrong program would be."""
    return reshard_tour.tour(), reshard_tour.visit(wrong_stop())


def wrong_stop():
    """An attention that forgets to trade heads back and forth: each rank sees its positions."""
    right = reshard_tour.STOPS[0]
    parts = {name: getattr(right, name) for name in ("axis", "inputs", "output", "sizes", "whole")}
    return reshard_tour.Stop("wrong", lambda _mesh, *qkv: reshard_tour.attention(*qkv), **parts)


def test_the_tour_equals_one_process(ranks):
    for lines, off in ranks(4).run(tour, timeout=60):
        assert lines == [
            "Ulysses attention: the value and 3 gradients equal those of one process",
            "Megatron MLP: the value and 3 gradients equal those of one process",
            "FSDP of a linear: the value and 2 gradients equal those of one process",
        ]
        assert off > 0.1
