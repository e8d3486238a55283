"""Rows really move: ranks by axis, messages, and collectives with the right backward.

`mesh` is the ranks, `transport` the one file that hands activations to torch.distributed,
`collectives` the differentiable moves, `reshard` a whole program at once and `flight` one under
way (a `Pending`). `row_move` moves rows by index, `parcels` by an index that is on the device,
`dispatch` sends rows to the ranks that hold their experts, and home, and `blocks` brings blocks of
one shape to all ranks. `agreement` raises one error on all ranks, `fingerprints` compares what they
were given, `compare_calls` what they are about to do, `bridges` leads to DTensor and back.
`host_arrays` sends integers between hosts. `groups` makes torch's groups once for all meshes.
"""

from vlshard.comm.agreement import (
    AgreedError,
    Group,
    agree,
    exchange_bytes,
    on_rank,
    raise_any,
    together,
)
from vlshard.comm.ahead import Index, send_ahead
from vlshard.comm.blocks import gather_blocks
from vlshard.comm.bridges import from_dtensor, mesh_of, to_dtensor
from vlshard.comm.collectives import HALVES, all_reduce
from vlshard.comm.compare_calls import compare_calls
from vlshard.comm.dispatch import Hosts, Visits
from vlshard.comm.fingerprints import fingerprint, refuse_differences
from vlshard.comm.flight import refuse_second_derivative, start
from vlshard.comm.graph_break import untraced
from vlshard.comm.host_arrays import exchange_arrays
from vlshard.comm.mesh import Mesh, any_world
from vlshard.comm.pending import Pending
from vlshard.comm.reshard import (
    Lowered,
    SameMesh,
    even_sizes,
    lower,
    reshard,
    running_mesh,
)
from vlshard.comm.row_move import RowMove, row_move
from vlshard.comm.transport import Flight

__all__ = [
    "HALVES",
    "AgreedError",
    "Flight",
    "Group",
    "Hosts",
    "Index",
    "Lowered",
    "Mesh",
    "Pending",
    "RowMove",
    "SameMesh",
    "Visits",
    "agree",
    "all_reduce",
    "any_world",
    "compare_calls",
    "even_sizes",
    "exchange_arrays",
    "exchange_bytes",
    "fingerprint",
    "from_dtensor",
    "gather_blocks",
    "lower",
    "mesh_of",
    "on_rank",
    "raise_any",
    "refuse_differences",
    "refuse_second_derivative",
    "reshard",
    "row_move",
    "running_mesh",
    "send_ahead",
    "start",
    "to_dtensor",
    "together",
    "untraced",
]
