"""The checks of an iteration as one object: the form of steps, NaN and infinity in a rollout,
skipped optimiser steps."""

from torch import Tensor

from gpurl.algorithms.base import Algorithm
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checkpoints.state_files import State
from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.guards.contract import EnvGuard
from gpurl.guards.finite import FiniteGuard
from gpurl.guards.steps import StepGuard
from gpurl.kernels.backend import host_sync_is_free


class Guards:
    """None of them waits for the device: on a CPU the host reads the results at once, on a GPU with
    the next log entry (`metrics`, then `report`)."""

    def __init__(
        self, env_name: str, algorithm: Algorithm, env: VecEnv, nan: str = "raise"
    ) -> None:
        """nan: as `TrainConfig.nan`."""
        self.env_name = env_name
        self.nan = nan
        self.num_envs = env.num_envs
        self.device = env.device
        num_inputs = algorithm.num_inputs if algorithm.num_state else None
        self.contract = EnvGuard(env)
        groups = algorithm.groups if algorithm.reads_bytes else None
        self.finite = FiniteGuard(env_name, env.device, nan, num_inputs, groups)
        self.steps = StepGuard(algorithm)
        self.warnings: list[str] = []  # for the user, until somebody shows them
        # what the processes that trained this run before have skipped
        self.steps_before = 0
        self.rows_before = 0

    def state_dict(self) -> State:
        """How many optimiser steps and rows the whole run has skipped, as far as reported."""
        return {
            "steps": self.steps_before + self.steps.total,
            "rows": self.rows_before + self.finite.total,
        }

    def load_state_dict(self, state: State) -> None:
        """Go on counting from `state_dict()`."""
        self.steps_before, self.rows_before = int(state["steps"]), int(state["rows"])

    def begin(self, iteration: int) -> None:
        """Count from here: a run continues after this iteration."""
        self.steps.begin(iteration)
        self.finite.begin()

    def bad_weights(self) -> str:
        """A description of weights that are not finite; empty if all are finite. A host sync."""
        return self.steps.bad_weights()

    def after_step(self, timestep: Timestep, before: Tensor | None = None) -> None:
        """EnvError if the step breaks the contract; before: the observations acted on."""
        self.contract.check(timestep, before)

    def after_rollout(self, buffer: RolloutBuffer) -> Tensor | None:
        """Mark rows with NaN or infinity as not valid; returns which environments had any, [N]
        bool, or None if the host knows that none had."""
        return self.finite.clean(buffer)

    def after_learn(self, iteration: int, bad_envs: Tensor | None) -> None:
        """Report at once if a host sync is free."""
        if not host_sync_is_free(self.device):
            return
        if bad_envs is not None:
            env_ids = bad_envs.nonzero().squeeze(1).tolist()
            self._report_rows(_on_host(self.finite.metrics()), iteration, env_ids)
        if self.steps.sees_any(iteration):
            self._report_steps(_on_host(self.steps.metrics()), iteration)

    def metrics(self) -> dict[str, Tensor]:
        """0-d tensors for the host."""
        return self.finite.metrics() | self.steps.metrics()

    def report(self, values: dict[str, float], iteration: int) -> dict[str, float]:
        """The values to log, from `metrics()` on the host; adds to `warnings`.

        NonFiniteError or DivergedError if the run must end.
        """
        self._report_rows(values, iteration, [])
        self._report_steps(values, iteration)
        skipped = self.state_dict()
        logged = {"train/skipped_steps": float(skipped["steps"])}
        if self.nan != "raise":
            logged["rollout/non_finite_rows"] = float(skipped["rows"])
        return logged

    def _report_rows(self, values: dict[str, float], iteration: int, env_ids: list[int]) -> None:
        weights = self.bad_weights() if values["policy_diverged"] else ""
        self.finite.report(values, self.num_envs, iteration, env_ids, weights)

    def _report_steps(self, values: dict[str, float], iteration: int) -> None:
        stop = self.nan == "raise"
        self.warnings += self.steps.report(values, iteration, self.env_name, stop)


def _on_host(metrics: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
