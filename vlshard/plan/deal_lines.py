"""How much ranks get of a deal, in lines: ranks that get as much share one."""

from vlshard.language import FloatArray

MANY_LINES = 64
MANY_RUNS = 8


def deal_lines(rows: FloatArray, shares: FloatArray) -> list[str]:
    """How many patches ranks get, and of how much work; the busiest where lines would be many.

    Args:
      rows: patches of each rank.
      shares: work of each rank, over an even share of it.
    """
    alike: dict[str, list[int]] = {}
    for rank, (count, share) in enumerate(zip(rows.tolist(), shares.tolist(), strict=True)):
        alike.setdefault(f"{int(count):,} patches, {share:.2f} of an even share", []).append(rank)
    kept = list(alike.items())
    if len(kept) > MANY_LINES:
        kept = sorted(kept, key=lambda line: -shares[line[1][0]])[:MANY_LINES]
    lines = [f"  rank{'s' * (len(ranks) > 1)} {_listed(ranks)}: {text}" for text, ranks in kept]
    if left := len(rows) - sum(len(ranks) for _, ranks in kept):
        lines.append(f"  {left:,} more ranks get less")
    return lines


def _listed(ranks: list[int]) -> str:
    """Increasing ranks as runs: ``0-3, 8``; those of a few runs, then how many are left."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] + 1 == rank:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [f"{first}-{last}" if first < last else str(first) for first, last in runs[:MANY_RUNS]]
    left = sum(last - first + 1 for first, last in runs[MANY_RUNS:])
    return ", ".join(words) + (f" and {left:,} more" if left else "")
