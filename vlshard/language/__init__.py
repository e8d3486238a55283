"""Text to layout: what a spec says, and which rows of which dim each rank then holds.

`parser` reads text into the tree of `syntax`; `spec` is the door. `binding` meets a spec with a
`MeshShape` and sizes and makes the dims of `dims`, cut by the arithmetic of `pieces`; `layout`
hands them on as who holds which indices. `census` counts what all ranks hold at once, in closed
forms and by the runs of `tiling`. Everything is integers and frozen; no rank, and of torch only the
names of DTensor's placements (`placements`). Errors of all wings are rendered in `errors`.
"""

from vlshard.language.arrays import IntArray, ranges
from vlshard.language.axes import cutting_axes, home_axes, spec_axes, ulysses_specs, without_axes
from vlshard.language.binding import Binder, packing_of
from vlshard.language.census import Tiled, counts, grid, kept, tiled, tilings_kept
from vlshard.language.cut import Cut, Places
from vlshard.language.dims import BoundDim, FloatArray, Packed, Plain
from vlshard.language.errors import LayoutError, PlanError, ShardError, Span, SpecError, nearest
from vlshard.language.fused import Factor, Fused
from vlshard.language.layout import Layout, layout, refuse_shape
from vlshard.language.mesh_shape import AxisSize, MeshShape
from vlshard.language.packing import Packing, coefficients
from vlshard.language.pieces import Pieces
from vlshard.language.placements import (
    gradient_placements,
    parts_of,
    placed_text,
    placements,
    refuse,
    same_placements,
)
from vlshard.language.quotes import clipped, clipped_lines, clipped_path
from vlshard.language.spec import NO_NEW_SUM, arrow, spec, spec_within
from vlshard.language.syntax import (
    Axis,
    Dim,
    Dots,
    Group,
    Int,
    Name,
    Spec,
    Split,
    label,
    names_in,
    splits_in,
)

__all__ = [
    "NO_NEW_SUM",
    "Axis",
    "AxisSize",
    "Binder",
    "BoundDim",
    "Cut",
    "Dim",
    "Dots",
    "Factor",
    "FloatArray",
    "Fused",
    "Group",
    "Int",
    "IntArray",
    "Layout",
    "LayoutError",
    "MeshShape",
    "Name",
    "Packed",
    "Packing",
    "Pieces",
    "Places",
    "Plain",
    "PlanError",
    "ShardError",
    "Span",
    "Spec",
    "SpecError",
    "Split",
    "Tiled",
    "arrow",
    "clipped",
    "clipped_lines",
    "clipped_path",
    "coefficients",
    "counts",
    "cutting_axes",
    "gradient_placements",
    "grid",
    "home_axes",
    "kept",
    "label",
    "layout",
    "names_in",
    "nearest",
    "packing_of",
    "parts_of",
    "placed_text",
    "placements",
    "ranges",
    "refuse",
    "refuse_shape",
    "same_placements",
    "spec",
    "spec_axes",
    "spec_within",
    "splits_in",
    "tiled",
    "tilings_kept",
    "ulysses_specs",
    "without_axes",
]
