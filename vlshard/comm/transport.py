"""The one place that hands activations to ``torch.distributed``.

Sizes are known on the host before anything is launched. On the CPU an all-to-all is made of
point-to-point messages with the receives posted first (a rank that starts late then does not
make the two directions of a link take turns), and messages of no elements are left out on both
sides. On a device it is one collective, which every rank of the group enters even if it has
nothing to send: an even gather ``all_gather_single``, an even sum in fp32
``reduce_scatter_single``, everything else ``all_to_all_single``. No device has run them yet.

Ranks may come to the same moves in different orders: in backward, where they waited in different
orders. So every move of a group has a *lane*, a number that is the same on all its ranks, and what
was sent on one lane is never received on another: on the CPU it is the tag of the messages, on a
device each part begins with it, and a part of another lane is an error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from vlshard.programs import Even

# Checks on the device, without waiting for it; torch has no public way.
_refuse_unless = cast("Callable[[Tensor, str], None]", torch.ops.aten._assert_async.msg)

ANOTHER_ORDER = "ranks came to their moves in different orders; wait in one order on all ranks"
NO_LANE = 0  # of messages that all ranks send in one order
MARKS = 251  # different marks of lanes on devices
LANES = 1 << 12  # used again after so many: on one lane messages arrive in the order of sending
SLICE = 1 << 17  # bytes; smaller slices of a tensor are sent together, as one copy
SLICES = 16  # at most so many travel on their own

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
      whole: the tensor that all parts are places in, or are summed in, or None.
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

        Returns: one tensor per member that sends something (of an all-reduce, the sum alone).
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
    """Where what comes from members of a group is put.

    Attributes:
      shapes: by member, the shape of what comes from it; only of those that send something.
      like: a tensor of the dtype and on the device of what comes.
      places: by member, tensors of these shapes to put it in, that are contiguous or come in
        slices; None makes new ones.
      lead: dims before the one that rows were taken along and are put along; 0 where these differ.
      lane: what tells this move from others that are under way.
      even: what the moves of all members make up together, if blocks of one size.
    """

    shapes: Mapping[int, tuple[int, ...]]
    like: Tensor
    places: Mapping[int, Tensor] | None = None
    lead: int = 0
    lane: int = NO_LANE
    even: Even | None = None


class Way(Enum):
    """How a move is carried out."""

    MESSAGES = "point-to-point messages"
    GATHER = "all_gather_single"
    SCATTER = "reduce_scatter_single"
    ALL_TO_ALL = "all_to_all_single"


def way_of(device: str, dtype: torch.dtype, even: Even | None) -> Way:
    """How a move is carried out; from what is the same on all ranks of its group.

    Sums of half precision travel in it and are added up in fp32, in group order, by who gets them.

    Args:
      device: kind of the device that the tensors are on.
      dtype: of what is moved.
      even: what the moves of all members make up together.
    """
    if device == "cpu":
        return Way.MESSAGES
    if even is Even.GATHER:
        return Way.GATHER
    if even is Even.SCATTER and dtype == torch.float32:
        return Way.SCATTER
    return Way.ALL_TO_ALL


def launch(outgoing: Mapping[int, Tensor], landing: Landing, group: ProcessGroup) -> Flight:
    """Send tensors to members of a group and receive what they send.

    Args:
      outgoing: by member, what it gets, if anything; this rank's own entry is handed through as it
        is, or copied into its place.
      landing: where what comes from each member is put; dtype and device are those of
        ``outgoing``. Places are for tensors on the CPU.
      group: the ranks that take part; all of them call this.
    Returns: the tensors in flight, one per member that sends something; where they are summed on
      the way, the sum as ``whole``.
    """
    match way_of(landing.like.device.type, landing.like.dtype, landing.even):
        case Way.MESSAGES:
            return launch_messages(outgoing, landing, group)
        case Way.GATHER:
            return launch_gather(outgoing, landing, group)
        case Way.SCATTER:
            return launch_scatter(outgoing, landing, group)
        case Way.ALL_TO_ALL:
            return launch_single(outgoing, landing, group)


def launch_gather(outgoing: Mapping[int, Tensor], landing: Landing, group: ProcessGroup) -> Flight:
    """An even gather as one collective, for devices; each block begins with its lane."""
    own, mark = outgoing[group.rank()], _mark(landing.like, landing.lane)
    width, sent = own.element_size(), torch.cat([mark, _bytes(own)])
    arrived = sent.new_empty(group.size() * sent.numel())
    work = cast("Work | None", dist.all_gather_single(arrived, sent, group=group, async_op=True))
    blocks = arrived.view(group.size(), -1)
    parts = [blocks[k, width:].view(own.dtype).view(shape) for k, shape in landing.shapes.items()]
    flight = Flight(parts, [] if work is None else [work], [sent])
    flight.marks = [(blocks[:, :width], mark)]
    return flight


def launch_scatter(outgoing: Mapping[int, Tensor], landing: Landing, group: ProcessGroup) -> Flight:
    """An even sum as one collective, for devices; lanes are summed along with the blocks."""
    mark = landing.like.new_full((1,), float(landing.lane % MARKS))
    sent = torch.cat([x for part in outgoing.values() for x in (mark, part.reshape(-1))])
    arrived = sent.new_empty(sent.numel() // group.size())
    work = cast(
        "Work | None", dist.reduce_scatter_single(arrived, sent, group=group, async_op=True)
    )
    flight = Flight([], [] if work is None else [work], [sent])
    flight.whole = arrived[1:].view(landing.shapes[group.rank()])
    flight.marks = [(arrived[:1], mark * group.size())]
    return flight


def launch_single(outgoing: Mapping[int, Tensor], landing: Landing, group: ProcessGroup) -> Flight:
    """The all-to-all as one collective, for devices; each part begins with its lane.

    Every rank of the group enters it, if need be with nothing to send.
    """
    me, mark, like = group.rank(), _mark(landing.like, landing.lane), landing.like
    width = like.element_size()
    leaving = {k: x for k, x in outgoing.items() if k != me and x.numel()}
    coming = {k: shape for k, shape in landing.shapes.items() if k != me and math.prod(shape)}
    flat = torch.cat([mark[:0], *(part for x in leaving.values() for part in (mark, _bytes(x)))])
    sent_sizes, sizes = [0] * group.size(), [0] * group.size()
    for k, x in leaving.items():
        sent_sizes[k] = (1 + x.numel()) * width
    for k, shape in coming.items():
        sizes[k] = (1 + math.prod(shape)) * width
    arrived = flat.new_empty(sum(sizes))
    work = cast(
        "Work | None",
        dist.all_to_all_single(arrived, flat, sizes, sent_sizes, group=group, async_op=True),
    )
    pieces = cast("tuple[Tensor, ...]", arrived.split([sizes[k] for k in coming]))
    found = dict(zip(coming, pieces, strict=True))
    found = {k: x[width:].view(like.dtype).view(coming[k]) for k, x in found.items()}
    if me in outgoing:
        found[me] = outgoing[me]
    parts = [
        found[k] if k in found else like.new_empty(shape) for k, shape in landing.shapes.items()
    ]
    flight = Flight(parts, [] if work is None else [work], [flat])
    flight.marks = [(piece[:width], mark) for piece in pieces]
    return flight


def _bytes(x: Tensor) -> Tensor:
    """The elements of a tensor, as bytes."""
    return x.contiguous().view(-1).view(torch.uint8)


def _mark(like: Tensor, lane: int) -> Tensor:
    """A lane as one element's bytes."""
    return torch.full((like.element_size(),), lane % MARKS, dtype=torch.uint8, device=like.device)


def launch_messages(
    outgoing: Mapping[int, Tensor], landing: Landing, group: ProcessGroup
) -> Flight:
    """The all-to-all as point-to-point messages, receives first."""
    me, places = group.rank(), landing.places or {}
    own, parts = outgoing.get(me), dict[int, Tensor]()
    for k, shape in landing.shapes.items():
        here = own if k == me else None
        parts[k] = places[k] if places else landing.like.new_empty(shape) if here is None else here
    lead = landing.lead
    sent = [(k, one) for k, x in outgoing.items() if k != me for one in slices_of(x, lead)]
    awaited = [(k, one) for k, x in parts.items() if k != me for one in slices_of(x, lead)]
    flight = post(sent, awaited, group, landing.lane)
    if me in places and own is not None:
        places[me].copy_(own)
    flight.parts = list(parts.values())
    return flight


def in_slices(shape: Sequence[int], lead: int, dtype: torch.dtype) -> bool:
    """Whether a tensor is sent slice by slice, each as it lies; the same for who gets it.

    Args:
      shape: of what is sent.
      lead: its first dims, of each index of which there is a slice.
      dtype: of its elements.
    """
    count = math.prod(shape[:lead])
    return 1 < count <= SLICES and math.prod(shape[lead:]) * dtype.itemsize >= SLICE


def slices_of(x: Tensor, lead: int) -> Sequence[Tensor]:
    """The contiguous tensors that a tensor is sent as, or received in."""
    if not in_slices(x.shape, lead, x.dtype):
        return (x.contiguous(),)
    slices = x.flatten(0, lead - 1).unbind()
    return [one.contiguous() for one in slices]


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
        ops = [dist.P2POp(op, x, group=group, group_peer=k) for op, side in sides for k, x in side]
        works += dist.batch_isend_irecv(ops) if ops else []
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
