"""A new run begins with the actor, the critics and the normalisers of another one, as far as they
fit (`init_from`).
"""

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm
from gpurl.errors import UsageError
from gpurl.nn.parts import ActorPart, Deviation, Part

MEANS = {"clipped", "squashed"}  # actions of these kinds are means, which fit each other


@torch.no_grad()
def take_parts(algorithm: Algorithm, source: Algorithm, label: str) -> list[str]:
    """Copy the parts of `source` that fit into `algorithm` and its target networks. Returns a line
    for what was taken, and one for each part that was not.

    label: where `source` is from. UsageError if no part fits.
    """
    theirs, ours = source.parts(), algorithm.parts()
    taken, notes = list[str](), list[str]()
    misfit = _normalizer_misfit(algorithm, source)
    for name in ours:
        if name not in theirs:
            problem = f"that run has none, only {', '.join(theirs)}"
        elif misfit and name != "temperature":
            problem = "; ".join(filter(None, (misfit, _misfit(ours[name], theirs[name]))))
        else:
            problem = _take(ours[name], theirs[name], taken, notes, algorithm)
        if problem:
            notes.append(f"{name} not taken: {problem}")
        else:
            taken.append(name)
    unknown = sorted(theirs.keys() - ours.keys())
    notes += [f"{name} of that run not taken: this one has none" for name in unknown]
    if not set(taken) - {"temperature"}:
        raise UsageError(
            f"init_from {label} does not fit: {'; '.join(notes)}. Give this run the networks "
            f"and the reward_scale of that one, which its config.yaml has, or another run"
        )
    algorithm.actor_is_transferred = "actor" in taken
    if algorithm.normalizer is not None:
        taken.append(_take_normalizer(algorithm, source))
    for optimizer in algorithm.optimizers.values():
        optimizer.copy_to_target()
    return [f"began with {', '.join(taken)} of {label}", *notes]


def _take(
    ours: Part, theirs: Part, taken: list[str], notes: list[str], algorithm: Algorithm
) -> str:
    """Copy a part; returns why it does not fit, or "". taken: names so far; notes: for the user."""
    if problem := _misfit(ours, theirs):
        return problem
    if ours.needs_actor and "actor" not in taken:
        return "it reads features of the actor, which was not taken"
    if isinstance(ours, ActorPart) and isinstance(theirs, ActorPart):
        _take_last_layer(ours, theirs, notes, algorithm)
    _copy(ours.tensors, theirs.tensors)
    return ""


def _misfit(ours: Part, theirs: Part) -> str:
    """Why two parts of one name do not fit, or ""."""
    if ours.form != theirs.form:
        return f"there {_listed(theirs.form)}; here {_listed(ours.form)}"
    pairs = list(zip(ours.tensors, theirs.tensors))
    if isinstance(ours, ActorPart) != isinstance(theirs, ActorPart):
        return "its last layer is of another kind"
    if isinstance(ours, ActorPart) and isinstance(theirs, ActorPart):
        kinds = {ours.actions, theirs.actions}
        if len(kinds) > 1 and not kinds <= MEANS:
            return f"its last layer gives {theirs.actions}, wanted {ours.actions}"
        pairs += [(ours.weight, theirs.weight), (ours.bias, theirs.bias)]
    for one, other in pairs:
        if one.shape != other.shape:
            return f"it has weights of shape {tuple(other.shape)}, wanted {tuple(one.shape)}"
    return ""


def _listed(form: tuple[str, ...]) -> str:
    return ", ".join(form) or "without layers"


def _take_last_layer(
    ours: ActorPart, theirs: ActorPart, notes: list[str], algorithm: Algorithm
) -> None:
    """Copy what gives actions, and the standard deviation as far as both know one; `notes` get what
    does not carry over.
    """
    _copy((ours.weight, ours.bias), (theirs.weight, theirs.bias))
    if ours.actions != theirs.actions:
        notes.append(
            f"the actions of that run are {theirs.actions}, these are {ours.actions}: large ones "
            f"differ"
        )
    if ours.std is None:
        return
    if getattr(algorithm.config, "reset_std", False):
        notes.append("standard deviation reset to initial_std")
    elif problem := _take_deviation(ours.std, theirs.std):
        notes.append(f"standard deviation not taken: {problem}; it is that of a new actor")


def _take_deviation(ours: Deviation, theirs: Deviation | None) -> str:
    """Copy a standard deviation; returns why it does not fit, or ""."""
    if theirs is None:
        return "that run has none"
    target, given = ours.values, theirs.values
    if isinstance(given, Tensor):
        # the same for all observations, whatever it is kept as
        values = theirs.offset + given
        if ours.is_log != theirs.is_log:
            values = values.log() if ours.is_log else values.exp()
        values = values - ours.offset
        if isinstance(target, Tensor):
            target.copy_(values)
        else:
            target[0].zero_()
            target[1].copy_(values.view_as(target[1]))
        return ""
    if isinstance(target, Tensor):
        return "that of the run depends on the observation"
    if ours.is_log != theirs.is_log:
        return "the network gives its logarithm in only one of the runs"
    _copy(target, given)
    target[1].add_(theirs.offset - ours.offset)
    return ""


def _normalizer_misfit(algorithm: Algorithm, source: Algorithm) -> str:
    """Why networks that read what `source` normalised would read something else here, or ""."""
    if source.normalizer is None and algorithm.normalizer is None:
        return ""
    if source.normalizer is not None and algorithm.normalizer is not None:
        counts = source.num_inputs, algorithm.num_inputs
        if counts[0] == counts[1]:
            return ""
        return f"that run has observations of {counts[0]} numbers, this one of {counts[1]}"
    theirs = source.normalizer is not None
    return (
        f"that run has normalize_obs {theirs}, this one {not theirs}: set normalize_obs to {theirs}"
    )


def _take_normalizer(algorithm: Algorithm, source: Algorithm) -> str:
    """Copy the statistics of the observations, and of privileged ones that both know; returns what
    was taken.
    """
    ours, theirs = algorithm.normalizer, source.normalizer
    assert ours is not None
    assert theirs is not None
    if len(ours.mean) == len(theirs.mean):
        _copy(tuple(ours.state_dict().values()), tuple(theirs.state_dict().values()))
        return "normaliser"
    count = algorithm.num_inputs
    for name in ("mean", "variance", "shift", "inv_std"):
        getattr(ours, name)[:count].copy_(getattr(theirs, name)[:count])
    # as much as what is collected before the first update: other columns are still to be measured
    collected = max(algorithm.num_envs * algorithm.config.horizon, algorithm.learning_starts)
    ours.count.copy_(theirs.count.clamp(max=float(collected)))
    ours.measure_anew(count)
    return "normaliser of the observations"


def _copy(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        one.copy_(other)
