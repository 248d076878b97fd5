"""Why a run ends that could not go on, and where the same command goes on."""

from training.checkpoint import Checkpoints
from training.digest import digests, not_finite
from training.guard import BadSteps, is_finite
from training.report import Report
from training.step import TrainState


def diagnose(
    error: Exception,
    step: int,
    state: TrainState,
    checkpoints: Checkpoints,
    report: Report,
) -> BadSteps:
    """Examines the state of a run that ends, and moves bad checkpoints away.

    What is saved is finite. Yet finite parameters may be as useless: if no step since
    their last update gave a finite loss, checkpoints that hold them move away.

    Args:
      error: what ends the run.
      step, state: the last step that was made, and what it left.

    Returns:
      The error to raise: what was found, and the step that the same command resumes.
    """
    newest = checkpoints.latest_step()
    if what := not_finite(digests(state)):
        said = (
            f"the run ends: {what}, since a step between {newest or 0} and {step}. "
            "Lower config.optimizer.peak_lr if this comes back at the same step; if it "
            "does not, suspect the hardware, and not the data"
        )
    else:
        made = int(state.step) - int(state.guard.skipped_in_row)
        said = f"{error}. The state is finite, as step {made} left it"
        in_row = int(report.last["skipped_in_row"])
        if in_row >= report.watch.stop_after and not is_finite(report.last):
            loss = report.last["loss"]
            checkpoints.distrust(made, f"loss {loss} after {in_row} skipped updates")
            newest = checkpoints.latest_step()
    where = "starts over" if newest is None else f"resumes from step {newest}"
    return BadSteps(f"{said}. The same command {where}")
