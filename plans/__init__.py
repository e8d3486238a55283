"""Which layout each boundary of the model has: one file a plan."""
