"""The closing lines of a training: how good the policy is, how it ended, and what to do next."""

import html
import shlex
from pathlib import Path

from gpurl.run.display import counted
from gpurl.run.resume import resume_call
from gpurl.run.trainer import Outcome

REASONS = {
    "total_steps": "total_steps reached",
    "max_seconds": "time limit (max_seconds)",
    "stop_return": "stop_return reached",
    "signal": "stopped by a signal",
}


def summary(
    run_folder: Path,
    outcome: Outcome,
    baseline: dict[str, float],
    needs_env: bool = False,
    needs_session: bool = False,
) -> str:
    """The closing lines of a run: how it ended, and what to do next, each command on its line.

    needs_env: its environment was given as what no command can make again, an instance, a function
    or a class of a notebook. needs_session: so was its algorithm, without which no other process
    can load the policy.
    """
    is_python = needs_env or needs_session
    folder = shlex.quote(str(run_folder))
    lines = []
    # how good it is
    if values := outcome.evaluation:
        episodes = counted(int(values["eval/episodes"]), "episode")
        text = f"evaluated return {spread(values, 2)} over {episodes}"
        if "eval/best_member" in values:
            text += (
                f" by member {values['eval/best_member']:.0f}, the best; the mean of all members "
                f"is {values['eval/population_mean']:.2f}"
            )
        if baseline:
            text += f"; the scripted policy gets {spread(baseline, 2)}"
        lines.append(text)
    # how it ended
    if outcome.unsaved:
        lines.append(f"ended after {counted(outcome.steps, 'step')}: {_why(outcome)}")
        lines.append(f"its last state is in no checkpoint: {outcome.unsaved}")
    elif outcome.signal_number:
        lines.append(f"interrupted after {counted(outcome.steps, 'step')} and saved; to continue:")
        if is_python:
            lines.append(f"  {resume_call(run_folder, needs_env, 'total_steps=...')}")
        else:
            lines.append(f"  gpurl train --resume {folder}")
    elif outcome.reason == "total_steps" and not outcome.new_steps:
        lines.append(
            f"nothing to do: it has {outcome.steps:,} steps already; --total-steps raises the limit"
        )
    else:
        lines.append(f"ended after {counted(outcome.steps, 'step')}: {_why(outcome)}")
    # what to do next
    lines.append(f"run folder {run_folder}: learning_curve.png, metrics.jsonl, checkpoints/")
    if is_python:
        lines += _python_lines(run_folder, outcome, needs_env, needs_session)
    if not outcome.signal_number:
        commands = ("plot",) if is_python else ("eval", "play")
        lines += [f"  gpurl {command} {folder}" for command in commands]
        lines.append(f"  tensorboard --logdir {shlex.quote(str(run_folder.parent))}")
    return "\n".join(lines)


def _why(outcome: Outcome) -> str:
    """What ended the run; a callback's reason in its own words."""
    return REASONS.get(outcome.reason, outcome.reason)


def _python_lines(
    run_folder: Path, outcome: Outcome, needs_env: bool, needs_session: bool
) -> list[str]:
    """What to do with a run that no command can evaluate, play or resume."""
    name = repr(str(run_folder))
    env = ", env=..." if needs_env else ""
    lines = [f"  gpurl.load({name}).act(obs)", f"  gpurl.evaluate_run({name}{env})"]
    if not outcome.signal_number:
        lines.append(f"  {resume_call(run_folder, needs_env, 'total_steps=...')}")
    if needs_env:
        lines.append(
            "env is the environment again, or what makes it: no command can make it, unless it is "
            "a class in a module (my_env.py)"
        )
    if needs_session:
        lines.append(
            "only this session knows its algorithm: another process can do none of these, unless "
            "it is a class in a module (my_ppo.py)"
        )
    return lines


def html_summary(run_folder: Path, outcome: Outcome, baseline: dict[str, float]) -> str:
    """How good the policy is and how the run ended, as a table of a notebook."""
    rows = {"run folder": str(run_folder)}
    if values := outcome.evaluation:
        episodes = counted(int(values["eval/episodes"]), "episode")
        rows["evaluated return"] = f"{spread(values, 2)} over {episodes}"
    if baseline:
        rows["scripted policy"] = spread(baseline, 2)
    rows["ended after"] = f"{counted(outcome.steps, 'step')}: {_why(outcome)}"
    if outcome.unsaved:
        rows["in no checkpoint"] = outcome.unsaved
    cells = "".join(
        f'<tr><td style="text-align: left; opacity: 0.7">{html.escape(label)}</td>'
        f'<td style="text-align: left">{html.escape(text)}</td></tr>'
        for label, text in rows.items()
    )
    return f"<table>{cells}</table>"


def spread(values: dict[str, float], digits: int) -> str:
    """`mean ± standard deviation` of an evaluation; of a member of a population only the mean."""
    numbers = [values[name] for name in ("eval/mean_reward", "eval/std_reward") if name in values]
    return " ± ".join(f"{number:.{digits}f}" for number in numbers)
