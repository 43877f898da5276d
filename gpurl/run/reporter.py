"""What a run reports while it trains: log entries, notes and warnings. Each log entry takes one
transfer from the device."""

import math
import time

from torch import Tensor

from gpurl.algorithms.base import Metrics
from gpurl.algorithms.off_policy import CriticConfig, OffPolicyConfig
from gpurl.algorithms.sac import SAC
from gpurl.engine.eager import Eager
from gpurl.engine.statistics import to_host
from gpurl.guards.space import SpaceGuard
from gpurl.run.callbacks import RunView
from gpurl.run.display import Display, counted
from gpurl.run.gpu_figures import GpuFigures
from gpurl.run.logger import Logger

# with fewer updates no task here was learned
FEW_UPDATES = 1500


class Reporter:
    """Writes log entries to the files and the screen, at most one per `log_every` seconds."""

    def __init__(
        self,
        engine: Eager,
        view: RunView,
        logger: Logger | None,
        display: Display,
        log_every: float,
    ) -> None:
        """logger: None on ranks that write nothing."""
        self.engine = engine
        self.view = view
        self.logger = logger
        self.display = display
        self.log_every = log_every
        self.last_log = time.monotonic()
        self.logged_steps = engine.steps
        self._gpu_figures = GpuFigures(engine.env.device)
        self._space = SpaceGuard(engine.guards.env_name, engine.env)
        self._warned_of: set[str] = set()

    def begin(self, total_steps: int, remaining_steps: int) -> None:
        """Say how many updates will follow. Warn if they are few, if one iteration is longer than
        the whole run, or if the run ends before its replay buffer holds enough to learn from.
        remaining_steps: of whole iterations.
        """
        # one iteration is the whole run
        engine = self.engine
        horizon = engine.buffer.horizon
        num_envs = engine.num_envs
        if remaining_steps and horizon * num_envs > total_steps:
            self.display.warn(
                f"one iteration is {horizon * num_envs:,} steps (num_envs {num_envs:,} x horizon "
                f"{horizon:,}), more than total_steps {total_steps:,}: the run ends after it"
            )
        # the updates
        if remaining_steps and isinstance(config := engine.algorithm.config, OffPolicyConfig):
            self._announce_updates(config, horizon * num_envs, remaining_steps)
        # the replay buffer is not full enough
        learning_starts = engine.algorithm.learning_starts
        if not remaining_steps or engine.stored >= learning_starts:
            return
        if engine.stored + remaining_steps < learning_starts:
            self.display.warn(
                f"nothing will be learned: the replay buffer holds {engine.stored} transitions and "
                f"{remaining_steps} will follow, learning_starts is {learning_starts}"
            )
        elif engine.steps and not engine.stored:
            self.display.note(
                f"the replay buffer was not saved (save_replay would save it): learning continues "
                f"after {learning_starts} new transitions"
            )

    def _announce_updates(
        self, config: OffPolicyConfig, rollout: int, remaining_steps: int
    ) -> None:
        """rollout: steps of all environments in an iteration."""
        # the iteration that fills the replay buffer learns, those before it do not
        missing = self.engine.algorithm.learning_starts - self.engine.stored
        without = max(-(-missing // rollout) - 1, 0)
        updates = max(remaining_steps // rollout - without, 0) * config.updates
        self.display.note(
            f"{counted(updates, 'update')} on batches of "
            f"{config.batch_size * self.engine.ranks.count:,}, "
            f"{config.updates / rollout:.2g} for each step of an environment"
        )
        if 0 < updates < FEW_UPDATES:
            self.display.warn(
                f"{updates:,} updates are few to learn from: a run with more total_steps, with "
                f"more updates after a step (updates is {config.updates}) or with fewer "
                f"environments (num_envs is {self.engine.num_envs:,}) has more of them"
            )

    def is_due(self, is_last: bool) -> bool:
        """Whether to log: it is time to, or this is the last iteration."""
        return is_last or time.monotonic() - self.last_log >= self.log_every

    def after_iteration(self, metrics: Metrics, elapsed: float, logs: bool) -> None:
        """Show new notes and warnings; write a log entry if `logs`. elapsed: seconds of training,
        over all resumes.
        """
        notes = self.engine.notes
        while notes:
            self.display.note(notes.pop(0))
        while self.engine.events:
            self.write(self.engine.events.pop(0))
        if logs:
            seconds = time.monotonic() - self.last_log
            self.last_log += seconds
            self._log(metrics, elapsed, seconds)
        self.warn(self.engine.guards.warnings)

    def _log(self, metrics: Metrics, elapsed: float, seconds: float) -> None:
        """One log entry; `seconds` after the one before."""
        engine = self.engine
        # bring all that is on the device to the host in one transfer
        episodes = engine.statistics.metrics()
        guards = engine.guards.metrics()
        outside = self._space.metrics(engine.obs)
        own = self.view.logged
        self.view.logged = {}
        own_tensors = {f"callback {name}": x for name, x in own.items() if isinstance(x, Tensor)}
        values = to_host(metrics | episodes | guards | outside | own_tensors)
        own_values = {name: values.pop(f"callback {name}", x) for name, x in own.items()}
        # what the guards have counted may end the run
        guard_values = {name: values.pop(name) for name in guards}
        values |= engine.guards.report(guard_values, engine.iteration)
        self.warn(self._space.report({name: values.pop(name) for name in outside}))
        # episodes and times since the last entry
        episode_values = {name: values.pop(name) for name in episodes}
        episode_values |= engine.statistics.host_metrics()
        values, episode_values = self._of_all_ranks(values, episode_values)
        values |= engine.statistics.read(episode_values, engine.steps)
        if values.get("rollout/valid_fraction") == 0:
            self._warn_once(
                "transitions",
                f"nothing was learned in the last {engine.steps - self.logged_steps:,} steps: the "
                f"environments marked each of them as no transition (info['valid'] is False), as "
                f"if every step were a reset",
            )
        self._warn_of_temperature(values)
        self._warn_of_atoms(values)
        phases = {"collect": 0.0, "update": 0.0} | engine.stopwatch.read()
        phases.pop("other", None)
        values |= {f"time/{phase}_seconds": spent for phase, spent in phases.items()}
        values |= {
            # of all members of a population
            "time/fps": len(engine.members)
            * (engine.steps - self.logged_steps)
            / max(seconds, 1e-9),
            "time/iterations": float(engine.iteration),
            "time/total_timesteps": float(engine.steps),
            "time/time_elapsed": elapsed,
        }
        self.logged_steps = engine.steps
        values |= self._gpu_figures.read()
        self.write(values | {name: float(x) for name, x in own_values.items()})

    def _warn_once(self, subject: str, text: str) -> None:
        """Warn unless there was a warning of `subject`; the numbers in its text may be others."""
        if subject not in self._warned_of:
            self._warned_of.add(subject)
            self.display.warn(text)

    def _warn_of_temperature(self, values: dict[str, float]) -> None:
        """Warn if a learned temperature is as high as it may be."""
        algorithm = self.engine.algorithm
        if not isinstance(algorithm, SAC):
            return
        highest = math.exp(algorithm.log_temperature_limits[1])
        is_learned = algorithm.config.temperature is None
        if is_learned and values.get("train/ent_coef", 0.0) > 0.99 * highest:
            self._warn_once(
                "temperature",
                f"the temperature has reached its limit {highest:.2g}, and the entropy of the "
                f"policy is still below target_entropy {algorithm.target_entropy:.3g}: give a "
                f"lower one, or a fixed temperature",
            )

    def _warn_of_atoms(self, values: dict[str, float]) -> None:
        """Warn if the newest episodes have returns that no distribution of the critics holds:
        by the mean reward of a step over as many steps as an episode has.
        """
        config = self.engine.algorithm.config
        if not isinstance(config, CriticConfig) or not config.atoms:
            return
        if getattr(config, "normalize_rewards", False):
            return  # which keeps returns within them
        if len(self.engine.members) > 1:
            return  # each may have its own discount and scale, the returns are of all
        episode_return = values.get("rollout/ep_rew_mean", math.nan)
        length = values.get("rollout/ep_len_mean", math.nan)
        if not (math.isfinite(episode_return) and length >= 1):
            return
        steps = length if config.gamma == 1 else (1 - config.gamma**length) / (1 - config.gamma)
        value = episode_return / length * steps * config.reward_scale
        margin = 0.1 * (config.v_max - config.v_min)
        if not config.v_min - margin <= value <= config.v_max + margin:
            self._warn_once(
                "atoms",
                f"episodes have a mean return of {episode_return:.4g}, discounted and scaled about "
                f"{value:.4g}, but critics give values from v_min {config.v_min:g} to v_max "
                f"{config.v_max:g} only: set --v-min and --v-max so that all returns are within",
            )

    def _of_all_ranks(
        self, values: dict[str, float], sums: dict[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """(means of `values` over the ranks that have them, `sums` over all ranks)."""
        ranks = self.engine.ranks
        if ranks.count == 1:
            return values, sums
        all_values, all_sums = zip(*ranks.share([values, sums]))
        means = {}
        for name in {name: None for each in all_values for name in each}:
            present = [each[name] for each in all_values if name in each]
            is_count = name == "rollout/non_finite_rows"
            means[name] = sum(present) / (1 if is_count else len(present))
        names = {name: None for each in all_sums for name in each}
        return means, {name: sum(each.get(name, 0.0) for each in all_sums) for name in names}

    def write(self, values: dict[str, float]) -> None:
        """Log host numbers by their tags at the present env step."""
        if self.logger is None:
            return
        self.logger.write(self.engine.steps, values)
        self.display.update(self.engine.steps, values)

    def warn(self, warnings: list[str]) -> None:
        """Show `warnings` and empty the list."""
        while warnings:
            self.display.warn(warnings.pop(0))
