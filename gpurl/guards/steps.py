"""Reports optimiser steps skipped because a gradient or a loss was not finite, and weights that are
not finite; no host sync.

The optimisers count on the device and keep what the first such step had
(`gpurl.kernels.adam.SkippedSteps`). On a CPU the host reads the counts after each iteration, one
number an optimiser, and on a GPU with the next log entry.
"""

import math

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm
from gpurl.checkpoints.state_files import State
from gpurl.errors import DivergedError
from gpurl.kernels.adam import COUNTS
from gpurl.kernels.backend import host_sync_is_free
from gpurl.nn.optimizer import FlatAdam

MIN_IN_A_ROW = 8  # skipped steps until a run counts as diverged, or all of an iteration with more
MAX_NAMED = 3
ADVICE = "a lower learning_rate, a max_grad_norm or smaller rewards may help"


class StepGuard:
    """Checks the optimisers of `algorithm`. Skipped steps give one warning; many in a row, or
    weights with NaN, end the run.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.optimizers = algorithm.optimizers
        # 0-d, True of buffers that are infinite from the start, such as a causal mask of -inf
        self.began_infinite = {
            name: each.isinf().any()
            for name, each in algorithm.named_buffers()
            if each.is_floating_point()
        }
        self.total = 0  # steps skipped by this process
        # at the last report: the iteration, and the steps of each optimiser until then
        self.iteration = 0
        self.steps = dict.fromkeys(self.optimizers, 0)
        self.find_counts()

    def find_counts(self) -> None:
        """Set the counts as numpy arrays, which the host reads faster: again after the tensors have
        moved.
        """
        self.counts = {
            name: optimizer.skipped.counts.numpy()
            for name, optimizer in self.optimizers.items()
            if host_sync_is_free(self.algorithm.device)
        }

    def begin(self, iteration: int) -> None:
        """Count from this iteration on."""
        self.iteration = iteration
        self.steps = dict.fromkeys(self.optimizers, 0)
        for optimizer in self.optimizers.values():
            optimizer.skipped.counts.zero_()

    def sees_any(self, iteration: int) -> bool:
        """Whether steps of this iteration were skipped, if the host can read the counts. If none
        was, the next report counts from here.
        """
        if any(counts[1] for counts in self.counts.values()):
            return True
        self.iteration = iteration
        self.steps = {name: int(counts[0]) for name, counts in self.counts.items()}
        return False

    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors for the host."""
        metrics: dict[str, Tensor] = {}
        for name, optimizer in self.optimizers.items():
            numbers = optimizer.skipped.counts.clone().unbind()
            metrics |= {f"{count} of {name}": number for count, number in zip(COUNTS, numbers)}
        return metrics

    def report(self, values: dict[str, float], iteration: int, env: str, stop: bool) -> list[str]:
        """Warnings for the user, from `metrics()` on the host.

        DivergedError if weights are not finite, or with `stop` if all steps of an iteration, at
        least MIN_IN_A_ROW, were skipped. The error's `evidence` is what its dump holds.
        """
        warnings = []
        for name, optimizer in self.optimizers.items():
            steps, skipped, _, longest, first = (int(values[f"{key} of {name}"]) for key in COUNTS)
            new_steps = max(steps - self.steps[name], 1)
            per_iteration = -(-new_steps // max(iteration - self.iteration, 1))
            if skipped:
                # the iteration and minibatch of the first one
                later, index = divmod(max(first - self.steps[name] - 1, 0), per_iteration)
                where = {
                    "env": env,
                    "iteration": self.iteration + 1 + later,
                    "minibatch": index + 1,
                    "minibatches": per_iteration,
                    "skipped": skipped,
                }
                # warn or end the run
                is_end = stop and longest >= max(per_iteration, MIN_IN_A_ROW)
                warning = self._explain(name, optimizer, where, longest if is_end else 0)
                warnings += [] if self.total else [warning]
                self.total += skipped
                # start the counts anew, except steps and skipped in a row
                for index in (1, 3, 4):
                    optimizer.skipped.counts[index] = 0
            self.steps[name] = steps
        self.iteration = iteration
        return warnings

    def _explain(self, name: str, optimizer: FlatAdam, where: State, longest: int) -> str:
        """A warning; DivergedError if weights are not finite, or with `longest`, a number of
        skipped steps in a row that ends the run.
        """
        # the optimiser of a part of the policy names weights within that part
        prefix = "" if optimizer.module is self.algorithm else f"{name}."
        evidence, cause = _first_skipped(prefix, optimizer)
        weights = self.bad_weights()
        at = "minibatch {minibatch} of {minibatches} of iteration {iteration}".format(**where)
        if weights:
            text = f"the weights are not finite: {weights}. First seen at {at}: {cause}"
        elif longest:
            text = (
                f"{longest} optimiser steps in a row were skipped, at {at}: {cause}; the weights "
                f"are finite, {ADVICE}"
            )
        else:
            return (
                f"{where['skipped']} optimiser steps were skipped, first at {at}: {cause}. The "
                f"weights are unchanged, train/skipped_steps counts them; {ADVICE}"
            )
        error = DivergedError(text)
        error.evidence = {**where, "optimizer": name, **evidence, "weights": weights}
        raise error

    def bad_weights(self) -> str:
        """A description of the tensors of the policy, its targets and normalisers that are not
        finite; empty if all are finite. A host sync.
        """
        state = self.algorithm.state_dict()
        tensors = {name: value for name, value in state.items() if value.is_floating_point()}
        if not tensors:
            return ""
        is_good = []
        for name, value in tensors.items():
            good = value.isfinite().all()
            if (may_be_infinite := self.began_infinite.get(name)) is not None:
                good |= may_be_infinite & ~value.isnan().any()
            is_good.append(good)
        named = zip(tensors.items(), torch.stack(is_good).tolist())
        return _describe_bad({name: value for (name, value), good in named if not good})


def _first_skipped(prefix: str, optimizer: FlatAdam) -> tuple[State, str]:
    """(names, losses and norms of the first skipped step, what was not finite in words)."""
    # parameters and gradients by name
    parameters = optimizer.parts_of(optimizer.flat)
    parts = optimizer.parts_of(optimizer.skipped.gradient)
    gradients = {prefix + key: part for key, part in parts.items()}
    losses = optimizer.skipped.losses[: len(optimizer.losses)].cpu().clone()
    # what was not finite
    causes = [
        f"the loss {key} is {value}"
        for key, value in zip(optimizer.losses, losses.tolist())
        if not math.isfinite(value)
    ]
    if bad := _describe_bad(gradients):
        causes.append(f"the gradient of {bad} is not finite")
    if not causes:
        norm = torch.linalg.vector_norm(optimizer.skipped.gradient, dtype=torch.float64)
        causes.append(f"the gradient's norm is {float(norm):.3g}")
    evidence = {
        "loss_names": list(optimizer.losses),
        "losses": losses,
        "parameters": list(gradients),
        "gradient_norms": _norms(gradients),
        "gradient_not_finite": torch.stack(
            [(~part.isfinite()).sum().cpu() for part in gradients.values()]
        ),
        "parameter_norms": _norms(parameters),
    }
    return evidence, " and ".join(causes)


def _norms(tensors: dict[str, Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(part).cpu() for part in tensors.values()])


def _describe_bad(tensors: dict[str, Tensor]) -> str:
    """The first tensors that are not finite, how many of their numbers are bad, and how many
    tensors more; empty if all are finite.
    """
    counts = {name: int((~value.isfinite()).sum()) for name, value in tensors.items()}
    bad = [
        f"{name} ({count} of {tensors[name].numel()} numbers)"
        for name, count in counts.items()
        if count
    ]
    more = f" and {len(bad) - MAX_NAMED} tensors more" if len(bad) > MAX_NAMED else ""
    return ", ".join(bad[:MAX_NAMED]) + more
