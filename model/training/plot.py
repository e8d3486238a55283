"""A picture of loss and gradient norm over steps."""

from collections.abc import Sequence
from pathlib import Path

from model.training.record import StepRecord


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be written at the end.

    Raises: OSError that says why.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.filetypes)
    if path.suffix[1:].lower() not in kinds:
        raise OSError(f"{path} is no picture that can be drawn: expected .{', .'.join(kinds)}")
    if path.is_dir():
        raise OSError(f"{path} is a folder, not a picture")


def draw(records: Sequence[StepRecord], path: Path) -> None:
    """Draw loss and gradient norm over steps into a picture file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    steps = [record.step for record in records]
    for axis, name in zip(axes, ("loss", "grad_norm"), strict=True):
        axis.plot(steps, [getattr(record, name) for record in records], linewidth=1)
        axis.set_ylabel(name.replace("_", " "))
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
