"""How a plan says that parameters are stored: sharded over some mesh axes, copied over others."""

from dataclasses import dataclass

from vlshard.language import MeshShape


@dataclass(frozen=True)
class Storage:
    """Mesh axes over which a parameter is sharded, and those over which it is copied.

    Attributes:
      shard: axes that cut dim 0, major to minor; empty = a full copy on every rank.
      replicate: axes named as copies; axes named nowhere are copies too.
    """

    shard: tuple[str, ...]
    replicate: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.shard:
            return "replicate()"
        more = f", replicate={' '.join(self.replicate)!r}" if self.replicate else ""
        return f"fsdp({' '.join(self.shard)!r}{more})"

    def on(self, mesh: MeshShape) -> "Storage":
        """The same on a mesh, with every axis named, by its parts: those not named are copies."""
        shard, named = mesh.expand(self.shard), mesh.expand(self.replicate)
        rest = [part for part in mesh.parts if part not in (*shard, *named)]
        return Storage(shard, (*named, *rest))


def fsdp(shard: str, *, replicate: str = "") -> Storage:
    """Store parameters in shards; gather each unit just before it computes.

    Args:
      shard: mesh axes to shard over, for example ``"dp cp"``.
      replicate: mesh axes to copy over; axes not named are copies as well.
    """
    return Storage(tuple(shard.split()), tuple(replicate.split()))


def replicate() -> Storage:
    """Store a full copy on every rank; gradients are summed over all ranks."""
    return Storage(())
