"""What a run says before its first step: plan, sizes, data, optimizer, and what it will write."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

import torch.distributed as dist
from torch import nn

from model.data import DATA_ERRORS, Batch, RowFile
from model.training.job import Job
from model.training.settings import Settings
from vlshard import BoundPlan
from vlshard.comm import agree
from vlshard.language import clipped
from vlshard.storage import local_part

MOST_LISTED = 8  # ranks whose numbers are listed
LONGEST = 200  # letters of what is learned of a row


def first_lines(settings: Settings, job: Job, model: nn.Module, run: str) -> list[str]:
    """What is trained, on what and how; every rank calls it.

    Args:
      settings: of the run.
      job: what they name, read and checked.
      model: as its plan stores it; its parameters need no values.
      run: its id.
    Returns: one line after another on rank 0, none elsewhere.
    """
    parameters = parameter_line(job.bound, model)
    if dist.get_rank():
        return []
    return [
        *plan_lines(settings, job.bound),
        parameters,
        *data_lines(settings, job.rows, job.evaluated),
        f"computed in {settings.dtype}; weights, gradient sums and moments are float32",
        optimizer_line(settings),
        written_line(settings, run),
    ]


def plan_lines(settings: Settings, bound: BoundPlan) -> Iterator[str]:
    """The plan: its mesh, its layouts, and how units of parameters are stored."""
    ranks = f"{bound.mesh.size} rank{'s' * (bound.mesh.size > 1)}"
    yield f"plan {settings.plan} on {ranks}: {bound.mesh or 'no axes'}"
    for site, name, spec in (
        ("vision", "vision.patches", bound.patches),
        ("text", "text.tokens", bound.tokens),
    ):
        mode = bound.attention.get(site)
        met = f"attention {mode}" if mode else "attention needs no messages"
        every = bound.checkpoint.get(site)
        again = f"; every {every}. block recomputed" if every else ""
        packed = "; packed" * (settings.pack and site == "text")
        yield f"  {name:15} {spec}; {met}{again}{packed}"
    for name, cut in bound.splits.specs.items():
        yield f"  split {name}: {cut}"
    units = Counter(map(str, bound.storages.values()))
    yield "  stored " + ", ".join(f"{how} ({count} units)" for how, count in units.items())


def parameter_line(bound: BoundPlan, model: nn.Module) -> str:
    """How many parameters there are, are trained, and are stored by each rank; a collective."""
    shapes = bound.config.parameter_shapes()  # whole: splits cut the model's own
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    whole, learned = sum(map(prod, shapes.values())), sum(prod(shapes[name]) for name in trained)
    stored = agree(sum(local_part(parameter).numel() for parameter in model.parameters()))
    counts = f"{whole:,} parameters, {learned:,} trained, {whole - learned:,} frozen"
    return f"{counts}; stored per rank {_listed(stored)}"


def data_lines(settings: Settings, rows: RowFile, evaluated: RowFile | None) -> Iterator[str]:
    """How often the data comes round, and which tokens are learned."""
    passes = settings.steps * settings.batch / len(rows)
    size = f"{settings.steps} steps of {settings.batch} rows, {passes:.3g} passes"
    order = "shuffled" if settings.shuffle else "in file order"
    yield f"data {rows.path}: {len(rows):,} rows {order}; {size}"
    yield "  learned: what assistants say, with the end of their turns; of token rows, their labels"
    try:
        tokens, learned, text = rows.learned(0)
    except DATA_ERRORS:
        pass  # told when a step comes to it, which may be never
    else:
        told = f": {clipped(repr(text), LONGEST)}" if text else ""
        yield f"  of the first row {learned} of {tokens} tokens{told}"
    if evaluated:
        every = f"every {settings.eval_every} steps and " if settings.eval_every else ""
        yield f"evaluated on {evaluated.path}: {len(evaluated):,} rows, {every}after the last step"


def optimizer_line(settings: Settings) -> str:
    """The rate and what else the optimizer is told."""
    falls = f" to {settings.min_lr:g}" if settings.schedule == "cosine" else ""
    warm = f" after {settings.warmup} steps of warm-up" if settings.warmup else ""
    decay = f"decay {settings.weight_decay:g}"
    decay += f" of {settings.decay}" if settings.weight_decay else ""
    clip = f"norm clipped to {settings.clip:g}" if settings.clip else "norm not clipped"
    rate = f"rate {settings.lr:g}, {settings.schedule}{falls}{warm}"
    parts = "".join(f", {settings.lr * f:g} for {pattern}" for pattern, f in settings.lr_of)
    return f"AdamW: {rate}{parts}; {decay}; {clip}; seed {settings.seed}"


def written_line(settings: Settings, run: str) -> str:
    """Where what is written will be."""
    places = {
        "model": settings.save,
        "checkpoints": settings.checkpoint,
        "metrics": settings.metrics,
        "picture": settings.plot,
        "board": settings.tensorboard,
        "traces": settings.profile_dir if settings.profile else None,
    }
    told = [f"{what} to {path}" for what, path in places.items() if path]
    nothing = "nothing: what is trained is lost (--save DIR keeps it)"
    return f"run {run} writes {', '.join(told) or nothing}"


def step_lines(bound: BoundPlan, batch: Batch) -> Iterator[str]:
    """One planned step: what each rank computes of it."""
    yield (
        f"step {batch.step}: {batch.tokens:,} tokens, {batch.labels:,} of them learned, "
        f"{batch.images:,} images, in {len(batch.parts)} micro-batches"
    )
    yield f"  patches per rank {_listed(batch.vision_rows)}"
    yield f"  tokens per rank, padding included, {_listed(batch.text_rows)}"
    for header in batch.headers:
        if header.visual:
            yield from (f"  {line}" for line in bound.describe_deal(header).splitlines())


def _listed(counts: Sequence[int]) -> str:
    """Numbers of ranks; their spread where they are many."""
    if len(counts) <= MOST_LISTED:
        return ", ".join(f"{count:,}" for count in counts)
    return f"{min(counts):,} to {max(counts):,}"
