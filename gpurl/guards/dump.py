"""A dump of NaN or infinity, for the doctor to tell: the rollout of the first environment that gave
one, or a step that was left out.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpurl.checkpoints.folders import load_checkpoint, save_checkpoint
from gpurl.errors import CheckpointError, NonFiniteError, visible

STEPS_BEFORE = 3  # shown of what led there
SHOWN = 6  # numbers of a vector


def write_dump(run_folder: Path, steps: int, error: NonFiniteError) -> Path | None:
    """Write the error's evidence into the run folder; None where it has none, or the disk
    refuses.
    """
    if error.evidence is None:
        return None
    try:
        return save_checkpoint(run_folder / "non_finite", steps, {"dump": error.evidence})
    except CheckpointError:
        return None  # a full disk must not hide the error itself


def describe_dump(path: Path) -> str:
    """What is in the dump `path`, as text; CheckpointError where it is none."""
    parts, manifest = load_checkpoint(path)
    if "dump" not in parts:
        raise CheckpointError(
            f"{path} is a checkpoint of a run, not a dump of NaN; those are in non_finite/ of a "
            f"run folder"
        )
    try:
        return visible(_described(parts["dump"], manifest["step"]), lines=True)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        RuntimeError,
        StopIteration,
        OverflowError,
    ) as error:
        raise CheckpointError(
            f"{path} is no dump of NaN that this version can read: {type(error).__name__}: {error}"
        ) from None


def _described(dump: dict[str, Any], steps: int) -> str:
    if "optimizer" in dump:
        return _describe_step(dump, steps)
    columns: dict[str, Tensor] = dump["columns"]
    step, horizon = int(dump["step"]), len(next(iter(columns.values())))
    lines = [
        f"environment {dump['env']!r}, number {dump['index']}: NaN or infinity at step {step} of "
        f"{horizon} of the rollout of iteration "
        f"{dump['iteration']}, which ended at env step {steps}; {dump['rows']} such rows in all",
        f"first in: {', '.join(dump['keys']) or 'obs of the next step'}",
    ]
    if dump.get("weights"):
        lines.append(f"weights that are not finite: {dump['weights']}")
    for t in range(max(step - STEPS_BEFORE, 0), min(step + 2, horizon)):
        lines.append(f"step {t}{' <- here' if t == step else ''}")
        lines += [f"  {name:11s} {_row(columns[name][t])}" for name in columns]
    return "\n".join(lines)


def _describe_step(dump: dict[str, Any], steps: int) -> str:
    """Of an optimiser's step."""
    lines = [
        f"environment {dump['env']!r}: optimiser "
        f"step{' of ' * bool(dump['optimizer'])}{dump['optimizer']} left out at minibatch "
        f"{dump['minibatch']} of {dump['minibatches']} of iteration {dump['iteration']}, which "
        f"ended at env step {steps}; "
        f"{dump['skipped']} such steps since the last look",
        f"weights that are not finite: {dump['weights'] or 'none'}",
    ]
    lines += [
        f"loss {name:32s} {value:.6g}"
        for name, value in zip(dump["loss_names"], dump["losses"].tolist())
    ]
    lines.append(f"{'parameter':44s} {'norm':>12s} {'gradient':>12s}   not finite")
    columns = (
        dump[name].tolist() for name in ("parameter_norms", "gradient_norms", "gradient_not_finite")
    )
    for name, own, of_gradient, count in zip(dump["parameters"], *columns):
        lines.append(f"{name:44s} {own:12.6g} {of_gradient:12.6g}   {count or ''}".rstrip())
    return "\n".join(lines)


def _row(value: Tensor) -> str:
    """The first numbers, and where those are that are not finite."""
    if value.dtype == torch.bool:
        return str(bool(value))
    flat = value.flatten().double()
    shown: list[Any] = [f"{number:.6g}" for number in flat[:SHOWN].tolist()]
    text = (
        shown[0]
        if value.dim() == 0
        else f"[{', '.join(shown)}{', ...' if len(flat) > SHOWN else ''}]"
    )
    bad = (~flat.isfinite()).nonzero().flatten().tolist()
    return text + (
        f"   not finite: {len(bad)} of {len(flat)}, at {', '.join(map(str, bad[:10]))}"
        if bad and value.dim()
        else ""
    )
