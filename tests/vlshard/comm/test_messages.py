"""What a person reads for each common way to get a layout wrong: whole messages."""

import pytest

from vlshard import LayoutError, MeshShape, Packing, SpecError, layout, spec, transition

MESH = MeshShape(dp=2, cp=4)
SPLIT = MeshShape(dp=2, cp={"ring": 2, "ulysses": 4})


def message(call):
    with pytest.raises((SpecError, LayoutError)) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}"


MESSAGES = {
    "unknown axis": (
        lambda: layout("b s@xp h d", MESH, where="plans/long.py:41 text.q", b=1, s=8, h=2, d=2),
        """\
LayoutError: unknown mesh axis 'xp'
  plans/long.py:41 text.q: b s@xp h d
                               ^^
  mesh: dp=2 cp=4; did you mean 'cp' or 'dp'?""",
    ),
    "unknown part of an axis": (
        lambda: layout("b s@cp.ulyses", SPLIT, b=1, s=8),
        """\
LayoutError: mesh axis 'cp' has no part 'ulyses'
  b s@cp.ulyses
      ^^^^^^^^^
  mesh: dp=2 cp=(ring=2, ulysses=4); did you mean 'cp.ulysses'?""",
    ),
    "unknown order": (
        lambda: layout("b s@cp.zigzga", MESH, b=1, s=8),
        """\
LayoutError: mesh axis 'cp' is not split, so it has no part 'zigzga'
  b s@cp.zigzga
      ^^^^^^^^^
  mesh: dp=2 cp=4
  '.zigzga' is no order; did you mean '.zigzag'?""",
    ),
    "unknown dim in an arrow": (
        lambda: transition("batch s@cp", "bacth s", MESH),
        """\
SpecError: the dims of both sides must be the same, in the same order
  batch s@cp -> bacth s
  ^^^^^         ^^^^^
  'bacth' is not on the left; did you mean 'batch'?""",
    ),
    "size of an unknown dim": (
        lambda: layout("batch s@cp", MESH, bacth=1, batch=1, s=8),
        """\
LayoutError: size bacth= is for no dim of the spec
  batch s@cp
  names: batch s; did you mean 'batch'?""",
    ),
    "axis twice": (
        lambda: spec("b@dp s@(dp cp) m"),
        """\
SpecError: mesh axis 'dp' occurs twice
  b@dp s@(dp cp) m
    ^^    ^^
  a spec uses an axis at most once""",
    ),
    "axis split and pending": (
        lambda: spec("b@dp s + dp"),
        """\
SpecError: mesh axis 'dp' occurs twice
  b@dp s + dp
    ^^     ^^
  a spec uses an axis at most once""",
    ),
    "axis whole and in parts": (
        lambda: spec("b@cp s@cp.ring"),
        """\
SpecError: mesh axis 'cp' occurs twice
  b@cp s@cp.ring
    ^^   ^^^^^^^
  a spec uses an axis at most once""",
    ),
    "split beyond the size": (
        lambda: layout("(h@cp d) m", MESH, h=2, d=16, m=64),
        """\
LayoutError: h=2 cannot be dealt whole to cp=4
  (h@cp d) m
   ^^^^
  fix: degrees 1, 2 work""",
    ),
    "indivisible heads": (
        lambda: layout("(3 h@cp d) m", MESH, h=6, d=16, m=64),
        """\
LayoutError: h=6 cannot be dealt whole to cp=4
  (3 h@cp d) m
     ^^^^
  fix: degrees 1, 2, 3, 6 work""",
    ),
    "unit cut": (
        lambda: Packing([8, 6], unit=4),
        """\
LayoutError: packing: segment 1 has 6 rows, no multiple of unit 4
  a unit is never cut: pad it to 8 rows""",
    ),
    "order where it cannot be": (
        lambda: spec("b h@cp.balance d"),
        """\
SpecError: '.balance' cannot stand on 'h'
  b h@cp.balance d
         ^^^^^^^
  it goes on the first name of a packed dim: '(img@cp.balance s)'""",
    ),
    "order of a fused dim": (
        lambda: layout("(h@cp.balance d) m", MESH, h=8, d=16, m=64),
        """\
LayoutError: '.balance' is for packed dims, and '(h d)' is fused
  (h@cp.balance d) m
        ^^^^^^^
  give h=Packing(lengths)""",
    ),
    "dims permuted": (
        lambda: transition("b s@cp h d", "b h@cp s d", MESH),
        """\
SpecError: the dims of both sides must be the same, in the same order
  b s@cp h d -> b h@cp s d
                  ^^^^ ^
  only the layout changes here; einops.rearrange(x, 'b s h d -> b h s d') does this, before or \
after""",
    ),
    "dims fused on the way": (
        lambda: transition("b s (h@cp d)", "b s h@cp d", MESH),
        """\
SpecError: the dims of both sides must be the same, in the same order
  b s (h@cp d) -> b s h@cp d
      ^^^^^^^^        ^^^^ ^
  only the layout changes here; einops.rearrange(x, 'b s (h d) -> b s h d') does this, before or \
after""",
    ),
    "sum begun on the way": (
        lambda: transition("b s", "b s + cp", MESH),
        """\
SpecError: a sum over cp is pending on the right but not on the left
  b s -> b s + cp
               ^^
  a sum can be carried out on the way, but not begun""",
    ),
    "sum inside a bracket": (
        lambda: spec("b (h + tp d)"),
        """\
SpecError: a sum is pending over the whole tensor: '+' comes behind all dims
  b (h + tp d)
       ^""",
    ),
    "sum over nothing": (
        lambda: spec("b s +"),
        """\
SpecError: '+' needs the axes over which a sum is pending
  b s +
      ^""",
    ),
}


@pytest.mark.parametrize("fault", MESSAGES)
def test_messages_say_what_where_and_what_to_do(fault):
    call, expected = MESSAGES[fault]
    assert message(call) == expected
