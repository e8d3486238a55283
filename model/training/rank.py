"""One rank of those that ``python -m model.training --ranks`` starts; that tells their errors."""

from model.training.interruption import Interruption
from model.training.program import train_here
from model.training.settings import Settings

if __name__ == "__main__":
    interruption = Interruption()
    interruption.install()
    train_here(Settings.from_command_line(), interruption, speak=False)
