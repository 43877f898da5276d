"""The closing lines of a training: how good the policy is, how it ended, and what to do next."""

import shlex
from pathlib import Path

from gpurl.run.trainer import Outcome


def summary(
    run_folder: Path, outcome: Outcome, baseline: dict[str, float], of_session: bool
) -> str:
    """The closing lines of a run: how it ended, and what to do next, each command on its line.
    of_session: its environment or algorithm is defined in a notebook or a console, and other
    processes do not know it.
    """
    folder = shlex.quote(str(run_folder))
    lines = []
    # how good it is
    if values := outcome.evaluation:
        text = f"evaluated return {spread(values, 2)} over {values['eval/episodes']:.0f} episodes"
        if baseline:
            text += f"; the scripted policy gets {spread(baseline, 2)}"
        lines.append(text)
    # how it ended
    if outcome.unsaved:
        lines.append(f"ended by {outcome.reason} after {outcome.steps:,} steps")
        lines.append(f"its last state is in no checkpoint: {outcome.unsaved}")
    elif outcome.signal_number:
        lines.append(f"interrupted after {outcome.steps:,} steps and saved; to continue:")
        if not of_session:
            lines.append(f"  gpurl train --resume {folder}")
    elif outcome.reason == "total_steps" and not outcome.new_steps:
        lines.append(
            f"nothing to do: it has {outcome.steps:,} steps already; --total-steps raises the limit"
        )
    else:
        lines.append(f"ended by {outcome.reason} after {outcome.steps:,} steps")
    # what to do next
    lines.append(f"run folder {run_folder}: learning_curve.png, metrics.jsonl, checkpoints/")
    if of_session:
        name = repr(str(run_folder))
        lines += [f"  gpurl.evaluate_run({name})", f"  gpurl.resume({name}, total_steps=...)"]
        lines.append(
            "only this session knows its classes: another process could load the policy, but not "
            "play or resume; define them in a module (my_env.py) for that"
        )
    elif not outcome.signal_number:
        lines += [f"  gpurl {command} {folder}" for command in ("eval", "play")]
        lines.append(f"  tensorboard --logdir {shlex.quote(str(run_folder.parent))}")
    return "\n".join(lines)


def spread(values: dict[str, float], digits: int) -> str:
    """`mean ± standard deviation` of an evaluation."""
    return f"{values['eval/mean_reward']:.{digits}f} ± {values['eval/std_reward']:.{digits}f}"
