"""Remarks on axes of a mesh along which a plan has nothing to gain."""

from collections.abc import Iterator, Mapping

from vlshard.language import MeshShape, spec, spec_axes
from vlshard.storage import Storage


def unused_axes(
    layouts: Mapping[str, str],
    params: Mapping[str, Storage],
    mesh: MeshShape,
    splits: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Axes of more than one rank that cut nothing that is computed: all of them compute alike.

    Args:
      layouts: the plan's.
      params: the plan's.
      mesh: the plan's; all of them fit each other.
      splits: the plan's.
    Returns: one line for each of those axes, or parts of one, as the mesh writes them.
    """
    texts = (*layouts.values(), *(splits or {}).values())
    cutting = {part for text in texts for part in spec_axes(spec(text), mesh)}
    stored = {part for storage in params.values() for part in mesh.expand(storage.shard)}
    idle = [part for part, ranks in mesh.parts.items() if ranks > 1 and part not in cutting]
    for kind, parts in (
        ("only parameters are cut over it", [part for part in idle if part in stored]),
        ("nothing is cut over it", [part for part in idle if part not in stored]),
    ):
        for part in parts:
            ranks = mesh.parts[part]
            yield f"mesh axis {part}={ranks}: {kind}, so its {ranks} ranks compute the same"
