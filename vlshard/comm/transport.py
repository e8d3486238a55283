"""The one place that hands activations to ``torch.distributed``.

Sizes are known on the host before anything is launched. On the CPU an all-to-all is made of
point-to-point messages with the receives posted first (a rank that starts late then does not
make the two directions of a link take turns), and messages of no elements are left out on both
sides. On a device it is one ``all_to_all_single``, which every rank of the group enters even if
it has nothing to send.

Ranks may come to the same moves in different orders: in backward, where they waited in different
orders. So every move of a group has a *lane*, a number that is the same on all its ranks, and what
was sent on one lane is never received on another: on the CPU it is the tag of the messages, on a
device each part begins with it, and a part of another lane is an error.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

# Checks on the device, without waiting for it; torch has no public way.
_refuse_unless = cast("Callable[[Tensor, str], None]", torch.ops.aten._assert_async.msg)

ANOTHER_ORDER = "ranks came to their moves in different orders; wait in one order on all ranks"
NO_LANE = 0  # of messages that all ranks send in one order
LANES = 1 << 12  # used again after so many: on one lane messages arrive in the order of sending

_moves_made: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


def new_lane(group: ProcessGroup) -> int:
    """The lane of a group's next move; all its ranks ask in the same order.

    Args:
      group: the ranks that move something.
    """
    made = _moves_made.get(group, 0)
    _moves_made[group] = made + 1
    return 2 + made * 2 % LANES


def lane_back(lane: int) -> int:
    """The lane of the way back of a move, and of the way there if this is the way back."""
    return lane ^ 1


class Flight:
    """Tensors on their way; what is sent stays alive until ``wait`` returns.

    A flight that is dropped before anybody waits for it lands all the same, when a later one does:
    otherwise the next messages from the same ranks would be taken for its own.

    Attributes:
      parts: what arrives; not filled before ``wait`` has returned.
      works: what is waited for.
      sent: what is on its way.
      whole: the tensor that all parts are places in, or None.
      marks: pairs of what came in front of a part and what has to be there.
    """

    def __init__(self, parts: Sequence[Tensor], works: Sequence[Work], sent: Sequence[Tensor]):
        self.parts = list(parts)
        self.works = list(works)
        self.sent = list(sent)
        self.whole: Tensor | None = None
        self.marks: list[tuple[Tensor, Tensor]] = []

    def wait(self) -> list[Tensor]:
        """Wait until everything has arrived.

        Returns: one tensor per member of the group (of an all-reduce, the sum alone).
        Raises: RuntimeError if a peer is gone, or sent what belongs to another move (on a device
          this is found when the device comes to it).
        """
        while self.works:
            self.works.pop(0).wait()
        self.sent.clear()
        for found, expected in self.marks:
            _refuse_unless((found == expected).all(), ANOTHER_ORDER)
        while _dropped:
            for work in _dropped.pop(0).works:
                work.wait()
        return self.parts

    def __del__(self) -> None:
        """Keep what is in the air, without waiting here: a failing rank must be free to exit."""
        if self.works:
            _dropped.append(Dropped(self.works, [*self.parts, *self.sent]))


class Dropped(NamedTuple):
    """What a flight that nobody has waited for still needs."""

    works: list[Work]
    tensors: list[Tensor]


_dropped: list[Dropped] = []


@dataclass(frozen=True, eq=False)
class Landing:
    """Where what comes from each member of a group is put.

    Attributes:
      shapes: shape of what comes from each member.
      places: contiguous tensors of these shapes to put it in; None makes new ones.
      lane: what tells this move from others that are under way.
    """

    shapes: Sequence[tuple[int, ...]]
    places: Sequence[Tensor] | None = None
    lane: int = NO_LANE


def launch(outgoing: Sequence[Tensor], landing: Landing, group: ProcessGroup) -> Flight:
    """Send one tensor to each member of a group and receive one from each.

    Args:
      outgoing: for each member of the group in order, what it gets; this rank's own entry is
        handed through as it is, or copied into its place.
      landing: where what comes from each member is put; dtype and device are those of
        ``outgoing``. Places are for tensors on the CPU.
      group: the ranks that take part; all of them call this.
    Returns: the tensors in flight, one per member.
    """
    if outgoing[group.rank()].device.type == "cpu":
        return launch_messages(outgoing, landing, group)
    return launch_single(outgoing, landing, group)


def launch_single(outgoing: Sequence[Tensor], landing: Landing, group: ProcessGroup) -> Flight:
    """The all-to-all as one collective, for devices; each part begins with its lane."""
    me, mark = group.rank(), _mark(outgoing[group.rank()], landing.lane)
    sent = [mark[:0] if k == me else torch.cat([mark, _bytes(x)]) for k, x in enumerate(outgoing)]
    own, width = outgoing[me], outgoing[me].element_size()
    sizes = [
        0 if k == me else (1 + math.prod(shape)) * width for k, shape in enumerate(landing.shapes)
    ]
    flat, sent_sizes = torch.cat(sent), [x.numel() for x in sent]
    arrived = flat.new_empty(sum(sizes))
    work = cast(
        "Work | None",
        dist.all_to_all_single(arrived, flat, sizes, sent_sizes, group=group, async_op=True),
    )
    pieces = cast("tuple[Tensor, ...]", arrived.split(sizes))
    others = [k for k in range(len(pieces)) if k != me]
    parts = [
        own if k == me else piece[width:].view(own.dtype).view(shape)
        for k, (piece, shape) in enumerate(zip(pieces, landing.shapes, strict=True))
    ]
    flight = Flight(parts, [] if work is None else [work], [flat])
    flight.marks = [(pieces[k][:width], mark) for k in others]
    return flight


def _bytes(x: Tensor) -> Tensor:
    """The elements of a tensor, as bytes."""
    return x.contiguous().view(-1).view(torch.uint8)


def _mark(like: Tensor, lane: int) -> Tensor:
    """A lane as one element's bytes."""
    return torch.full((like.element_size(),), lane % 251, dtype=torch.uint8, device=like.device)


def launch_messages(outgoing: Sequence[Tensor], landing: Landing, group: ProcessGroup) -> Flight:
    """The all-to-all as point-to-point messages, receives first."""
    me, members = group.rank(), range(len(outgoing))
    own, parts = outgoing[me], list(landing.places or ())
    if not parts:
        parts = [own if k == me else own.new_empty(landing.shapes[k]) for k in members]
    sent = [(k, outgoing[k].contiguous()) for k in members if k != me]
    flight = post(sent, [(k, parts[k]) for k in members if k != me], group, landing.lane)
    if landing.places is not None:
        parts[me].copy_(own)
    flight.parts = parts
    return flight


def post(
    outgoing: Sequence[tuple[int, Tensor]],
    incoming: Sequence[tuple[int, Tensor]],
    group: ProcessGroup | None,
    lane: int = NO_LANE,
) -> Flight:
    """Exchange messages with some members of a group; messages of no elements are left out.

    Between two ranks messages of one lane arrive in the order in which they were sent.

    Args:
      outgoing: members and what each is sent; contiguous.
      incoming: members and the tensor into which what each sends is put; contiguous.
      group: the group; may be None where there are no messages.
      lane: what tells these messages from others, on the CPU.
    Returns: the messages in flight; its parts are the tensors of ``incoming``.
    """
    waiting = [(k, x) for k, x in incoming if x.numel()]
    leaving = [(k, x) for k, x in outgoing if x.numel()]
    works: list[Work] = []
    if group is not None and all(x.device.type == "cpu" for _, x in (*waiting, *leaving)):
        works += [group.recv([x], k, lane) for k, x in waiting]
        works += [group.send([x], k, lane) for k, x in leaving]
    elif group is not None:  # devices need them as one call, else two ranks wait for each other
        sides = ((dist.irecv, waiting), (dist.isend, leaving))
        works += dist.batch_isend_irecv(
            [dist.P2POp(op, x, group=group, group_peer=k) for op, side in sides for k, x in side]
        )
    return Flight([x for _, x in incoming], works, [x for _, x in outgoing])


def launch_sum(x: Tensor, group: ProcessGroup) -> Flight:
    """All-reduce a tensor.

    Args:
      x: this rank's term, left as it is.
      group: the ranks that take part.
    Returns: the sum in flight, as the only part.
    """
    total = x.clone(memory_format=torch.contiguous_format)
    work = cast("Work | None", dist.all_reduce(total, group=group, async_op=True))
    return Flight([total], [] if work is None else [work], [])
