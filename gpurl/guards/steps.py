"""Names the optimiser steps that were left out because a gradient or a loss was not finite, and
weights that are not; no host sync.

The optimisers count on the device and keep what the first such step had
(`gpurl.kernels.adam.SkippedSteps`). The host looks after each iteration on a CPU, which costs it a
number an optimiser, and on a GPU with the next log entry.
"""

from typing import Any

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm
from gpurl.errors import DivergedError
from gpurl.kernels.adam import COUNTS
from gpurl.kernels.backend import host_sync_is_free
from gpurl.nn.optimizer import FlatAdam

MIN_IN_A_ROW = (
    8  # left out until a run counts as diverged; more where an iteration takes more steps
)
NAMED = 3
ADVICE = "a lower learning_rate, a max_grad_norm or smaller rewards may help"


class StepGuard:
    """Of the optimisers of `algorithm`. A step that is left out is told once; many in a row, or
    weights with NaN, end the run.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm, self.optimizers = algorithm, algorithm.all_optimizers()
        self.total = 0  # left out by this process
        self.iteration = 0  # at the last look
        self.asked = dict.fromkeys(self.optimizers, 0)  # steps until then
        looks = host_sync_is_free(algorithm.device)
        self.counts = (
            {name: optimizer.skipped.counts.numpy() for name, optimizer in self.optimizers.items()}
            if looks
            else {}
        )

    def begin(self, iteration: int) -> None:
        """Count from here."""
        self.iteration, self.asked = iteration, dict.fromkeys(self.optimizers, 0)
        for optimizer in self.optimizers.values():
            optimizer.skipped.counts.zero_()

    def sees_any(self, iteration: int) -> bool:
        """Whether steps of this iteration were left out, for a host that may look; where none was,
        what comes is counted from here.
        """
        if any(counts[1] for counts in self.counts.values()):
            return True
        self.iteration, self.asked = (
            iteration,
            {name: int(counts[0]) for name, counts in self.counts.items()},
        )
        return False

    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors for the host."""
        counts = {
            name: optimizer.skipped.counts.clone().unbind()
            for name, optimizer in self.optimizers.items()
        }
        return {
            f"{field} of {name}": number
            for name, numbers in counts.items()
            for field, number in zip(COUNTS, numbers)
        }

    def report(self, values: dict[str, float], iteration: int, env: str, stop: bool) -> list[str]:
        """What to warn of, now that `metrics()` are on the host; DivergedError where there is
        nothing left to learn with.

        That is where weights are not finite, and if `stop` where all steps of an iteration, and
        MIN_IN_A_ROW, were left out. The error's `evidence` is what a dump of it holds.
        """
        notes = []
        for name, optimizer in self.optimizers.items():
            asked, skipped, _, longest, first = (
                int(values[f"{field} of {name}"]) for field in COUNTS
            )
            since = max(asked - self.asked[name], 1)
            each = -(-since // max(iteration - self.iteration, 1))  # steps an iteration
            if skipped:
                later, number = divmod(max(first - self.asked[name] - 1, 0), each)
                at = {
                    "iteration": self.iteration + 1 + later,
                    "minibatch": number + 1,
                    "minibatches": each,
                    "skipped": skipped,
                }
                told = self._tell(
                    name,
                    optimizer,
                    {"env": env, **at},
                    longest if stop and longest >= max(each, MIN_IN_A_ROW) else 0,
                )
                notes += [] if self.total else [told]
                self.total += skipped
                for count in (1, 3, 4):
                    optimizer.skipped.counts[count] = 0
            self.asked[name] = asked
        self.iteration = iteration
        return notes

    def _tell(self, name: str, optimizer: FlatAdam, where: dict[str, Any], longest: int) -> str:
        """longest: how many in a row, where they end the run."""
        found, what = _evidence(name, optimizer)
        weights = self.bad_weights()
        at = "minibatch {minibatch} of {minibatches} of iteration {iteration}".format(**where)
        if not (longest or weights):
            return (
                f"{where['skipped']} optimiser steps were left out, first at {at}: {what}. The "
                f"weights are as before, train/skipped_steps "
                f"counts them; {ADVICE}"
            )
        if weights:
            cause = f"the weights are not finite: {weights}. First seen at {at}: {what}"
        else:
            cause = (
                f"{longest} optimiser steps in a row were left out, at {at}: {what}; the weights "
                f"are finite, {ADVICE}"
            )
        error = DivergedError(cause)
        error.evidence = {**where, "optimizer": name, **found, "weights": weights}
        raise error

    def bad_weights(self) -> str:
        """The tensors of the policy, its targets and normalisers that are not finite, in words;
        nothing where all are. The host looks.
        """
        tensors = {
            name: value
            for name, value in self.algorithm.state_dict().items()
            if value.is_floating_point()
        }
        if not tensors or bool(
            torch.stack([value.isfinite().all() for value in tensors.values()]).all()
        ):
            return ""
        return _listed(
            {name: (~value.isfinite()).sum() for name, value in tensors.items()}, tensors
        )


def _evidence(name: str, optimizer: FlatAdam) -> tuple[dict[str, Any], str]:
    """(names and norms of the first step that was left out, what was not finite in words)."""
    prefix = f"{name}." if name else ""
    gradients = {
        prefix + key: part for key, part in optimizer.parts_of(optimizer.skipped.gradient).items()
    }
    parameters = optimizer.parts_of(optimizer.flat)
    bad = {key: (~part.isfinite()).sum() for key, part in gradients.items()}
    losses = dict(zip(optimizer.losses, optimizer.skipped.losses.tolist()))
    causes = [f"the loss {key} is {value}" for key, value in losses.items() if value - value != 0.0]
    if listed := _listed(bad, gradients):
        causes.append(f"the gradient of {listed} is not finite")
    if not causes:
        norm = torch.linalg.vector_norm(optimizer.skipped.gradient, dtype=torch.float64)
        causes.append(f"the gradient's norm is {float(norm):.3g}")
    norms = [
        torch.stack([torch.linalg.vector_norm(part).cpu() for part in parts.values()])
        for parts in (gradients, parameters)
    ]
    found = {
        "loss_names": list(losses),
        "losses": optimizer.skipped.losses[: len(losses)].cpu().clone(),
        "parameters": list(gradients),
        "gradient_norms": norms[0],
        "gradient_not_finite": torch.stack([count.cpu() for count in bad.values()]),
        "parameter_norms": norms[1],
    }
    return found, " and ".join(causes)


def _listed(bad: dict[str, Tensor], tensors: dict[str, Tensor]) -> str:
    """The first names, how many of their numbers are bad, and how many names more."""
    counts = {name: int(count) for name, count in bad.items() if count}
    shown = [
        f"{name} ({counts[name]} of {tensors[name].numel()} numbers)"
        for name in list(counts)[:NAMED]
    ]
    return ", ".join(shown) + (
        f" and {len(counts) - NAMED} tensors more" if len(counts) > NAMED else ""
    )
