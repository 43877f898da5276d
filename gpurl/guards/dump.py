"""A dump of NaN or infinity, which `gpurl doctor` describes: the rollout of the first environment
that gave one, or an optimiser step that was skipped.
"""

from pathlib import Path

import torch
from torch import Tensor

from gpurl.checkpoints.folders import check_exists, load_checkpoint, save_checkpoint
from gpurl.checkpoints.state_files import State
from gpurl.errors import CheckpointError, NonFiniteError, visible

STEPS_BEFORE = 3  # steps to show before the bad one
MAX_SHOWN = 6  # numbers of a vector
MAX_PLACES = 10  # of numbers that are not finite


def write_dump(run_folder: Path, steps: int, error: NonFiniteError) -> Path | None:
    """Write the error's evidence into the run folder; None if it has none or if that fails: a full
    disk must not hide the error itself.
    """
    if error.evidence is None:
        return None
    try:
        return save_checkpoint(run_folder / "non_finite", steps, {"dump": error.evidence})
    except CheckpointError:
        return None


def describe_dump(path: Path) -> str:
    """The dump `path` as text; UsageError if there is nothing, CheckpointError if it is no dump."""
    check_exists(path)
    parts, manifest = load_checkpoint(path)
    if "dump" not in parts:
        raise CheckpointError(
            f"{path} is a checkpoint of a run, not a dump of NaN; dumps are in non_finite/ of a "
            f"run folder"
        )
    dump = parts["dump"]
    describe = _describe_step if "optimizer" in dump else _describe_rollout
    try:
        return visible(describe(dump, manifest["step"]), lines=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} is no dump of NaN that this version can read: {type(error).__name__}: {error}"
        ) from None


def _describe_rollout(dump: State, steps: int) -> str:
    """The steps of an environment around its first NaN."""
    # what was bad, and where
    columns: dict[str, Tensor] = dump["columns"]
    step = int(dump["step"])
    horizon = len(next(iter(columns.values())))
    lines = [
        f"environment {dump['env']!r}, number {dump['index']}: NaN or infinity at step {step} of "
        f"{horizon} of the rollout of iteration {dump['iteration']}, which ended at env step "
        f"{steps}; {dump['rows']} such rows in total",
        f"first in: {', '.join(dump['keys']) or 'obs of the next step'}",
    ]
    if dump.get("weights"):
        lines.append(f"weights that are not finite: {dump['weights']}")
    # the steps around it
    for t in range(max(step - STEPS_BEFORE, 0), min(step + 2, horizon)):
        lines.append(f"step {t}{' <- here' if t == step else ''}")
        lines += [f"  {name:11s} {_describe_value(columns[name][t])}" for name in columns]
    return "\n".join(lines)


def _describe_step(dump: State, steps: int) -> str:
    """Losses, parameters and gradients of an optimiser's step."""
    lines = [
        f"environment {dump['env']!r}: optimiser step of {dump['optimizer']} skipped at "
        f"minibatch {dump['minibatch']} of {dump['minibatches']} of iteration {dump['iteration']}, "
        f"which ended at env step {steps}; {dump['skipped']} such steps since the last report",
        f"weights that are not finite: {dump['weights'] or 'none'}",
    ]
    # losses
    for name, value in zip(dump["loss_names"], dump["losses"].tolist()):
        lines.append(f"loss {name:32s} {value:.6g}")
    # parameters and their gradients
    lines.append(f"{'parameter':44s} {'norm':>12s} {'gradient':>12s}   not finite")
    for name, norm, gradient_norm, count in zip(
        dump["parameters"],
        dump["parameter_norms"].tolist(),
        dump["gradient_norms"].tolist(),
        dump["gradient_not_finite"].tolist(),
    ):
        lines.append(f"{name:44s} {norm:12.6g} {gradient_norm:12.6g}   {count or ''}".rstrip())
    return "\n".join(lines)


def _describe_value(value: Tensor) -> str:
    """The first numbers, and the positions of those that are not finite."""
    if value.dtype == torch.bool:
        return str(bool(value))
    flat = value.flatten().double()
    shown = [f"{number:.6g}" for number in flat[:MAX_SHOWN].tolist()]
    if value.dim() == 0:
        return shown[0]
    text = f"[{', '.join(shown)}{', ...' if len(flat) > MAX_SHOWN else ''}]"
    bad = (~flat.isfinite()).nonzero().flatten().tolist()
    if bad:
        places = ", ".join(map(str, bad[:MAX_PLACES]))
        text += f"   not finite: {len(bad)} of {len(flat)}, at {places}"
    return text
