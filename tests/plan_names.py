"""The plans in ``plans/`` that tests go through."""

# On all kinds of batches, 2 and 4 ranks: images whole, and cut.
WHOLE_IMAGE_PLANS = ("baseline_dp", "vision_dp1")
CUT_IMAGE_PLANS = ("vision_cp_colossal", "vision_cp_ulysses")
MAIN_PLANS = (*WHOLE_IMAGE_PLANS, *CUT_IMAGE_PLANS)
# On the batches that set vision layouts apart; the ranks that each takes.
OTHER_PLANS = {
    "vision_cp_async": 2,
    "vision_cp_ulysses_async": 2,
    "vision_cp_ring": 2,
    "vision_cp_hybrid": 4,
    "vision_dealt": 4,
    "vision_hsdp": 4,
    "vision_sample": 2,
    "decoder_tp": 2,
}
# With splits, on a model with four vision heads; the ranks that each takes.
SPLIT_PLANS = {
    "decoder_tp": 2,
    "decoder_tp_cp": 4,
    "decoder_vocab": 2,
    "decoder_ep": 2,
    "decoder_all": 4,
}
FOUR_RANKS_ONLY = ("vision_cp_hybrid",)
# Those in which each rank has rows of its own to read.
EVERY_RANK_READS = (*WHOLE_IMAGE_PLANS, "vision_hsdp")
# For many steps.
FOLLOWED_PLANS = (
    *MAIN_PLANS,
    "vision_cp_async",
    "vision_cp_ulysses_async",
    "vision_cp_ring",
    "decoder_tp",
)
# With a look at all that crosses a boundary; the ranks that each takes.
WATCHED_PLANS = {
    "vision_dp1": 2,
    "vision_cp_colossal": 2,
    "vision_cp_ulysses": 4,
    "vision_dealt": 4,
    "vision_hsdp": 4,
    "vision_cp_ring": 2,
    "vision_cp_ulysses_async": 2,
    "vision_cp_hybrid": 4,
}
# Timed beside transformers.
COMPARED_PLANS = (*MAIN_PLANS, "vision_cp_ring")
# Timed side by side on two ranks, as the table calls them.
TIMED_PLANS = {
    "baseline DP": "baseline_dp",
    "vision DP1": "vision_dp1",
    "CP gather": "vision_cp_colossal",
    "CP Ulysses": "vision_cp_ulysses",
    "CP async gather": "vision_cp_async",
    "CP async Ulysses": "vision_cp_ulysses_async",
    "CP ring": "vision_cp_ring",
}
