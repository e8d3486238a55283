"""Splits of the decoder, as the settings of other frameworks name them: a building stone of plans.

``tensor_parallel`` is Megatron's tensor parallelism: heads and MLP width are cut, whole heads and
whole columns. Whether tokens between blocks are whole on each rank or cut too (its sequence
parallelism) is said by the layout of ``text.tokens``: ``s@cp.zigzag@tp`` cuts them.

``expert_parallel`` deals whole experts to ranks. Over axes that cut ``text.tokens``, rows of tokens
travel to their experts; over others each rank computes its experts' part of the same tokens.
"""


def tensor_parallel(axes: str, *, kv: str | None = None, vision: bool = False) -> dict[str, str]:
    """Splits of attention and MLP over some axes.

    Args:
      axes: mesh axes, major to minor, such as ``tp``.
      kv: axes over which key heads are cut, where there are fewer than ranks: the first of
        ``axes``, such as ``tp.0`` (two key heads on ``Mesh(tp=(2, 2))``), or ``""`` for one key
        head, which every rank then computes. None cuts them as the query heads.
      vision: split the vision encoder's blocks too; its patches are then gathered where they are
        cut over ``axes``.
    Returns: what ``Plan(splits=)`` takes.
    """
    over = _cut(axes)
    splits = {
        "text.q": f"h{over} d",
        "text.k": f"kv{over if kv is None else _cut(kv)} d",
        "text.mlp": f"f{over}",
    }
    return splits | ({"vision.q": f"h{over} d", "vision.mlp": f"f{over}"} if vision else {})


def expert_parallel(axes: str, *, columns: str = "") -> dict[str, str]:
    """Splits of the experts over some axes; no axis is the experts' own.

    Args:
      axes: mesh axes over which experts are dealt, major to minor, such as ``cp tp``.
      columns: axes over which the width of each expert is cut.
    Returns: what ``Plan(splits=)`` takes.
    """
    return {"text.experts": f"e{_cut(axes)} f{_cut(columns)}"}


def _cut(axes: str) -> str:
    """Axes as a split writes them."""
    named = axes.split()
    return f"@({axes})" if len(named) > 1 else f"@{axes.strip()}" if named else ""
