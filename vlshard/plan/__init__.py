"""A plan: the layout of each boundary of a model, its storage and attention, checked and bound.

`plan` holds `Plan`, `plan_file` reads one; `check` and its neighbours find its faults, against what
`model_config` asks of a model; `bound_plan` is what fits, `describe` what ranks then store.
`splits` says what follows from cutting an `inside` of blocks, and `doors` is the way in and out,
`regather` one that keeps less for backward; `vocabulary` says which rows of its tables travel where
it is cut, and `lookup` moves them.
`header` is what all ranks know of a micro-batch: the `facts` of its samples, as each rank has
`told` them. From it `tokens` and `hand_off` say who holds which tokens and visual rows, and
`step_boundaries` is what a core then calls, by the protocol in `boundaries`. `advise` compares
layouts of patches before anything runs.
"""

from vlshard.plan.advise import Advice, advise_patches
from vlshard.plan.bound_plan import BoundPlan
from vlshard.plan.boundaries import Boundaries, local_boundaries
from vlshard.plan.check_attention import idle_axes
from vlshard.plan.describe import describe_storage, padding_remarks
from vlshard.plan.facts import FactTable, Grid, LabelRun, SampleFacts
from vlshard.plan.header import Share, StepHeader, deal_rows, make_headers
from vlshard.plan.inside import HasInsides, Inside, fused_parameters
from vlshard.plan.model_config import ModelConfig
from vlshard.plan.plan import Plan, load_plan
from vlshard.plan.plan_file import plan_text
from vlshard.plan.split_remarks import split_remarks
from vlshard.plan.step_boundaries import StepBoundaries
from vlshard.plan.told import Told, merge_told
from vlshard.plan.unused_axes import unused_axes
from vlshard.plan.vocabulary import NOTHING, TokenIds, ToldIds

__all__ = [
    "NOTHING",
    "Advice",
    "BoundPlan",
    "Boundaries",
    "FactTable",
    "Grid",
    "HasInsides",
    "Inside",
    "LabelRun",
    "ModelConfig",
    "Plan",
    "SampleFacts",
    "Share",
    "StepBoundaries",
    "StepHeader",
    "TokenIds",
    "Told",
    "ToldIds",
    "advise_patches",
    "deal_rows",
    "describe_storage",
    "fused_parameters",
    "idle_axes",
    "load_plan",
    "local_boundaries",
    "make_headers",
    "merge_told",
    "padding_remarks",
    "plan_text",
    "split_remarks",
    "unused_axes",
]
