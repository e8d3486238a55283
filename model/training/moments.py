"""What an optimizer keeps of each parameter, by the parameter's name: to be saved, and given back.

A parameter that never had a gradient has nothing, and its first step is its own first.
"""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from vlshard.comm import AgreedError, Group, agree
from vlshard.storage import Key, Tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
MOST_NAMED = 4


def saved_tensors_of(
    model: nn.Module, optimizer: torch.optim.AdamW, without: Collection[str] = ()
) -> Tensors:
    """Parameters, and the moments of those that have any.

    Args:
      model: stored as its plan says.
      optimizer: of its parameters.
      without: parameters that are left out.
    """
    named = dict(model.named_parameters())
    found = {Key(name): parameter for name, parameter in named.items() if name not in without}
    for name, parameter in named.items():
        state = optimizer.state.get(parameter)
        found |= {Key(name, f".{moment}"): state[moment] for moment in MOMENTS if state}
    return found


def step_counts(
    model: nn.Module, optimizer: torch.optim.AdamW, group: Group = None
) -> dict[str, int]:
    """How many steps the optimizer has done with each parameter that it has moments of.

    A collective of the group. Raises: AgreedError on every rank that names parameters of which
    ranks differ.
    """
    named = model.named_parameters()
    states = {name: optimizer.state.get(parameter) for name, parameter in named}
    mine = {name: int(state["step"]) for name, state in states.items() if state}
    told = agree(mine, group)
    names = {name for counts in told for name in counts}
    odd = sorted(name for name in names if len({counts.get(name) for counts in told}) > 1)
    if odd:
        some = ", ".join(odd[:MOST_NAMED])
        raise AgreedError(f"the optimizer has done other steps on other ranks with {some}")
    return mine


def give_moments(model: nn.Module, optimizer: torch.optim.AdamW, counts: Mapping[str, int]) -> None:
    """Make moments, to be filled, of the parameters that are trained and have some.

    Args:
      model: stored as its plan says.
      optimizer: of its parameters, before its first step.
      counts: steps done with each parameter, by name.
    """
    fused = bool(optimizer.defaults["fused"])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name in counts:
            place = parameter.device if fused else torch.device("cpu")
            optimizer.state[parameter] = {
                "step": torch.tensor(float(counts[name]), dtype=torch.float32, device=place),
                **{moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS},
            }
