"""A picture of loss and gradient norm over steps, and of what evaluations have found."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.training.record import EvalRecord, StepRecord


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


def draw(records: Sequence[StepRecord], evaluations: Sequence[EvalRecord], path: Path) -> None:
    """Draw loss and gradient norm over steps into a picture file.

    Args:
      records: of the steps.
      evaluations: their losses are drawn beside those of training, their accuracies below.
      path: the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = 3 if evaluations else 2
    figure, axes = pyplot.subplots(
        count, 1, sharex=True, figsize=(7, 3 * count), layout="constrained"
    )
    steps = [record.step for record in records]
    for axis, name in zip(axes, ("loss", "grad_norm"), strict=False):
        values = [getattr(record, name) for record in records]
        axis.plot(steps, values, linewidth=1, label="training")
        axis.set_ylabel(name.replace("_", " "))
    if evaluations:
        _draw_evaluations(axes[0], axes[2], evaluations)
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_evaluations(loss: Any, accuracy: Any, evaluations: Sequence[EvalRecord]) -> None:
    """Losses and accuracies of evaluations, the best one marked."""
    steps = [record.step for record in evaluations]
    best = min(evaluations, key=lambda record: record.eval_loss)
    loss.plot(steps, [record.eval_loss for record in evaluations], "o-", ms=3, label="evaluation")
    told = f"best: {best.eval_loss:.4f} after step {best.step}"
    loss.plot([best.step], [best.eval_loss], "*", ms=12, label=told)
    loss.legend()
    accuracy.plot(steps, [record.eval_accuracy for record in evaluations], "o-", ms=3)
    accuracy.set_ylabel("accuracy")
