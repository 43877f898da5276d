"""One training of rsl_rl's OnPolicyRunner in a process of its own, in the environment of the peers
or in a Python with mjlab: the same evaluations and rows as gpurl's. It cannot be resumed.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor

from benchmarks.learning import results
from benchmarks.learning.case import Case
from benchmarks.learning.one_run import job_parser
from benchmarks.learning.results import Point
from benchmarks.learning.rsl_rl_cases import MJLAB
from benchmarks.learning.suite import case_named
from gpurl.algorithms.base import PolicyState
from gpurl.envs.registry import make_env
from gpurl.envs.vec_env import VecEnv
from gpurl.run.evaluator import EVAL_SEED, Player


def make_runner(case: Case, seed: int) -> OnPolicyRunner:
    """The runner of a case with its environments."""
    settings: dict[str, Any] = dict(case.settings)
    num_envs = settings.pop("num_envs")
    settings |= {"save_interval": 1_000_000, "seed": seed}
    torch.manual_seed(seed)
    if case.env.startswith(MJLAB):
        return _mjlab_runner(case.env.removeprefix(MJLAB), num_envs, seed, settings)
    from gpurl.adapters import to_rsl_rl

    env = to_rsl_rl(make_env(case.env, num_envs, "cpu", seed))
    return OnPolicyRunner(env, settings, log_dir=None, device="cpu")


def _mjlab_runner(task: str, num_envs: int, seed: int, settings: dict[str, Any]) -> OnPolicyRunner:
    """As mjlab's own `train` makes it."""
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.rl import MjlabOnPolicyRunner, RslRlVecEnvWrapper
    from mjlab.tasks.registry import load_env_cfg

    config = load_env_cfg(task)
    config.scene.num_envs = num_envs
    config.seed = seed
    env = RslRlVecEnvWrapper(ManagerBasedRlEnv(config, device="cpu"))
    settings["obs_groups"] = {"actor": ["actor"], "critic": ["critic"]}
    return MjlabOnPolicyRunner(env, settings, log_dir=None, device="cpu")


class Evaluations:
    """Plays greedy episodes on the way, by gpurl's own environments and evaluation."""

    def __init__(self, case: Case, runner: OnPolicyRunner) -> None:
        self.case = case
        self.runner = runner
        self.env = self._make_env(case.curve_episodes)
        self.began = time.monotonic()

    def seconds(self) -> float:
        """Wall clock since the training began."""
        return time.monotonic() - self.began

    def _make_env(self, episodes: int) -> VecEnv:
        """One environment an episode, at most as many as training has, as in gpurl."""
        return make_env(self.case.env, min(episodes, self.case.settings["num_envs"]), "cpu")

    def on_the_way(self) -> float:
        """The mean return of greedy episodes, the same ones each time."""
        return self._play(self.env, self.case.curve_episodes, EVAL_SEED)

    def at_the_end(self) -> float:
        """That of others, at the end."""
        return self._play(self._make_env(results.END_EPISODES), results.END_EPISODES, EVAL_SEED + 1)

    def _play(self, env: VecEnv, episodes: int, seed: int) -> float:
        low, high = (
            torch.as_tensor(limit)
            for limit in (env.single_action_space.low, env.single_action_space.high)
        )
        policy = self.runner.get_inference_policy(device="cpu")

        def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
            groups = {"policy": obs, "actor": obs}  # mjlab's name and that of the adapter
            action = policy(TensorDict(groups, batch_size=[env.num_envs]))
            return action.clamp(low, high), policy_state

        with torch.inference_mode():
            values = Player(act, env, episodes).play(seed)
        self.runner.alg.train_mode()
        return values["eval/mean_reward"]


def train_seed(case: Case, seed: int) -> tuple[list[Point], Point]:
    """(curve, end) of a training."""
    runner = make_runner(case, seed)
    evaluations = Evaluations(case, runner)
    per_iteration = case.settings["num_envs"] * case.settings["num_steps_per_env"]
    curve: list[Point] = []
    steps, next_at = 0, case.eval_every
    while steps < case.steps:
        # clocks at random, as rsl_rl's train scripts start them and as gpurl does
        runner.learn(1, init_at_random_ep_len=steps == 0)
        steps += per_iteration
        if steps >= next_at:
            next_at = (steps // case.eval_every + 1) * case.eval_every
            value = evaluations.on_the_way()
            curve.append(Point(steps, evaluations.seconds(), value))
    seconds = evaluations.seconds()
    return curve, Point(steps, seconds, evaluations.at_the_end())


def main(words: Sequence[str]) -> None:
    """Train a seed of a case and write its rows."""
    job = job_parser().parse_args(words)
    case = case_named(job.case).scaled(job.scale)
    torch.set_num_threads(1)
    columns = results.provenance(case.resolved_settings())
    curve, end = train_seed(case, job.seed)
    results.add(case, job.seed, curve, end, columns, job.out)
    print(f"return {end.mean_return:.1f} after {end.steps:,} steps, {end.seconds:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
