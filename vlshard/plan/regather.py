"""Entered tokens that are gathered again in backward instead of being kept for it.

What a block gathers on the way in, all tokens of a group, is saved by the products that read it.
Here its memory is given back when the inside is left, and filled again, by the same gather, when
the gradient comes to where it was left: this rank's own tokens are all that is kept.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from vlshard.comm import Lowered, refuse_second_derivative
from vlshard.plan.doors import Door

# The backward that runs, or -1; torch.utils.checkpoint asks so too, torch has no public way.
_graph_task = cast("Callable[[], int]", cast("Any", torch)._C._current_graph_task_id)


class Regathered:
    """A door whose entered tokens are gathered again in backward.

    Nothing may read them once the inside is left: their memory is gone, as that of parameters is
    that FSDP2 has gathered, and a hook that kept them for later would end the process. In a block
    that is recomputed nothing changes: its first forward keeps nothing anyway, and what the
    recompute gathers is kept until the block's backward is through.

    Attributes:
      door: the way in and out.
    """

    def __init__(self, door: Door) -> None:
        self.door = door
        self._inside: tuple[Tensor, Tensor] | None = None

    @property
    def ways(self) -> tuple[Lowered, Lowered]:
        """The way in, and the way out."""
        return self.door.ways

    def enter(self, x: Tensor) -> Tensor:
        """Tokens to compute on."""
        entered = self.door.enter(x)
        self._inside = x.detach(), entered.detach()
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """This rank's tokens, summed; what was entered gives its memory back."""
        inside, self._inside = self._inside, None
        if inside is None or not (x.requires_grad and torch.is_grad_enabled()):
            return self.door.leave(x)
        own, entered = inside
        freed = not backward_runs()
        marked = cast("Tensor", _Again.apply(x, own, entered, torch.tensor(freed), self.door))
        left = self.door.leave(marked)
        if freed and is_alone(entered, own):
            entered.untyped_storage().resize_(0)
        return left


class _Again(torch.autograd.Function):
    """Gathers entered tokens again before anything inside needs them; gradients pass through.

    What it needs is saved as autograd saves tensors, so that a checkpoint sees to it. So is whether
    the memory was freed, which is the same on all ranks: a recompute says for itself.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor, entered: Tensor, freed: Tensor, door: Door
    ) -> Tensor:
        ctx.save_for_backward(own, entered, freed)
        ctx.door = door
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        own, entered, freed = ctx.saved_tensors
        if freed:
            refuse_second_derivative("a block whose tokens are gathered again")
            again = ctx.door.enter(own)
            storage = entered.untyped_storage()
            if not storage.nbytes():
                storage.resize_(entered.numel() * entered.element_size())
                entered.data.copy_(again)  # not a change that autograd has to hear of
        return grad_outputs[0], None, None, None, None


def is_alone(entered: Tensor, own: Tensor) -> bool:
    """Whether entered tokens have a memory of their own, and all of it.

    They have not where this rank has had all tokens before.
    """
    storage = entered.untyped_storage()
    full = storage.nbytes() == entered.numel() * entered.element_size()
    return full and storage.data_ptr() != own.untyped_storage().data_ptr()


def backward_runs() -> bool:
    """Whether autograd is at a backward, so that a forward here is a recompute."""
    return _graph_task() != -1
