"""Random plans on many ranks, for steps that are simulated."""

import numpy as np

from vlshard import Mesh, Plan, gather, hybrid, replicate, ring, ulysses

PATCHES = (
    ("(img@dp.home s) c", None),
    ("(img@dp.home@cp.balance s) c", None),
    ("(img@(dp cp).balance s) c", None),
    ("(img@dp.home@cp s) c", ulysses("cp")),
    ("(img@dp.home s)@cp c", "any"),
    ("(img@dp.home s@cp) c", "any"),
    ("(img@dp.home s@cp.zigzag) c", "any"),
    ("(img@(dp cp) s) c", None),
)
TOKENS = (
    ("b@dp.home s m", None),
    ("b@dp.home s@cp m", "any"),
    ("b@dp.home s@cp.zigzag m", "any"),
    ("(smp@dp.home s@cp.zigzag) m", "any"),
    ("(smp@dp.home s)@cp m", "any"),
    ("(smp@dp.home@cp.balance s) m", None),
)


def draw_plan(seed):
    """A random plan on 16 to 1,024 ranks."""
    draw = np.random.default_rng(seed)
    cp = [(2,), (4,), (8,), (2, 2), (2, 4)][draw.integers(5)]
    least = max(16 // int(np.prod(cp)), 1)
    dp = int(2 ** draw.integers(np.log2(least), 11 - np.log2(np.prod(cp))))
    modes = [gather("cp"), ulysses("cp"), ring("cp")]
    if len(cp) == 2:
        modes += [hybrid(ulysses="cp.1", ring="cp.0"), hybrid(ulysses="cp.1", gather="cp.0")]
    chosen = [kinds[draw.integers(len(kinds))] for kinds in (PATCHES, TOKENS)]
    attention = {}
    for site, (_, mode) in zip(("vision", "text"), chosen, strict=True):
        mode = modes[draw.integers(len(modes))] if mode == "any" else mode
        if mode is not None:
            attention[site] = mode
    mesh = Mesh(dp=dp, cp=cp if len(cp) > 1 else cp[0])
    layouts = {"vision.patches": chosen[0][0], "text.tokens": chosen[1][0]}
    return Plan(mesh, {"**": replicate()}, layouts, attention)


SPLIT_PATCHES = ("(img@dp.home s) c", "(img@dp.home s)@cp c", "(img@dp.home s@cp) c")
SPLIT_TOKENS = (
    "b@dp.home s m",
    "b@dp.home s@cp m",
    "b@dp.home s@cp.zigzag m",
    "(smp@dp.home s)@cp m",
    "(smp@dp.home s@cp.zigzag) m",
)
DEALT = ("(img@dp.home@cp@tp.balance s) c", "(img@(dp cp tp).balance s) c")


def draw_split_plan(seed):
    """A random plan with blocks split over 2 to 16 ranks, on 16 to 512 ranks."""
    draw = np.random.default_rng(seed)
    cp, tp = int(2 ** draw.integers(0, 3)), [(2,), (4,), (8,), (2, 2), (8, 2)][draw.integers(5)]
    inner = cp * int(np.prod(tp))
    dp = int(2 ** draw.integers(np.log2(max(16 // inner, 1)), 10 - np.log2(inner)))
    kv = "@tp.0" if tp == (8, 2) else "@tp"  # of 8 key heads
    splits = {"text.q": "h@tp d", "text.k": f"kv{kv} d", "text.mlp": "f@tp"}
    patches, tokens = (cuts[draw.integers(len(cuts))] for cuts in (SPLIT_PATCHES, SPLIT_TOKENS))
    if draw.integers(2) and tp != (8, 2):
        splits |= {"vision.q": "h@tp d", "vision.mlp": "f@tp"}
        patches = cut_over_tp(patches) if draw.integers(2) else patches
    elif draw.integers(2):
        patches = DEALT[draw.integers(len(DEALT))]
    tokens = cut_over_tp(tokens) if draw.integers(4) else tokens
    modes = [gather("cp"), ulysses("cp"), ring("cp")]
    cut = {"vision": "s)@cp" in patches or "s@cp" in patches, "text": "@cp" in tokens}
    attention = {site: modes[draw.integers(3)] for site in cut if cut[site]}
    mesh = Mesh(dp=dp, cp=cp, tp=tp if len(tp) > 1 else tp[0])
    layouts = {"vision.patches": patches, "text.tokens": tokens}
    return Plan(mesh, {"**": replicate()}, layouts, attention, splits=splits)


def cut_over_tp(text):
    """The rows of a layout, or its pack, cut over tp last."""
    rows, _, width = text.rpartition(" ")
    return f"{rows}@tp {width}"
