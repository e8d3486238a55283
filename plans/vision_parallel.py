"""The vision half of a plan from four settings: storage, context parallelism, mode, overlap."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from vlshard import Mesh, Mode, PlanError, Storage, fsdp, gather, hybrid, replicate, ulysses


@dataclass(frozen=True)
class VisionParallel:
    """The vision encoder's parallelism; ``vision_parallel`` makes it and checks it.

    Attributes:
      dp_shard: ranks over which each vision parameter is sharded; 1 copies it to every rank, None
        stores it as the plan stores everything else.
      cp: ranks that share the patches of an image; the decoder cuts its tokens over the same.
      ulysses_degree: how many of them trade tokens for heads: 1 fetches keys and values alone,
        ``cp`` is all-to-all alone, what is between does both.
      async_cp: let what attention needs travel while the next of k, v and q is projected.
    """

    dp_shard: int | None
    cp: int
    ulysses_degree: int
    async_cp: bool

    def mesh(self, world: int) -> Mesh:
        """Data-parallel ranks outside, context-parallel ones inside, cut where a setting needs it.

        Args:
          world: number of ranks.
        Raises: PlanError if the settings do not fit that many.
        """
        shard, inner = self.dp_shard or 1, self.ulysses_degree
        fitting = _divisors(world)
        if world % self.cp:
            works = [n for n in fitting if n % inner == 0 and _nest(shard, n, inner)]
            works = [n for n in works if n > 1 or not self.async_cp]
            raise _refused("cp", self.cp, f"divides {world} ranks", works)
        if world % shard:
            works = [n for n in fitting if _nest(n, self.cp, inner)]
            raise _refused("dp_shard", shard, f"divides {world} ranks", works)
        dp = _split(world // self.cp, [shard // self.cp])
        return Mesh(dp=dp, cp=_split(self.cp, [self.ulysses_degree, shard]))

    def params(self, world: int) -> Mapping[str, Storage]:
        """Storage of the vision parameters; nothing where the plan's own is to hold.

        Args:
          world: number of ranks.
        """
        if self.dp_shard is None:
            return {}
        if self.dp_shard == 1:
            return {"model.visual.**": replicate()}
        return {"model.visual.**": fsdp(_inner(self.mesh(world), self.dp_shard))}

    @property
    def layouts(self) -> Mapping[str, str]:
        """Layout of the patches: at home with who reads them, their pack cut over ``cp``."""
        cut = "@cp" if self.cp > 1 else ""
        return {"vision.patches": f"(img@dp.home s){cut} c"}

    @property
    def attention(self) -> Mapping[str, Mode]:
        """How vision attention is met; nothing where no image is cut."""
        if self.cp == 1:
            return {}
        if self.ulysses_degree == 1:
            return {"vision": gather("cp", overlap=self.async_cp)}
        if self.ulysses_degree == self.cp:
            return {"vision": ulysses("cp", overlap=self.async_cp)}
        mesh = self.mesh(self.cp * max((self.dp_shard or 1) // self.cp, 1))
        inner = _inner(mesh, self.ulysses_degree)
        outer = " ".join(part for part in mesh.expand(("cp",)) if part not in inner.split())
        return {"vision": hybrid(ulysses=inner, gather=outer, overlap=self.async_cp)}


def vision_parallel(
    *,
    dp_shard: int | None = None,
    cp: int = 1,
    ulysses_degree: int = 1,
    async_cp: bool = False,
) -> VisionParallel:
    """Choose the vision encoder's parallelism by four settings.

    Args:
      dp_shard: ranks over which each vision parameter is sharded: 1 copies it to every rank, None
        stores it as the plan stores everything else.
      cp: ranks that share the patches of an image.
      ulysses_degree: 1 fetches keys and values, ``cp`` trades tokens for heads by all-to-all,
        between the two is all-to-all inside and fetching outside.
      async_cp: overlap collectives with the projections.
    Returns: what a plan takes: ``mesh(world)``, ``params(world)``, ``layouts``, ``attention``.
    Raises: PlanError that names the setting, its value and what would work.
    """
    for name, value in (("dp_shard", dp_shard), ("cp", cp), ("ulysses_degree", ulysses_degree)):
        optional = name == "dp_shard" and value is None
        if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise PlanError(f"vision_parallel: {name}={value!r} is no integer of at least 1")
    if cp % ulysses_degree:
        raise _refused("ulysses_degree", ulysses_degree, f"divides cp={cp}", _divisors(cp))
    if async_cp and cp == 1:
        notes = ["fix: async_cp=False, or cp of at least 2"]
        raise PlanError(
            "vision_parallel: async_cp=True has nothing to overlap at cp=1", notes=notes
        )
    if async_cp not in (True, False):
        raise PlanError(f"vision_parallel: async_cp={async_cp!r} is neither True nor False")
    if not _nest(dp_shard or 1, cp, ulysses_degree):
        works = [n for n in _divisors(cp) if _nest(n, cp, ulysses_degree)]
        need = f"nests with cp={cp} and ulysses_degree={ulysses_degree} (one divides the next)"
        raise _refused("dp_shard", dp_shard, need, works, f"and multiples of {cp}")
    return VisionParallel(dp_shard, cp, ulysses_degree, async_cp)


def _refused(
    name: str, value: int | None, need: str, works: list[int], more: str = ""
) -> PlanError:
    """A setting that cannot be, with the values that can."""
    listed = ", ".join(map(str, works)) + (" works" if len(works) == 1 else " work")
    notes = [f"fix: {name} {listed}" + (f", {more}" if more else "")] if works else []
    return PlanError(f"vision_parallel: {name}={value} is no number that {need}", notes=notes)


def _nest(*sizes: int) -> bool:
    """Whether of any two sizes one divides the other."""
    return not any(large % small for small, large in pairwise(sorted(sizes)))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _split(size: int, inner: list[int]) -> int | tuple[int, ...]:
    """An axis cut so that its last parts have each of the inner sizes together."""
    tails = sorted({n for n in inner if 1 < n < size} | {1, size}, reverse=True)
    parts = tuple(large // small for large, small in pairwise(tails))
    return parts if len(parts) > 1 else size


def _inner(mesh: Mesh, ranks: int) -> str:
    """The innermost axes that have so many ranks together."""
    parts = list(mesh.parts)
    first = next(i for i in range(len(parts) + 1) if mesh.span(parts[i:]) == ranks)
    return " ".join(part for part in parts[first:] if mesh.parts[part] > 1)
