"""Which layout of the patches suits a list of images: predicted time of each, and why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vlshard.attention import Gather, Ring, Ulysses, gather, ring, seen_rows, ulysses
from vlshard.language import FloatArray, IntArray, Layout, MeshShape, Packing, PlanError, layout
from vlshard.plan.model_config import EncoderCosts

# A multiplication comes with an addition; the backward does twice the forward's work.
FLOPS_PER_MULTIPLICATION = 2 * 3
Whole = Gather | Ring | Ulysses | None


@dataclass(frozen=True)
class Advice:
    """A layout of the patches with the predicted time of one vision block, forward and backward.

    Attributes:
      patches: the spec for ``vision.patches``.
      mode: how attention is met, or None where every image is whole on a rank.
      compute: time of the rank that computes longest [s].
      communication: time of the rank that sends longest [s].
      seconds: compute and communication of the slowest rank, nothing overlapped [s].
      imbalance: largest work of a rank over the mean.
      sent: bytes that the busiest rank sends, forward and backward.
    """

    patches: str
    mode: Whole
    compute: float
    communication: float
    seconds: float
    imbalance: float
    sent: int

    @property
    def why(self) -> str:
        """What its time is made of."""
        work = f"compute {self.compute * 1e3:.3g} ms"
        work += f", the busiest rank {self.imbalance:.2f} times the mean"
        if not self.sent:
            return f"{work}; nothing is sent"
        return f"{work}; sending {self.sent:,} bytes takes {self.communication * 1e3:.3g} ms"

    def __str__(self) -> str:
        mode = "" if self.mode is None else f" {type(self.mode).__name__.lower()}"
        return f"{self.seconds * 1e3:10.3f} ms  {self.patches + mode:42} {self.why}"


def advise_patches(
    lengths: Sequence[int],
    mesh: MeshShape,
    config: EncoderCosts,
    bandwidth: float,
    flops: float,
    *,
    home: Sequence[int] | None = None,
    itemsize: int = 2,
) -> tuple[Advice, ...]:
    """Rank the layouts of patches for a list of images.

    The time is that of one vision block; the hand-off to the decoder, once a step, is left out.
    Ulysses is left out where the heads cannot be dealt.

    Args:
      lengths: patches of each frame.
      mesh: with axes ``dp`` (who reads which image) and ``cp`` (over which images may be cut).
      config: the model; its cost of a frame and its heads count.
      bandwidth: of a rank's link, each way [bytes/s].
      flops: of a rank [floating-point operations/s].
      home: data-parallel rank that reads each frame; None deals them out by count, in order.
      itemsize: bytes of an element that travels.
    Returns: one entry per layout and mode, the fastest first.
    Raises: PlanError if the mesh lacks an axis or a number is not positive; LayoutError if a frame
      has no whole number of merge units.
    """
    for name, value in (("bandwidth", bandwidth), ("flops", flops), ("itemsize", itemsize)):
        if not value > 0:
            raise PlanError(f"{name}={value} is not above 0")
    if missing := [axis for axis in ("dp", "cp") if axis not in mesh.sizes]:
        more = ", ".join(f"{axis}=1" for axis in missing)
        note = f"fix: an axis of size 1 serves: MeshShape({more}, ...)"
        raise PlanError(f"advice needs axes dp and cp; the mesh is {mesh}", notes=[note])
    ranks = mesh.sizes["dp"]
    homes = [i * ranks // len(lengths) for i in range(len(lengths))] if home is None else home
    packing = Packing(lengths, config.unit, homes, cost=config.patch_cost)
    found: list[Advice] = []
    for text, mode in _candidates(mesh, config):
        where = layout(f"{text} c", mesh, img=packing, c=1)
        rows = [where.indices(rank)[0] for rank in range(mesh.size)]
        work = _work(where, rows, mode, mesh) * FLOPS_PER_MULTIPLICATION / flops
        sent = _sent(where, rows, mode, mesh, config, itemsize)
        found.append(_advice(f"{text} c", mode, work, sent, bandwidth))
    return tuple(sorted(found, key=lambda advice: (advice.seconds, advice.sent, advice.patches)))


def _advice(text: str, mode: Whole, work: FloatArray, sent: IntArray, bandwidth: float) -> Advice:
    """The entry of a layout."""
    return Advice(
        patches=text,
        mode=mode,
        compute=float(work.max()),
        communication=float(sent.max() / bandwidth),
        seconds=float((work + sent / bandwidth).max()),
        imbalance=float(work.max() / work.mean()) if work.any() else 1.0,
        sent=int(sent.max()),
    )


def _candidates(mesh: MeshShape, config: EncoderCosts) -> Iterator[tuple[str, Whole]]:
    """Layouts of the patches, each with the modes that can meet it."""
    yield "(img@dp.home s)", None
    if mesh.sizes["cp"] > 1:
        yield "(img@dp.home@cp.balance s)", None
    yield "(img@(dp cp).balance s)", None
    if mesh.sizes["cp"] == 1:
        return
    for text in ("(img@dp.home s)@cp", "(img@dp.home s@cp)"):
        yield text, gather("cp")
        yield text, ring("cp")
        if config.heads["vision"].q % mesh.sizes["cp"] == 0:
            yield text, ulysses("cp")


def _work(where: Layout, rows: list[IntArray], mode: Whole, mesh: MeshShape) -> FloatArray:
    """Multiplications of each rank."""
    (packing,) = (size for size in where.sizes.values() if isinstance(size, Packing))
    a, b = packing.cost
    length = np.repeat(np.array(packing.lengths, np.float64), packing.lengths)
    own = np.array([length[held].sum() for held in rows])
    if isinstance(mode, Ulysses):
        peers = [list(mesh.peers(("cp",), rank)) for rank in range(mesh.size)]
        own = np.array([own[group].mean() for group in peers])
    return a * own + b * np.array([held.size for held in rows])


def _sent(
    where: Layout,
    rows: list[IntArray],
    mode: Whole,
    mesh: MeshShape,
    config: EncoderCosts,
    itemsize: int,
) -> IntArray:
    """Bytes that each rank sends, forward and backward."""
    heads, ranks = config.heads["vision"], mesh.sizes["cp"]
    own = np.array([held.size for held in rows])
    pair = 2 * heads.kv * heads.width * itemsize
    match mode:
        case None:
            return np.zeros_like(own)
        case Ulysses():
            # q, k, v and the result go, and so do their gradients.
            width = 2 * (heads.q + heads.kv) * heads.width * itemsize
            return own * width * (ranks - 1) // ranks * 2
        case Ring():
            # Blocks go round in both ways; the sums of their gradients are in fp32 at least.
            blocks, sums = _passed(where, rows, mesh)
            return pair * 2 * blocks + pair // itemsize * max(itemsize, 4) * sums
        case Gather():
            return pair * _fetched(where, rows, mesh)


def _fetched(where: Layout, rows: list[IntArray], mesh: MeshShape) -> IntArray:
    """Rows that each rank sends to whose queries see them, or whose gradients it sends home."""
    counts = np.zeros(mesh.size, np.int64)
    for rank, peer, common in _seen(where, rows, mesh):
        counts[[rank, peer]] += common
    return counts


def _passed(where: Layout, rows: list[IntArray], mesh: MeshShape) -> tuple[IntArray, IntArray]:
    """Rows of blocks that each rank of a ring passes on once round, and rows of gradient sums."""
    reach = np.zeros(mesh.size, np.int64)
    for rank, peer, common in _seen(where, rows, mesh):
        peers = mesh.peers(("cp",), rank)
        steps = (peers.index(peer) - peers.index(rank)) % len(peers)
        reach[rank] = max(reach[rank], steps if common else 0)
    blocks, sums = np.zeros(mesh.size, np.int64), np.zeros(mesh.size, np.int64)
    for rank in range(mesh.size):
        peers = mesh.peers(("cp",), rank)
        for step in range(reach[rank]):
            here = (peers.index(rank) + step) % len(peers)
            blocks[peers[here]] += rows[rank].size
            sums[peers[(here + 1) % len(peers)]] += rows[rank].size
    return blocks, sums


def _seen(where: Layout, rows: list[IntArray], mesh: MeshShape) -> Iterator[tuple[int, int, int]]:
    """Per rank and other rank of its group: how many of its rows the other's queries see."""
    (packing,) = (size for size in where.sizes.values() if isinstance(size, Packing))
    wanted = [seen_rows(held, packing.lengths, causal=False) for held in rows]
    for rank in range(mesh.size):
        for peer in mesh.peers(("cp",), rank):
            if peer != rank:
                common = np.intersect1d(rows[rank], wanted[peer], assume_unique=True)
                yield rank, peer, common.size
