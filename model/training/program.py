"""The training program: reads the command line, then is one rank, or starts the ranks.

``python -m model.training --ranks 2 ...`` starts them; ``torchrun ... -m model.training ...`` does
so on several machines; without either it is one process. Torch is imported only for a command line
that is right: ``--help`` answers at once.
"""

import os
import sys
from collections.abc import Sequence
from signal import SIGINT

from model.training.interruption import Interruption, status_of
from model.training.report import tell
from model.training.settings import Settings, SettingsError

RANK_MODULE = "model.training.rank"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says; ends the process.

    Args:
      arguments: the command line; None is the process's own.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    interruption = Interruption()
    try:
        settings = Settings.from_command_line(arguments)
        if settings.ranks and "RANK" in os.environ:
            raise SettingsError("--ranks starts ranks, but torchrun has: leave one of them out")
    except SettingsError as error:
        sys.exit(tell(error))
    if settings.ranks:
        sys.exit(start(arguments, settings.ranks, settings.shutdown_timeout))
    interruption.install()
    train_here(settings, interruption)


def start(arguments: Sequence[str], ranks: int, shutdown_timeout: float) -> int:
    """Start the ranks; the exit status."""
    try:
        from model.training.ranks import start_ranks

        return start_ranks(RANK_MODULE, arguments, ranks, shutdown_timeout)
    except KeyboardInterrupt:  # before there was a rank
        return status_of(SIGINT)


def train_here(settings: Settings, interruption: Interruption, *, speak: bool = True) -> None:
    """Train as one rank; ends the process.

    Args:
      settings: the same on every rank.
      interruption: of this process, with its signals taken over.
      speak: whether rank 0 tells the error that all ranks share; else whoever started them does.
    """
    from model.training.launch import join_ranks, run
    from model.training.train import train

    def of_rank() -> int:
        device = join_ranks(settings.device, interruption, settings.timeout)
        return train(settings, device, interruption)

    run(of_rank, interruption, speak=speak)
