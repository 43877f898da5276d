"""Greedy evaluation in environments of their own: every environment counts its first episodes only,
so short ones are not favoured.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm, episode_ends, restart_policy_state
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import EndlessEpisodeError, NonFiniteError
from gpurl.guards.contract import reset_env, step_env
from gpurl.nn.networks import PolicyState
from gpurl.run.settings import Settings

Act = Callable[[Tensor, PolicyState], tuple[Tensor, PolicyState]]
EVAL_SEED = 1_000_003  # evaluations play the same episodes every time, and never the training's
LOOK_EVERY = 16  # steps between looks at whether all are done, each a host sync


def greedy(algorithm: Algorithm) -> Act:
    """The algorithm's policy without exploration."""

    def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        decision = algorithm.act(obs, policy_state, explore=False)
        return decision.action, decision.policy_state

    return act


def scripted(env: VecEnv) -> Act | None:
    """The environment's own baseline, where it has one."""
    function: Any = getattr(env, "scripted_action", None)
    return None if function is None else lambda obs, policy_state: (function(obs), policy_state)


class Stopped(Exception):
    """The evaluation was left because `should_stop` said so."""


def evaluate(
    act: Act,
    env: VecEnv,
    episodes: int,
    policy_state: PolicyState = (),
    seed: int = 0,
    max_steps: int = 20_000,
    should_stop: Callable[[], object] = bool,
) -> dict[str, float]:
    """Play `episodes` episodes (rounded up to a multiple of env.num_envs) and return their
    statistics, named as they are logged.

    Episodes whose return is NaN or infinite are counted apart, as eval/non_finite_episodes, and
    left out of the rest; without any other the mean is NaN. Raises EndlessEpisodeError when not all
    end within `max_steps` steps an episode.
    """
    wanted = -(-episodes // env.num_envs)
    obs = reset_env(env, seed)
    finished = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
    sums = torch.zeros(
        5, dtype=torch.float64, device=env.device
    )  # finite ones, returns, squared returns, lengths; the others
    for step in range(max_steps * wanted):
        if should_stop():
            raise Stopped
        action, policy_state = act(obs, policy_state)
        timestep = step_env(env, action)
        obs, info = timestep.obs, timestep.info
        policy_state = restart_policy_state(policy_state, episode_ends(timestep))
        counts = info["_episode"] & (finished < wanted)
        returns, lengths = info["episode"]["r"].double(), info["episode"]["l"].double()
        is_finite = returns.isfinite()
        rows = torch.stack((is_finite, returns, returns.square(), lengths, ~is_finite))
        rows[:4] = torch.where(is_finite, rows[:4], 0.0)
        sums += torch.where(counts, rows, 0.0).sum(1)
        finished += counts
        if step % LOOK_EVERY == LOOK_EVERY - 1 and bool((finished >= wanted).all()):
            break
    else:
        late = int((finished < wanted).sum())
        raise EndlessEpisodeError(
            f"{type(env).__name__}: episodes of {late} of {env.num_envs} environments did not end "
            f"in {max_steps} steps; "
            "a time limit (max_episode_steps) ends them"
        )
    count, total, squares, length, non_finite = sums.tolist()
    divisor = count or math.nan
    mean = total / divisor
    deviation = max(squares / divisor - mean * mean, 0.0) ** 0.5
    values = {
        "eval/mean_reward": mean,
        "eval/std_reward": deviation,
        "eval/mean_ep_length": length / divisor,
        "eval/episodes": count,
    }
    return values | ({"eval/non_finite_episodes": non_finite} if non_finite else {})


class Evaluations:
    """Those of a run: when the next one is due, what the last one gave, and the best return."""

    def __init__(self, settings: Settings, env: VecEnv | None) -> None:
        """env: for evaluation only; None where there is none."""
        config = settings.train
        self.env, self.name, self.episodes = env, settings.env, config.eval_episodes
        self.raises = config.nan == "raise"  # at NaN
        self.every = config.eval_every or max(config.total_steps // 10, 1)  # env steps
        self.next_at, self.last_at = self.every, -1
        self.newest: dict[str, float] = {}
        self.is_new = False  # whether the newest is of this process
        self.is_best = False  # of all, the newest
        self.has_ended = False  # no more: episodes do not end
        self.best_return = float("-inf")
        self.warnings: list[str] = []  # for the user, until somebody takes them

    def play(
        self, algorithm: Algorithm, steps: int, should_stop: Callable[[], object]
    ) -> dict[str, float]:
        """Evaluate at env step `steps`; the values to log, {} where there are none."""
        self.next_at, self.is_best = (steps // self.every + 1) * self.every, False
        if self.env is None or not self.episodes:
            return {}
        self.last_at = steps
        policy_state = algorithm.initial_policy_state(self.env.num_envs)
        act = greedy(algorithm)
        try:
            values = evaluate(
                act, self.env, self.episodes, policy_state, EVAL_SEED, should_stop=should_stop
            )
        except EndlessEpisodeError as error:
            self.warnings.append(f"no more evaluations: {error}")
            self.env, self.has_ended = None, True
            return {}
        self._look_at_non_finite(values.get("eval/non_finite_episodes", 0.0))
        if not values["eval/episodes"]:
            return {}
        self.newest, self.is_new = {**values, "at_step": steps}, True
        self.is_best = values["eval/mean_reward"] > self.best_return
        self.best_return = max(self.best_return, values["eval/mean_reward"])
        return values

    def _look_at_non_finite(self, episodes: float) -> None:
        """NonFiniteError or a warning where episodes gave NaN."""
        if not episodes:
            return
        text = (
            f"{episodes:.0f} evaluation episodes of environment {self.name!r} gave NaN or infinity"
        )
        if self.raises:
            raise NonFiniteError(
                f"{text}; to leave such episodes out and go on: gpurl train --resume RUN --nan "
                "reset-envs"
            )
        self.warnings.append(f"{text} and are left out")

    def state_dict(self) -> dict[str, Any]:
        """The newest values and the best return."""
        return {"best_return": self.best_return, "evaluation": dict(self.newest)}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Continue from `state_dict()`, at env step `steps`."""
        self.best_return, self.newest = state["best_return"], dict(state["evaluation"])
        self.last_at = int(self.newest.get("at_step", -1))
        self.next_at = (steps // self.every + 1) * self.every
