"""Ring attention: queries stay, blocks of keys and values go round, partial results are merged.

Each rank of a ring holds one block. In step t a rank has the block of the member t places before
it, attends to those of its keys that its queries see, and passes it on; a block stops where nobody
further on needs it. In backward the blocks go round again, and with each travels the sum of its
gradients so far, which the last rank to add to it sends home. Sums are in fp32 (fp64 for fp64), and
no rank holds more than the block that it uses and the next.

Dims: n queries of this rank, h heads, kv key heads, d head width, k rows of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import einops
import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from vlshard.attention.blocks import Part, block_attention, block_gradients, merge
from vlshard.attention.runs import Windows
from vlshard.comm import HALVES, Flight, Index, refuse_second_derivative, transport

Block = Float[Tensor, "2 k kv d"]


@dataclass(frozen=True, eq=False)
class Pair:
    """Windows of queries and the windows of a block's keys that they see, attended as one batch.

    Attributes:
      q: the queries; each window once.
      k: the keys, as many windows.
      causal: query i sees the first ``i + 1`` keys of its window; otherwise it sees all.
    """

    q: Windows
    k: Windows
    causal: bool


@dataclass(frozen=True, eq=False)
class RingPlan:
    """What one member of a ring does; the members' plans fit together.

    Attributes:
      me: this rank's place in the ring.
      rows: rows of each member's block.
      reach: how many places each member's block travels.
      pairs: per step, what this rank's queries see of the block that it then has.
      group: the ring; may be None where no block travels.
      overlap: let the next block fly while one is attended to.
    """

    me: int
    rows: tuple[int, ...]
    reach: tuple[int, ...]
    pairs: tuple[tuple[Pair, ...], ...]
    group: ProcessGroup | None
    overlap: bool = False

    @property
    def size(self) -> int:
        """Members of the ring."""
        return len(self.rows)

    @property
    def indices(self) -> list[Index]:
        """What attention to the blocks, and its backward, index tensors by."""
        pairs = [pair for step in self.pairs for pair in step]
        return [window.as_index for pair in pairs for window in (pair.q, pair.k)]

    def owner(self, step: int) -> int:
        """Whose block this rank has in a step."""
        return (self.me - step) % self.size

    def arrives(self, step: int) -> bool:
        """Whether a block is here in a step."""
        return step <= self.reach[self.owner(step)]

    def pass_block(self, block: Block, step: int) -> Flight:
        """Send the block of a step on and receive that of the next, which is the only part."""
        going = step < self.reach[self.owner(step)]
        outgoing = [((self.me + 1) % self.size, block)] if going else []
        return self._post(outgoing, self._next(block, step))

    def pass_sums(self, sums: Block, step: int) -> "PassedSums":
        """Send the gradients of a step's block on, or home from the last rank that adds to them."""
        owner = self.owner(step)
        if step == 0:
            return PassedSums(Flight([], [], []), [], [])
        to = owner if step == self.reach[owner] else (self.me + 1) % self.size
        outgoing = [(to, sums)] if self.arrives(step) else []
        passed, home = self._next(sums, step), list[tuple[int, Tensor]]()
        if step == self.reach[self.me]:
            home = self._buffer((self.me + step) % self.size, self.me, sums)
        flight = self._post(outgoing, [*passed, *home])
        return PassedSums(flight, [x for _, x in passed], [x for _, x in home])

    def _next(self, like: Tensor, step: int) -> list[tuple[int, Tensor]]:
        """Room for what the rank behind sends for the next step, if it sends anything."""
        if step + 1 == self.size or not self.arrives(step + 1):
            return []
        return self._buffer((self.me - 1) % self.size, self.owner(step + 1), like)

    def _buffer(self, source: int, owner: int, like: Tensor) -> list[tuple[int, Tensor]]:
        """Room for a member's block, or its gradients, and who sends it."""
        return [(source, like.new_empty((2, self.rows[owner], *like.shape[2:])))]

    def _post(
        self, outgoing: list[tuple[int, Tensor]], incoming: list[tuple[int, Tensor]]
    ) -> Flight:
        """Exchange messages, receives and sends of all members at once, else they would block."""
        flight = transport.post(outgoing, incoming, self.group)
        if not self.overlap:
            flight.wait()
        return flight


class PassedSums(NamedTuple):
    """Gradients of blocks on their way.

    Attributes:
      flight: wait for it before reading the others.
      passed: what comes to be added to in the next step, at most one.
      home: gradients of this rank's own block from all others, in one step of the ring.
    """

    flight: Flight
    passed: list[Tensor]
    home: list[Tensor]


def ring_attention(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "k kv d"],
    v: Float[Tensor, "k kv d"],
    plan: RingPlan,
) -> Float[Tensor, "n h d"]:
    """Attention of this rank's queries to the keys of all ranks of a ring.

    Every rank calls this alike, also one that has no rows. Differentiable once.

    Args:
      q: queries of this rank.
      k: keys of this rank; query head i reads key head ``i * kv // h``.
      v: values of this rank.
      plan: who needs whose block, and which of its keys.
    Returns: one row per query, in q's dtype; 0 for a query that sees no key.
    Raises: ValueError if k does not have the rows that the ring was planned for.
    Source: Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers, 2023.
    """
    if k.shape[0] != plan.rows[plan.me]:
        raise ValueError(f"a ring planned for {plan.rows[plan.me]} rows of k got {k.shape[0]}")
    return _apply(_Ring, q, k, v, plan)


class _Ring(torch.autograd.Function):
    """Forward round and backward round; keeps this rank's own rows only."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan) -> Tensor:
        wide = torch.float32 if q.dtype in HALVES else q.dtype
        out = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)
        lse = out.new_full(q.shape[:2], -torch.inf)
        for step, block in rounds(torch.stack([k, v]), plan):
            for pair in plan.pairs[step]:
                _merge_pair(out, lse, q, block, pair)
        out = out.to(q.dtype)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("ring attention")
        q, k, v, out, lse = ctx.saved_tensors
        dq, own = _gradients(grad_outputs[0], q, torch.stack([k, v]), Part(out, lse), ctx.plan)
        dk, dv = own.to(k.dtype).unbind(0)
        return dq.to(q.dtype), dk, dv, None


def rounds(own: Block, plan: RingPlan) -> Iterator[tuple[int, Block]]:
    """The steps and the blocks that come by in them, this rank's own first; none has no rows."""
    block = own
    for step in range(plan.size):
        flight = plan.pass_block(block, step)
        yield step, block
        arrived = flight.wait()
        block = arrived[0] if arrived else own[:, :0]


def _merge_pair(out: Tensor, lse: Tensor, q: Tensor, block: Block, pair: Pair) -> None:
    """Attend to some keys of a block and merge the result into the rows of the queries."""
    part = block_attention(*_operands(q, block, pair), pair.causal)
    new = einops.rearrange(part.out, "b h l d -> (b l) h d").to(out.dtype)
    new_lse = einops.rearrange(part.lse, "b h l -> (b l) h")
    old, old_lse = (einops.rearrange(pair.q.take(x), "b l ... -> (b l) ...") for x in (out, lse))
    merged = merge(old, old_lse, new, new_lse)
    rows = pair.q.index(q.device)
    out.index_copy_(0, rows, merged.out)
    lse.index_copy_(0, rows, merged.lse)


def _gradients(
    grad: Tensor, q: Tensor, own: Block, whole: Part, plan: RingPlan
) -> tuple[Tensor, Block]:
    """Gradients of this rank's queries, and of its own keys and values from all ranks."""
    dq = whole.lse.new_zeros(q.shape)
    mine = dq.new_zeros(own.shape)
    sent, home = plan.pass_sums(mine, 0), list[Tensor]()
    for step, block in rounds(own, plan):
        sums = mine if step == 0 else dq.new_zeros(block.shape)
        for pair in plan.pairs[step]:
            _add_gradients((dq, sums), grad, q, block, whole, pair)
        sent.flight.wait()
        for part in sent.passed:
            sums += part
        sent = plan.pass_sums(sums, step)
        home += sent.home
    sent.flight.wait()
    for part in home:
        mine += part
    return dq, mine


def _add_gradients(
    into: tuple[Tensor, Block], grad: Tensor, q: Tensor, block: Block, whole: Part, pair: Pair
) -> None:
    """Add what some keys of a block contribute to the gradients of q and of the block."""
    queries, keys, values = _operands(q, block, pair)
    upper, out = (einops.rearrange(pair.q.take(x), "b l h d -> b h l d") for x in (grad, whole.out))
    lse = einops.rearrange(pair.q.take(whole.lse), "b l h -> b h l").contiguous()
    found = block_gradients(upper, queries, keys, values, Part(out, lse), pair.causal)
    dq, sums = into
    dq.index_add_(0, pair.q.index(q.device), _flat(found.q, dq.dtype, q.shape[1]))
    rows = pair.k.index(q.device)
    for i, term in enumerate((found.k, found.v)):
        sums[i].index_add_(0, rows, _flat(term, sums.dtype, block.shape[2]))


def _operands(q: Tensor, block: Block, pair: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a pair; key heads repeated for the query heads that read them."""
    groups = q.shape[1] // block.shape[2]
    keys, values = (
        einops.repeat(pair.k.take(x), "b k kv d -> b (kv g) k d", g=groups) for x in block
    )
    return einops.rearrange(pair.q.take(q), "b l h d -> b h l d"), keys, values


def _flat(x: Tensor, dtype: torch.dtype, heads: int) -> Tensor:
    """Rows of all windows one after another, summed over heads that read the same one."""
    return einops.reduce(x.to(dtype), "b (h g) l d -> (b l) h d", "sum", h=heads)


def _apply(function: Any, *arguments: Any) -> Tensor:
    """``function.apply`` with its type."""
    return function.apply(*arguments)
