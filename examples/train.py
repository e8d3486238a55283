"""Train a Qwen3-VL-MoE from files, under a plan, on one rank or many.

``torchrun --nproc-per-node 2 examples/train.py --plan plans/vision_cp_ulysses.py --model DIR
--data FILE.jsonl --steps 100 --batch 8 --save OUT``; without torchrun it is one process. What it
is made of can be imported from ``model.training``.
"""

import sys

from model.training import Interruption, Settings, SettingsError, tell


def main() -> None:
    """Train as the command line says."""
    interruption = Interruption()
    interruption.install()
    try:
        settings = Settings.from_command_line()
    except SettingsError as error:
        sys.exit(tell(error))
    # Torch is imported only for a command line that is right: --help answers at once.
    from model.training.launch import join_ranks, run
    from model.training.train import train

    def main_of_ranks() -> int:
        return train(settings, join_ranks(settings.device, interruption), interruption)

    run(main_of_ranks, interruption)


if __name__ == "__main__":
    main()
