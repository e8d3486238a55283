"""The plans in ``plans/`` that tests go through."""

# On all kinds of batches, 2 and 4 ranks.
MAIN_PLANS = ("baseline_dp", "vision_dp1", "vision_cp_colossal", "vision_cp_ulysses")
# On the batches that set vision layouts apart; the ranks that each takes.
OTHER_PLANS = {
    "vision_cp_async": 2,
    "vision_cp_ulysses_async": 2,
    "vision_cp_ring": 2,
    "vision_cp_hybrid": 4,
    "vision_dealt": 4,
    "vision_hsdp": 4,
    "vision_sample": 2,
}
FOUR_RANKS_ONLY = ("vision_cp_hybrid",)
