"""Rows that each member of a group is sent by an index that lives on the device.

``collectives.Swap`` moves rows that the host knows. Here the host knows only how many there are:
which ones is what a device has computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from vlshard.comm import transport
from vlshard.comm.collectives import Trip
from vlshard.comm.transport import Flight, Landing


@dataclass(frozen=True, eq=False)
class Parcels:
    """What a rank sends to the members of a group, and how much comes from each.

    Attributes:
      index: rows that leave, those for a member behind those for the one before; on the device.
      leave: how many each member is sent.
      arrive: how many each member sends.
      size: rows of which they are.
      group: the members.
      once: whether no row leaves twice.
    """

    index: Int[Tensor, " sent"]
    leave: Sequence[int]
    arrive: Sequence[int]
    size: int
    group: ProcessGroup
    once: bool = False

    @cached_property
    def bags(self) -> tuple[Int[Tensor, " sent"], Int[Tensor, " size"]]:
        """Places in ``index`` by row, and where those of each row begin; members stay in order."""
        rows, places = self.index.sort(stable=True)
        every = torch.arange(self.size, device=rows.device)
        return places, torch.searchsorted(rows, every)

    def away(self) -> "Away":
        """A trip to the members."""
        return Away(self, transport.new_lane(self.group))

    def home(self) -> "Home":
        """A trip back from them."""
        return Home(self, transport.new_lane(self.group))

    def send(self, x: Shaped[Tensor, "sent ..."]) -> Shaped[Tensor, "come ..."]:
        """Send rows that lie in the order in which they leave; for what has no gradient."""
        return self.land(self.launch(x, transport.new_lane(self.group)))

    def launch(self, x: Shaped[Tensor, "sent ..."], lane: int) -> Flight:
        """Send rows that lie in order on their way."""
        return _launch(x, self.leave, self.arrive, self.group, lane)

    @staticmethod
    def land(flight: Flight) -> Tensor:
        """Wait for what comes, one member's rows behind those of the one before."""
        parts = flight.wait()
        return torch.cat(parts) if flight.whole is None else flight.whole


@dataclass(frozen=True, eq=False)
class Away:
    """The trip of rows to the members that they are for."""

    parcels: Parcels
    lane: int

    @property
    def reverse(self) -> "Home":
        """The trip home."""
        return Home(self.parcels, transport.lane_back(self.lane))

    def launch(self, x: Shaped[Tensor, "size ..."]) -> Flight:
        """Send rows on their way."""
        return self.parcels.launch(x.index_select(0, self.parcels.index), self.lane)

    def land(self, flight: Flight) -> Shaped[Tensor, "come ..."]:
        """Wait for the rows that come."""
        return self.parcels.land(flight)


@dataclass(frozen=True, eq=False)
class Home:
    """The trip back to where rows are from; those of one row are summed, in group order.

    Half precision is summed in fp32, and rounded once. A row that went nowhere is zero.
    """

    parcels: Parcels
    lane: int

    @property
    def reverse(self) -> Away:
        """The trip to the members."""
        return Away(self.parcels, transport.lane_back(self.lane))

    def launch(self, x: Shaped[Tensor, "come ..."]) -> Flight:
        """Send rows home."""
        there = self.parcels
        return _launch(x, there.arrive, there.leave, there.group, self.lane)

    def land(self, flight: Flight) -> Shaped[Tensor, "size ..."]:
        """Wait for the rows that come home, and sum them."""
        there, rows = self.parcels, Parcels.land(flight)
        if there.once:
            return rows.new_zeros(there.size, *rows.shape[1:]).index_copy_(0, there.index, rows)
        places, begins = there.bags
        return F.embedding_bag(places, rows, begins, mode="sum")


def _launch(
    x: Tensor, leave: Sequence[int], arrive: Sequence[int], group: ProcessGroup, lane: int
) -> Flight:
    """Send runs of rows to the members in turn, and receive theirs as one tensor."""
    runs = cast("tuple[Tensor, ...]", x.split(list(leave)))
    rest = tuple(x.shape[1:])
    shapes = {member: (rows, *rest) for member, rows in enumerate(arrive)}
    landing, whole = Landing(shapes, x, lane=lane), None
    if x.device.type == "cpu":
        whole = x.new_empty((sum(arrive), *rest))
        places = dict(enumerate(cast("tuple[Tensor, ...]", whole.split(list(arrive)))))
        landing = Landing(shapes, x, places, lane)
    flight = transport.launch(dict(enumerate(runs)), landing, group)
    flight.whole = whole
    return flight


def travel_together(trips: Sequence[Trip], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Make several trips at once, each with a tensor; what comes of each, differentiably."""
    return cast("tuple[Tensor, ...]", _Together.apply(trips, *tensors))


class _Together(torch.autograd.Function):
    """Trips that are all launched before any lands, whose backward is the trips back."""

    @staticmethod
    def forward(ctx: Any, trips: Sequence[Trip], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = [trip.reverse for trip in trips]
        flights = [trip.launch(x) for trip, x in zip(trips, tensors, strict=True)]
        return tuple(trip.land(flight) for trip, flight in zip(trips, flights, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *travel_together(ctx.back, *grads)
