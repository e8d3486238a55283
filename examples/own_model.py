"""A model of your own on many ranks, without a plan: an audio encoder beside a text decoder.

``Listener`` is the model as it was, for one device. ``SpreadListener`` has its weights and blocks;
what it adds is one forward that says where frames and tokens live. Both are trained on generated
clips of spoken digits, and every loss and gradient is compared.

``torchrun --nproc-per-node 2 examples/own_model.py``, on 4 ranks too; without torchrun it is one
process.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from vlshard import (
    Mesh,
    Mode,
    Packing,
    Sharded,
    attend,
    fsdp,
    gather,
    replicate,
    reshard,
    ring,
    shard_model,
    start,
    ulysses,
    use_mesh,
)

WIDTH, HEADS, FRAME, DIGIT_FRAMES = 32, 4, 8, 4
BEGIN, SOUND, PAD, VOCAB = 10, 11, 12, 13  # tokens 0 to 9 are the digits
ROWS, ROW, LONGEST = 4, 16, 5
STEPS, RATE = 8, 3e-3
TOLERANCE = 1e-5  # fp32, sums in another order; of the loss, and of the largest gradient

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """Clips, and a row of tokens for each: its sound, a mark, the digits that were said.

    Attributes:
      frames: frames of all clips, one after another.
      lengths: frames of each clip; two of them become one token of sound.
      ids: a row for each clip, with SOUND where its tokens of sound belong.
      targets: the token that each should predict, or -100.
    """

    frames: Tensor
    lengths: tuple[int, ...]
    ids: Tensor
    targets: Tensor

    @property
    def ticks(self) -> Tensor:
        """The place of each frame in its clip."""
        return torch.cat([torch.arange(length) for length in self.lengths])


def generate(seed: int) -> Batch:
    """A batch, the same on every rank."""
    draw = torch.Generator().manual_seed(seed)
    voices = torch.randn(10, FRAME, generator=torch.Generator().manual_seed(0))
    ids = torch.full((ROWS, ROW + 1), PAD)
    targets, frames = torch.full((ROWS, ROW), -100), list[Tensor]()
    for row in range(ROWS):
        count = int(torch.randint(1, LONGEST + 1, (), generator=draw))
        digits = torch.randint(10, (count,), generator=draw)
        said = voices[digits].repeat_interleave(DIGIT_FRAMES, 0)
        frames.append(said + 0.1 * torch.randn(said.shape, generator=draw))
        first = len(said) // 2
        ids[row, : first + 1] = torch.tensor([SOUND] * first + [BEGIN])
        ids[row, first + 1 : first + 1 + count] = digits
        targets[row, first : first + count] = digits
    return Batch(torch.cat(frames), tuple(map(len, frames)), ids[:, :ROW], targets)


class Block(nn.Module):
    """A transformer block that is handed its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attention: Attend) -> Tensor:
        qkv = self.qkv(self.norms[0](x))
        q, k, v = rearrange(qkv, "... (three h d) -> three ... h d", three=3, h=HEADS)
        x = x + self.out(rearrange(attention(q, k, v), "... h d -> ... (h d)"))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Listener(nn.Module):
    """Writes down the digits that it hears; on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.ear, self.ticks = nn.Linear(FRAME, WIDTH), nn.Embedding(LONGEST * DIGIT_FRAMES, WIDTH)
        self.ear_blocks = nn.ModuleList(Block() for _ in range(2))
        self.fold = nn.Linear(2 * WIDTH, WIDTH)
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(ROW, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def hear(self, frames: Tensor, ticks: Tensor, attention: Attend) -> Tensor:
        """Tokens of sound, each from two frames."""
        x = self.ear(frames) + self.ticks(ticks)
        for block in self.ear_blocks:
            x = block(x, attention)
        return self.fold(rearrange(x, "(n two) m -> n (two m)", two=2))

    def write(self, x: Tensor, places: Tensor, attention: Attend) -> Tensor:
        """Logits of what follows each token."""
        x = x + self.places(places)
        for block in self.blocks:
            x = block(x, attention)
        return self.head(self.norm(x))

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch."""

        def within_clips(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            clips = zip(*(x.split(batch.lengths) for x in (q, k, v)), strict=True)
            return torch.cat([torch_attention(*clip, causal=False) for clip in clips])

        def before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch_attention(q, k, v, causal=True)

        sound = self.hear(batch.frames, batch.ticks, within_clips)
        x = put_sound(self.embed(batch.ids), sound, batch.ids)
        logits = self.write(x, torch.arange(ROW).expand(ROWS, ROW), before)
        return loss_term(logits, batch.targets, batch)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention of whole sequences."""
    heads = (rearrange(x, "... s h d -> ... h s d") for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads, is_causal=causal)
    return rearrange(out, "... h s d -> ... s h d")


def put_sound(
    x: Sharded[Tensor, "float b@dp s m"],
    sound: Sharded[Tensor, "float (clip@dp n) m"],
    ids: Sharded[Tensor, "int b@dp s"],
) -> Sharded[Tensor, "float b@dp s m"]:
    """Tokens of sound at the places that wait for them."""
    return x.masked_scatter(rearrange(ids == SOUND, "b s -> b s 1"), sound)


def loss_term(logits: Tensor, targets: Tensor, batch: Batch) -> Tensor:
    """What these rows add to the loss, the mean over all labelled tokens of the batch."""
    labels = int((batch.targets >= 0).sum())
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / labels


@dataclass(frozen=True)
class Where:
    """Where things live, and how attention is met: all that has to be decided.

    Attributes:
      frames: layout of the frames, and of the tokens of sound.
      tokens: layout of the tokens in the decoder.
      hearing: how keys come to the queries inside clips; None where clips are whole.
      reading: how they do inside rows.
    """

    frames: str
    tokens: str
    hearing: Mode | None
    reading: Mode | None


class SpreadListener(Listener):
    """The same on many ranks."""

    def __init__(self, mesh: Mesh, where: Where) -> None:
        super().__init__()
        self.mesh, self.where = mesh, where

    def forward(self, batch: Batch) -> Tensor:
        """This rank's term of the loss of a batch, which all ranks know."""
        mesh, where = self.mesh, self.where
        clips = Packing(batch.lengths, unit=2)  # no cut parts the two frames of a token
        sounds = Packing([length // 2 for length in batch.lengths])

        def within_clips(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, f"{where.frames} h d", mesh, where.hearing, clip=clips)

        def before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, f"{where.tokens} h d", mesh, where.reading, causal=True)

        # Of what all ranks know, each takes its part: nothing is sent.
        frames = reshard(batch.frames, f"(clip n) c -> {where.frames} c", mesh, clip=clips)
        ticks = reshard(batch.ticks, f"(clip n) -> {where.frames}", mesh, clip=clips)
        sound = self.hear(frames, ticks, within_clips)

        # Sound goes to the ranks that have its row, behind the embedding of the row.
        flying = start(sound, f"{where.frames} m -> (clip@dp n) m", mesh, clip=sounds)
        ids = reshard(batch.ids, "b s -> b@dp s", mesh)
        x = self.embed(ids)
        with use_mesh(mesh, clip=sounds):
            x = put_sound(x, flying.wait(), ids)

        x = reshard(x, f"b@dp s m -> {where.tokens} m", mesh)
        places, targets = (
            reshard(whole, f"b s -> {where.tokens}", mesh)
            for whole in (torch.arange(ROW).expand(ROWS, ROW), batch.targets)
        )
        return loss_term(self.write(x, places, before), targets, batch)


def store(model: SpreadListener) -> None:
    """The encoder is copied to every rank; of the decoder each has a part, gathered by blocks."""
    parts = fsdp("dp cp")
    storages = {f"ear_blocks.{i}": replicate() for i in range(len(model.ear_blocks))}
    storages |= {"embed": parts}
    storages |= {f"blocks.{i}": parts for i in range(len(model.blocks))}
    shard_model(model, {**storages, "": parts}, model.mesh, lookups=["embed"])


def prove(where: Where) -> list[str]:
    """Train both for some steps; on each rank of the running group, or in one process.

    Returns: what was compared, in lines.
    Raises: AssertionError if a loss or a gradient is not that of one process.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    cp = min(world, 2)
    mesh = Mesh(dp=world // cp, cp=cp)
    torch.manual_seed(0)
    alone, spread = Listener(), SpreadListener(mesh, where)
    spread.load_state_dict(alone.state_dict())
    if world > 1:
        store(spread)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=RATE) for model in (alone, spread)]
    losses, worst = list[float](), 0.0
    for step in range(STEPS):
        batch = generate(step % 2)
        for optimizer in optimizers:
            optimizer.zero_grad()
        wanted, found = alone(batch), spread(batch)
        for loss in (wanted, found):
            loss.backward()
        total = found.detach().clone()
        if world > 1:
            dist.all_reduce(total)  # to be compared; backward starts from each rank's own term
        losses.append(total.item())
        worst = max(worst, abs(losses[-1] / wanted.item() - 1))
        if step == 0:
            worst = max(worst, gradients_off(spread, alone))
        for optimizer in optimizers:
            optimizer.step()
    if not worst < TOLERANCE:
        raise AssertionError(f"off by {worst:.1e} on {mesh}")
    count = len([*alone.parameters()])
    return [
        f"{where.frames} and {where.tokens} on {mesh}",
        f"  losses {' '.join(f'{loss:.3f}' for loss in losses)}, those of one process",
        f"  {count} gradients, those of one process",
    ]


def gradients_off(spread: nn.Module, alone: nn.Module) -> float:
    """The largest difference of a gradient, over the largest gradient."""
    off, largest = 0.0, 0.0
    for mine, whole in zip(spread.parameters(), alone.parameters(), strict=True):
        found = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        off = max(off, float((found - whole.grad).abs().max()))
        largest = max(largest, float(whole.grad.abs().max()))
    return off / largest


# A rank hears an even run of the frames of its rows' clips, or whole clips that it is dealt.
CHOICES = (
    Where("(clip@dp n)@cp", "b@dp s@cp.zigzag", gather("cp"), ring("cp")),
    Where("(clip@(dp cp).balance n)", "b@dp s@cp.zigzag", None, ulysses("cp")),
)


def main() -> None:
    """Prove it in the group that torchrun describes, or in this process."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    lines = [line for where in CHOICES for line in prove(where)]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("\n".join(lines))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
