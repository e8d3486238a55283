"""Shapes with layouts in annotations: `Sharded[Tensor, "b s@cp m"]`, checked at run time.

`sharded` is the annotation, `mesh_in_use` the mesh that it is read against, `checks` what must
hold, `sizes` how global sizes follow from local ones within one call (`call_scope`).
"""

from vlshard.typed.mesh_in_use import use_mesh
from vlshard.typed.sharded import Sharded

__all__ = [
    "Sharded",
    "use_mesh",
]
