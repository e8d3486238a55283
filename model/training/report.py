"""Errors that all ranks share are told once."""

import os
import sys
import time

REPORT_SECONDS = 1.0


def tell(error: Exception) -> int:
    """Tell an error that every rank has, in one line; the exit status to end with.

    Rank 0 speaks; the others leave it the time to, since the first exit ends all ranks.
    """
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(REPORT_SECONDS)
    return 1
