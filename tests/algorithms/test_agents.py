"""Several agents through the whole loop: training, statistics, evaluation, checkpoints, NaN; and
what knows one agent only is refused.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor

from gpurl.api import evaluate_run
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.cli import play
from gpurl.cli.check_env import check_env
from gpurl.cli.env_table import env_table
from gpurl.cli.episode_plot import Episode, plot_episode
from gpurl.engine.statistics import EpisodeStatistics
from gpurl.envs.torch_env import State
from gpurl.envs.vec_env import Timestep
from gpurl.errors import EnvError, NonFiniteError, UsageError
from gpurl.guards.contract import check_step
from gpurl.guards.finite import FiniteGuard
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.random import CounterRandom
from gpurl.run import setup
from gpurl.run.evaluator import evaluate
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from tests.engines import graph_level, running_state
from tests.fake_graphs import FakeGraphs
from tests.joint_ppo import JointPPO
from tests.small_runs import small_run
from tests.tiny_envs import Walkers

ALGORITHM, WALKERS = "tests.joint_ppo", "tests.tiny_envs:Walkers"
CPU = torch.device("cpu")


# ---- training ----


def test_one_policy_of_all_agents_learns_the_two_step_game(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And evaluates, plays and draws it."""
    drawn = list[Episode]()
    monkeypatch.setattr(
        play,
        "plot_episode",
        lambda path, title, episode, signals: (
            drawn.append(episode) or plot_episode(path, title, episode, signals)
        ),
    )
    run = small_run(
        tmp_path / "run",
        40,
        ALGORITHM,
        "two_step_game",
        epochs=8,
        entropy_coef=0.05,
        learning_rate=0.01,
    )
    assert run.outcome.evaluation["eval/mean_reward"] == 8.0
    assert run.baseline["eval/mean_reward"] == 8.0
    assert (
        evaluate_run(run.folder, episodes=16, device="cpu", best=False)["eval/mean_ep_length"]
        == 2.0
    )
    assert play.play_run(run.folder, episodes=1, device="cpu").stat().st_size > 0
    (episode,) = drawn
    shapes = [column.shape for column in (episode.obs, episode.action, episode.reward)]
    assert shapes == [(3, 2, 5), (2, 2, 1), (2, 2)]
    assert episode.reward.tolist() == [[0.0, 0.0], [8.0, 8.0]]
    assert episode.end == "terminated"


def test_the_list_of_environments_tells_of_agents() -> None:
    rows = {line.split()[0]: " ".join(line.split()) for line in env_table(200).splitlines() if line}
    assert rows["two_step_game"].startswith("two_step_game 2 x Box (5,) MultiDiscrete([2 2])")
    assert rows["pendulum"].startswith("pendulum Box (3,) Box (1,) 200")


@pytest.mark.parametrize("level", ["full", "policy"])
def test_graphs_do_what_the_loop_does(level: str) -> None:
    """The continuous task, whose rewards differ from agent to agent."""
    found = []
    for graph in (level, "off"):
        settings = make_settings(
            ALGORITHM,
            WALKERS,
            num_envs=8,
            horizon=4,
            minibatches=2,
            graph=graph,
            network={"hidden": [8]},
        )
        with no_host_syncs():
            trainer = make_trainer(settings, CPU, backend=None if graph == "off" else FakeGraphs())
            trainer.start()
            for _ in range(6):
                trainer.iterate()
        assert graph_level(trainer.engine) == graph
        state = running_state(trainer.engine)
        found.append([state["algorithm"]["model"], state["env"], state["obs"]])
    torch.testing.assert_close(*found, rtol=0.0, atol=0.0)


# ---- statistics ----


def standing_still(
    obs: Tensor, policy_state: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    return torch.zeros(*obs.shape[:2], 1), policy_state


def test_the_return_is_the_mean_over_agents_of_their_summed_rewards() -> None:
    env, statistics = Walkers(64, seed=3), EpisodeStatistics(64, CPU)
    obs, _ = env.reset(seed=5)
    sums = torch.zeros(64, 3, dtype=torch.float64)  # of each agent's rewards
    newest = torch.full((64,), torch.nan, dtype=torch.float64)
    num_ended = 0
    for _ in range(7):
        timestep = env.step(standing_still(obs, ())[0])
        check_step(env, timestep)
        statistics.add(timestep)
        sums += timestep.reward
        assert timestep.info["episode"]["r"].shape == (64,)
        torch.testing.assert_close(
            timestep.info["episode"]["r"].double(), sums.mean(1), rtol=1e-6, atol=1e-6
        )
        ended = timestep.terminated | timestep.truncated
        num_ended += int(ended.sum())
        newest[ended] = sums[ended].mean(1)
        sums[ended] = 0.0
    assert bool((sums == 0.0).any(0).all())
    metrics = {name: float(value) for name, value in statistics.metrics().items()}
    values = statistics.read(metrics, 7 * 64)
    assert values["rollout/episodes"] == num_ended >= 64
    assert values["rollout/ep_rew_mean"] == pytest.approx(float(newest.mean()), rel=1e-5)


def test_an_evaluation_of_agents_with_rewards_of_their_own() -> None:
    """They stand still, so that each is paid 7 times what it was far from the origin; those who
    start too far away end at once.
    """
    env = Walkers(32)
    far = env.reset(seed=9)[0][:, :, 0].abs().double()
    expected = -far.mean(1) * torch.where(far.amax(1) > 2.5, 1, 7)
    values = evaluate(standing_still, env, 32, seed=9)
    assert values["eval/mean_reward"] == pytest.approx(float(expected.mean()), rel=1e-5)
    assert values["eval/std_reward"] == pytest.approx(float(expected.std(correction=0)), rel=1e-4)


# ---- NaN ----


class Ill(Walkers):
    """Agent 1 of environment 3 is paid NaN at its third step."""

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        next_state, reward, terminated = super().transition(state, action, rng)
        is_ill = (torch.arange(len(reward)) == 3) & (self.episode_length_buf == 2)
        reward[:, 1] = torch.where(is_ill, torch.nan, reward[:, 1])
        return next_state, reward, terminated


def test_nan_of_one_agent_stops_the_run_or_is_left_out(tmp_path: Path) -> None:
    name = "tests.algorithms.test_agents:Ill"
    with pytest.raises(NonFiniteError, match=r"Ill' gave NaN or infinity .*, environments 3\)"):
        small_run(tmp_path / "stop", 3, ALGORITHM, name, stagger=False)
    run = small_run(tmp_path / "skip", 3, ALGORITHM, name, stagger=False, nan="reset-envs")
    assert all(
        torch.isfinite(value).all() for value in load_checkpoint(run.folder)[0]["model"].values()
    )
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(
        np.isfinite(record["train/grad_norm"]) for record in records if "train/grad_norm" in record
    )
    assert records[-1]["eval/non_finite_episodes"] == 1.0


@pytest.mark.parametrize("column", ["obs", "reward", "value"])
def test_the_guard_finds_nan_of_one_agent(column: str) -> None:
    """Columns [T, N, A] and [T, N, A, D]: the row of environment 2 at step 1 goes, and the one that
    led to an observation with NaN.
    """
    buffer, nobody = RolloutBuffer(3, CPU), torch.zeros(4, dtype=torch.bool)
    for _ in range(3):
        row = {"obs": torch.ones(4, 2, 5), "reward": torch.ones(4, 2), "value": torch.ones(4, 2)}
        buffer.add({**row, "terminated": nobody, "truncated": nobody})
    buffer[column][1, 2, 1] = torch.nan
    guard = FiniteGuard("agents", CPU)
    bad_envs = guard.clean(buffer)
    assert bad_envs is not None
    assert bad_envs.tolist() == [False, False, True, False]
    bad_rows = [[0, 2], [1, 2]] if column == "obs" else [[1, 2]]
    assert (~buffer["valid"]).nonzero().tolist() == bad_rows
    assert int(guard.findings.first) == bad_rows[0][0] * 4 + 2
    assert bool(guard.findings.policy_diverged) == (column == "value")
    assert all(bool(torch.isfinite(buffer[name]).all()) for name in ("obs", "reward", "value"))


# ---- what is refused ----


@pytest.mark.parametrize("algorithm", ["ppo", "a2c"])
def test_an_algorithm_for_one_agent_is_refused(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "algorithm_names", lambda: ["ppo", "a2c", "tests.joint_ppo"])
    message = (
        rf"^{algorithm} is for one agent, two_step_game has 2; for several agents: tests.joint_ppo$"
    )
    with pytest.raises(UsageError, match=message):
        small_run(tmp_path / "run", 1, algorithm, "two_step_game")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(JointPPO, "takes_agents", False)
    with pytest.raises(
        UsageError, match=r"^tests.joint_ppo is for one agent, tests.tiny_envs:Walkers has 3$"
    ):
        small_run(tmp_path / "run", 1, ALGORITHM, WALKERS)


@pytest.mark.parametrize(
    ("spaces", "expected"),
    [
        (
            {"single_observation_space": Box(-1.0, 1.0, (2, 3))},
            "Wrong.single_observation_space: wanted a joint space, .* of 3 agents, got Box",
        ),
        (
            {"single_observation_space": Box(-1.0, 1.0, (3,))},
            "Wrong.single_observation_space: wanted a joint space",
        ),
        (
            {"single_action_space": Box(-1.0, 1.0, (3,))},
            "Wrong.single_action_space: wanted a joint space",
        ),
        (
            {"single_action_space": Discrete(3)},
            r"Wrong.single_action_space: wanted a joint space, .* got Discrete\(3\)",
        ),
        (
            {"single_action_space": MultiDiscrete([2, 2])},
            r"Wrong.single_action_space: wanted a joint space, .* got MultiDiscrete\(\[2 2\]\)",
        ),
    ],
)
def test_spaces_without_an_axis_of_agents_are_named(spaces: dict[str, Any], expected: str) -> None:
    wrong = type("Wrong", (Walkers,), spaces)
    with pytest.raises(EnvError, match=expected):
        wrong(4)


NUMBERS = "reward: wanted a tensor of shape (8, 3), torch.float32, on cpu, got shape "
STEP_MUTANTS: dict[str, tuple[Callable[[Timestep], Timestep], str]] = {
    "one reward for all": (
        lambda t: t._replace(reward=t.reward.mean(1)),
        f"Mutant.step: {NUMBERS}(8,)",
    ),
    "agents before environments": (
        lambda t: t._replace(reward=t.reward.T),
        f"Mutant.step: {NUMBERS}(3, 8)",
    ),
    "a column an agent": (
        lambda t: t._replace(reward=t.reward.unsqueeze(2)),
        f"Mutant.step: {NUMBERS}(8, 3, 1)",
    ),
    "a return an agent": (
        lambda t: t._replace(
            info={**t.info, "episode": {"r": t.reward, "l": t.info["episode"]["l"]}}
        ),
        "Mutant.step: info['episode']['r']: wanted a tensor of shape (8,), torch.float32 or "
        "torch.float64 or torch.float16 or torch.bfloat16, on cpu, got shape (8, 3)",
    ),
}


def is_named(problem: str, problems: list[str]) -> bool:
    """Whether it is the first of `problems`, before hints and the number of those that follow."""
    return problems[0].partition("; and ")[0].startswith(problem)


@pytest.mark.parametrize("name", STEP_MUTANTS)
def test_the_checker_names_wrong_shapes(name: str) -> None:
    change, expected = STEP_MUTANTS[name]

    class Mutant(Walkers):
        def step(self, actions: Tensor) -> Timestep:
            return change(super().step(actions))

    assert is_named(expected, check_env(Mutant(8), steps=8))


def test_a_transition_with_one_reward_for_all_is_named() -> None:
    class OneReward(Walkers):
        def transition(
            self, state: State, action: Tensor, rng: CounterRandom
        ) -> tuple[State, Tensor, Tensor]:
            next_state, reward, terminated = super().transition(state, action, rng)
            return next_state, reward.mean(1), terminated

    problems = check_env(OneReward(8), steps=8)
    assert is_named(f"OneReward.transition: {NUMBERS}(8,)", problems)
