"""Attention inside segments, and the ways to bring keys to queries that live elsewhere.

`attend` is one call for any model. `modes` are the ways (Ulysses, gather, ring, hybrid), and
`check_mode` says what keeps one from fitting a layout; `schedule` plans one for a micro-batch:
what travels, and which runs of keys each query then sees (`segments`, `runs`). `kernels` attends
to runs on each kind of device, `ring_attention` (planned in `ring_plan`, merged in `blocks`) to
blocks that come one after another.
"""

from vlshard.attention.attend import attend
from vlshard.attention.check_mode import SiteWords, check_mode, check_rows
from vlshard.attention.kernels import Kernel, attend_runs, probe
from vlshard.attention.modes import (
    Gather,
    Heads,
    Hybrid,
    Mode,
    Ring,
    Ulysses,
    Ways,
    gather,
    hybrid,
    ring,
    ulysses,
)
from vlshard.attention.runs import Runs
from vlshard.attention.schedule import Schedule, Site, schedule
from vlshard.attention.segments import seen_rows

__all__ = [
    "Gather",
    "Heads",
    "Hybrid",
    "Kernel",
    "Mode",
    "Ring",
    "Runs",
    "Schedule",
    "Site",
    "SiteWords",
    "Ulysses",
    "Ways",
    "attend",
    "attend_runs",
    "check_mode",
    "check_rows",
    "gather",
    "hybrid",
    "probe",
    "ring",
    "schedule",
    "seen_rows",
    "ulysses",
]
