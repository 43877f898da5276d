"""What every algorithm that replays must do: value ends rightly, leave out what is no transition, resume, refuse."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from gpurl.algorithms import config_class, make_algorithm, resolve_algorithm
from gpurl.algorithms.discrete_sac import DiscreteSAC
from gpurl.algorithms.mod_sac import ModSAC
from gpurl.algorithms.off_policy import OffPolicy
from gpurl.algorithms.sac import SAC
from gpurl.api import resume, train
from gpurl.buffers import memory
from gpurl.checkpoint import load_checkpoint
from gpurl.config import build, make_settings
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import CheckpointError, NonFiniteError, UsageError
from gpurl.exploration import THETA, TIME_STEP, ActionNoise
from gpurl.kernels.random import CounterRandom
from gpurl.policy import load
from tests.gpurl.test_misbehaving_envs import BrokenWalk
from tests.small_runs import OFF_POLICY, small_settings, takes
from tests.tiny_envs import AlternatingEnv, RandomWalk


def make(name: str, env: VecEnv, **settings: Any) -> OffPolicy:
    config = build(config_class(resolve_algorithm(name)), small_settings(name) | settings)
    algorithm = make_algorithm(name, config, env.single_observation_space, env.single_action_space, env.num_envs)
    assert isinstance(algorithm, OffPolicy)
    return algorithm


def play(algorithm: OffPolicy, env: VecEnv, iterations: int, learns: bool = True) -> dict[str, Tensor]:
    """The training loop without what surrounds it."""
    obs, _ = env.reset(seed=0)
    buffer, carry, metrics = algorithm.make_buffer(), algorithm.initial_carry(env.num_envs), {}
    for number in range(iterations):
        algorithm.schedule(number / iterations, number * env.num_envs)
        while not algorithm.is_ready(buffer):
            decision = algorithm.act(obs, carry)
            timestep = env.step(decision.action)
            algorithm.record(buffer, obs, decision, timestep)
            obs = timestep.obs
        data = algorithm.prepare(buffer)
        metrics = algorithm.learn(data) if learns else {}
        buffer.clear()
    return metrics


class ContinuousAlternating(AlternatingEnv):
    single_action_space = Box(-1.0, 1.0, (1,), np.float32)


ENVS: dict[type, type[TorchEnv]] = {Discrete: AlternatingEnv, Box: ContinuousAlternating}
CYCLE = [(name, kind) for name in OFF_POLICY for kind in ENVS if takes(name, ENVS[kind].single_action_space)]


@pytest.mark.parametrize(("name", "kind"), CYCLE, ids=str)
@pytest.mark.parametrize("n_step", [1, 3])
def test_truncation_is_not_termination(name: str, kind: type, n_step: int) -> None:
    """V(A) = 0.9 / 0.19, V(B) = 1 / 0.19; truncation as an end gives 0.75 and 1.71, the observation after a reset 3.14 and 3.84."""
    env = ENVS[kind](16)
    wide = {"v_min": 0.0, "v_max": 8.0} if "v_min" in config_class(resolve_algorithm(name)).__dataclass_fields__ else {}
    settings = {"gamma": 0.9, "learning_rate": 3e-3, "updates": 4, "batch_size": 64, "learning_starts": 64, "n_step": n_step}
    settings |= {"replay_size": 2000, "weight_decay": 0.0, "tau": 0.1, "normalize_obs": False, "max_grad_norm": 1.0} | wide
    settings |= {network: {"hidden": [32]} for network in ("network", "actor_network", "critic_network") if network in small_settings(name)}
    if "temperature" in config_class(resolve_algorithm(name)).__dataclass_fields__:
        settings["temperature"] = 1e-4  # no reward for entropy
    algorithm = make(name, env, **settings)
    play(algorithm, env, 300)
    values = algorithm.value(torch.eye(2))
    torch.testing.assert_close(values, torch.tensor([0.9, 1.0]) / 0.19, atol=0.15, rtol=0)


class Bandit(TorchEnv):
    """One state for ever, rewards 1, 0 and -1."""

    single_observation_space, single_action_space = Box(0.0, 1.0, (1,), np.float32), Discrete(3)
    max_episode_steps = 10

    def initial_state(self, rng: CounterRandom) -> State:
        return {"x": torch.ones(rng.num_envs, 1)}

    def transition(self, state: State, action: Tensor, rng: CounterRandom) -> tuple[State, Tensor, Tensor]:
        return {"x": state["x"] * 1.0}, 1.0 - action.float(), torch.zeros(len(action), dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        return state["x"]


def test_the_soft_value_of_a_bandit() -> None:
    """V = alpha log sum exp(r / alpha) / (1 - gamma) = 10.714658 and pi = softmax(r / alpha), for gamma 0.9 and alpha 0.5."""
    env = Bandit(16)
    settings = {"gamma": 0.9, "temperature": 0.5, "learning_rate": 3e-3, "updates": 4, "batch_size": 64, "learning_starts": 64, "tau": 0.05}
    settings |= {"actor_network": {"hidden": [16]}, "critic_network": {"hidden": [16]}, "replay_size": 4000, "schedule": "linear"}
    algorithm = make("sac", env, **settings)
    assert isinstance(algorithm, DiscreteSAC)
    play(algorithm, env, 700)
    one = torch.ones(1, 1)
    with torch.no_grad():
        log_prob = algorithm.actor.forward(one)[0].log_softmax(-1)
        soft_value = float(algorithm.value(one)) - 0.5 * float((log_prob.exp() * log_prob).sum())
    assert soft_value == pytest.approx(10.714658, abs=0.05)
    torch.testing.assert_close(log_prob.exp()[0], torch.tensor([0.8668, 0.1173, 0.0159]), atol=0.01, rtol=0)


class Regulator(TorchEnv):
    """x' = 0.9 x + 0.5 u, cost x^2 + 0.1 u^2: at gamma 0.95 the best control is u = -1.344266 x and costs 1.241968 x^2 (Riccati)."""

    single_observation_space, single_action_space = Box(-2.0, 2.0, (1,), np.float32), Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps = 20

    def initial_state(self, rng: CounterRandom) -> State:
        return {"x": rng.uniform(-0.7, 0.7, (1,))}

    def transition(self, state: State, action: Tensor, rng: CounterRandom) -> tuple[State, Tensor, Tensor]:
        x = 0.9 * state["x"] + 0.5 * action
        cost = state["x"].square() + 0.1 * action.square()
        return {"x": x}, -cost[:, 0], torch.zeros(len(x), dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        return state["x"]


@pytest.mark.parametrize("name", ["ddpg", "td3"])
def test_a_linear_regulator_costs_what_it_must(name: str) -> None:
    """The least discounted cost from x is 1.241968 x^2; around its gain the cost is flat, so the gain itself is known less well."""
    env = Regulator(32)
    settings = {"gamma": 0.95, "learning_rate": 1e-3, "updates": 4, "batch_size": 128, "learning_starts": 320, "tau": 0.05}
    settings |= {"actor_network": {"hidden": [32, 32]}, "critic_network": {"hidden": [64, 64]}, "replay_size": 50_000, "schedule": "linear"}
    settings |= {"noise_std": 0.3, "target_noise": 0.0, "normalize_obs": False}
    algorithm = make(name, env, **settings)
    play(algorithm, env, 900)
    start = x = torch.linspace(-0.6, 0.6, 20).unsqueeze(1)
    cost = torch.zeros_like(x)
    for step in range(100):
        action = algorithm.act(x, explore=False).action
        cost += 0.95**step * (x.square() + 0.1 * action.square())
        x = 0.9 * x + 0.5 * action
    assert 1.0 - 1e-4 <= float(cost.sum() / (1.241968 * start.square().sum())) <= 1.08


# ---- what is no transition ----


class Gaps(RandomWalk):
    """Every fifth step of an environment is no transition, and pays a million."""

    def step(self, actions: Tensor) -> Any:
        timestep = super().step(actions)
        self.count = getattr(self, "count", 0) + 1
        invalid = (torch.arange(self.num_envs) + self.count) % 5 == 0
        return timestep._replace(reward=torch.where(invalid, 1e6, timestep.reward), info={**timestep.info, "valid": ~invalid})


@pytest.mark.parametrize("settings", [{}, {"prioritized": True}, {"n_step": 3}], ids=str)
def test_steps_that_are_no_transition_are_not_learnt_from(settings: dict[str, Any]) -> None:
    env = Gaps(16)
    algorithm = make("td3", env, horizon=4, normalize_obs=True, final_share=1.0, **settings)
    metrics = play(algorithm, env, 20)
    assert float(metrics["train/critic_loss"]) < 1e4
    batch = algorithm.replay.sample(4000, 0.9, algorithm.config.n_step)
    assert float(batch["reward"][batch["weight"] > 0].abs().max()) < 1e3
    drawn = float((batch["weight"] == 0).float().mean())
    assert drawn < 0.25 if settings.get("prioritized") else 0.1 < drawn < 0.7
    assert algorithm.normalizer is not None
    assert float(algorithm.normalizer.count) == 20 * 4 * 16 - 20 * 4 * 16 // 5


def test_a_reset_from_outside_cuts_what_was_recorded() -> None:
    env = RandomWalk(4)
    algorithm = make("td3", env, replay_size=80)
    play(algorithm, env, 3, learns=False)
    replay = algorithm.replay
    newest = (replay.ring.counts[0] - 1) * 4 + torch.arange(4)
    before = replay._sample(4, 0.9, 1, newest)
    mask = torch.tensor([True, False, True, False])
    algorithm.cut(mask)
    cut = replay._sample(4, 0.9, 1, newest)
    torch.testing.assert_close(cut["next_obs"], before["next_obs"])
    steps = {name: torch.zeros(1, 4, 3) for name in ("obs", "final_obs")} | {"action": torch.zeros(1, 4, 2), "reward": torch.zeros(1, 4)}
    steps |= {name: torch.zeros(1, 4, dtype=torch.bool) for name in ("terminated", "truncated")}
    replay.add(steps)  # other episodes, which begin at 0
    after = replay._sample(4, 0.9, 1, newest)
    torch.testing.assert_close(after["next_obs"][mask], before["next_obs"][mask])
    assert float(after["next_obs"][~mask].abs().max()) == 0.0  # taken for continued, as nobody said otherwise
    two_steps = replay._sample(4, 0.9, 2, newest)["discount"]
    is_cut = mask | (before["discount"] == 0)
    assert bool((two_steps[is_cut] != 0.81).all())


def test_what_goes_back_goes_back_bit_for_bit() -> None:
    env = RandomWalk(4)
    algorithm = make("sac", env, replay_size=40, prioritized=True, horizon=3)
    play(algorithm, env, 5)
    before, whole = algorithm.snapshot(6), {name: value.clone() for name, value in algorithm.replay.ring._asdict().items()}
    before = torch.utils._pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, before)
    priorities = algorithm.replay.priority.clone()  # type: ignore[attr-defined]
    buffer_of = RandomWalk(4)
    buffer_of.reset(seed=3)
    for _ in range(2):
        steps = {name: torch.randn(3, 4, 3) for name in ("obs", "final_obs")}
        steps |= {"action": torch.randn(3, 4, 2), "reward": torch.randn(3, 4)}
        steps |= {name: torch.rand(3, 4) < 0.5 for name in ("terminated", "truncated")}
        algorithm.replay.add(steps)
        algorithm.learn({})
    assert not torch.equal(algorithm.replay.ring.numbers, whole["numbers"])
    algorithm.go_back(before)
    for name, value in algorithm.replay.ring._asdict().items():
        assert torch.equal(value[:-1] if name == "owner" else value, whole[name][:-1] if name == "owner" else whole[name]), name
    assert torch.equal(algorithm.replay.priority, priorities)  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", ["nan reward", "nan obs", "inf obs"])
@pytest.mark.parametrize("horizon", [1, 4])
def test_nan_of_an_environment_never_reaches_weights_or_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, horizon: int
) -> None:
    monkeypatch.setattr(BrokenWalk, "fault", fault)
    settings = SMALL_RUN | small_settings("td3") | {"horizon": horizon, "save_replay": True, "total_steps": 96, "eval_episodes": 0}
    name = "tests.gpurl.test_misbehaving_envs:BrokenWalk"
    with pytest.raises(NonFiniteError, match="gave NaN or infinity"):
        train("td3", name, run_dir=str(tmp_path / "stop"), **settings)
    run = train("td3", name, run_dir=str(tmp_path / "skip"), nan="skip", **settings)
    for folder in (tmp_path / "stop", run.folder):
        parts, _ = load_checkpoint(folder)
        kept = torch.utils._pytree.tree_leaves((parts["model"], parts["training"], parts["replay"]))
        assert all(bool(value.isfinite().all()) for value in kept if isinstance(value, Tensor))
    assert bool((parts["replay"]["flags"] & 4).any())


# ---- ModSAC, noise, epsilon ----


@pytest.mark.parametrize(("loss", "wanted"), [(0.0, [True] * 8), (1e9, [True, False] * 4)])
def test_mod_sac_moves_its_actor_as_its_critics_deserve(loss: float, wanted: list[bool]) -> None:
    """With perfect critics at every update; with hopeless ones at every second."""
    env = RandomWalk(4)
    algorithm = make("mod_sac", env, updates=8, temperature=1e-9)
    play(algorithm, env, 2, learns=False)
    assert isinstance(algorithm, ModSAC)
    moved = []
    for number in range(8):
        algorithm.loss_mean.fill_(loss)
        before = algorithm.optimizers["actor"].flat.clone()
        batch = algorithm.replay.sample(8, 0.9)
        batch["reward"] *= 0.0
        with torch.inference_mode():
            algorithm.learn_from(batch, number, wants_parts=number % 2 == 1)
        moved.append(not torch.equal(algorithm.optimizers["actor"].flat, before))
    assert moved == wanted


def test_mod_sac_starts_at_one_half() -> None:
    algorithm = make("mod_sac", RandomWalk(4))
    assert isinstance(algorithm, ModSAC)
    assert float(algorithm.loss_mean.square().neg().exp()) == pytest.approx(0.5)


def test_noise_of_every_kind() -> None:
    still, random = torch.zeros(1000, 1), CounterRandom(0, 1000)

    def draws(kind: str, steps: int = 200) -> Tensor:
        noise = ActionNoise(kind, 0.05, (0.01, 0.2), 1000, 1, torch.device("cpu"))
        carry, rows = noise.initial_carry(1000), []
        for _ in range(steps):
            action, carry = noise.add(still, carry, random)
            random.advance()
            rows.append(action[:, 0])
        return torch.stack(rows)

    at_the_limit, _ = ActionNoise("gaussian", 0.05, (0.01, 0.2), 1000, 1, torch.device("cpu")).add(still + 1.0, (), random)
    assert float(at_the_limit.amax()) == 1.0 > float(at_the_limit.amin())
    assert float(draws("gaussian").std()) == pytest.approx(0.05, rel=0.02)
    ladder = draws("ladder").std(0)
    torch.testing.assert_close(ladder, torch.linspace(0.01, 0.2, 1000), rtol=0.3, atol=0.002)
    widths = draws("episode").std(0).sort().values
    torch.testing.assert_close(widths, torch.linspace(0.01, 0.2, 1000), rtol=0.3, atol=0.01)
    drift = draws("ornstein_uhlenbeck")
    # variance after k steps: std^2 dt (1 - a^2k) / (1 - a^2), a = 1 - theta dt
    a = 1.0 - THETA * TIME_STEP
    wanted = 0.05 * (TIME_STEP * (1 - a**400) / (1 - a * a)) ** 0.5
    assert float(drift[-1].std()) == pytest.approx(wanted, rel=0.1)
    assert float(torch.corrcoef(drift[-2:])[0, 1]) > 0.99


def test_epsilon_falls_and_the_ladder_stands() -> None:
    algorithm: Any = make("dqn", AlternatingEnv(8), epsilon_start=0.9, epsilon_end=0.1, epsilon_fraction=0.5)
    for progress, wanted in ((0.0, 0.9), (0.25, 0.5), (0.5, 0.1), (1.0, 0.1)):
        algorithm.make_buffer()
        algorithm.schedule(progress, 0)
        assert float(algorithm.epsilon) == pytest.approx(wanted)
    ladder: Any = make("dqn", AlternatingEnv(8), epsilon_ladder=True)
    assert float(ladder.epsilon[0]) == pytest.approx(0.4)
    assert float(ladder.epsilon[-1]) == pytest.approx(0.4**8)


# ---- a whole run ----


SMALL_RUN: dict[str, Any] = {"num_envs": 8, "horizon": 2, "quiet": True, "device": "cpu", "eval_episodes": 2, "log_every": 0.0}


@pytest.mark.parametrize(("name", "env"), [("sac", "pendulum"), ("rainbow", "cart_pole"), ("redq", "pendulum"), ("pqn", "cart_pole")])
def test_resuming_is_not_having_stopped(name: str, env: str, tmp_path: Path) -> None:
    settings = SMALL_RUN | small_settings(name) | {"horizon": 2}
    if name != "pqn":
        settings |= {"save_replay": True, "learning_starts": 24, "schedule": "linear"}
    whole = train(name, env, run_dir=str(tmp_path / "whole"), total_steps=160, **settings)
    train(name, env, run_dir=str(tmp_path / "halves"), total_steps=160, max_seconds=1e-9, **settings)
    halves = resume(tmp_path / "halves", max_seconds=None)
    (one, _), (other, _) = load_checkpoint(whole.folder), load_checkpoint(halves.folder)
    for part in ("model", "training", "env", "replay"):
        for mine, theirs in zip(torch.utils._pytree.tree_leaves(one[part]), torch.utils._pytree.tree_leaves(other[part]), strict=True):
            assert torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs, part


def test_without_its_replay_a_run_fills_it_anew_before_it_learns(tmp_path: Path) -> None:
    settings = SMALL_RUN | small_settings("td3") | {"learning_starts": 64}
    run = train("td3", "pendulum", run_dir=str(tmp_path), total_steps=128, **settings)
    updates = int(load_checkpoint(run.folder)[0]["training"]["num_updates"])
    assert updates == 4 * 5  # after 64, 80, 96, 112 and 128 transitions
    resume(tmp_path, total_steps=176)
    assert int(load_checkpoint(tmp_path)[0]["training"]["num_updates"]) == updates
    resume(tmp_path, total_steps=240)
    assert int(load_checkpoint(tmp_path)[0]["training"]["num_updates"]) == updates + 4 * 1


def test_a_policy_needs_no_replay(tmp_path: Path) -> None:
    run = train("sac", "pendulum", run_dir=str(tmp_path), total_steps=32, **(SMALL_RUN | small_settings("sac")))
    policy = load(run.folder)
    assert not hasattr(policy.algorithm, "replay")
    assert policy.act(np.zeros(3, np.float32)).shape == (1,)
    assert isinstance(policy.value(np.zeros(3, np.float32)), float)


# ---- refusals ----


@pytest.mark.parametrize(
    ("name", "env", "settings", "message"),
    [
        ("td3", "cart_pole", {}, r"TD3 needs a Box action space, this one is Discrete\(2\); dqn and its kin choose"),
        ("dqn", "pendulum", {}, r"DQN needs a Discrete action space, this one is Box.*ddpg, td3 and sac take a Box"),
        ("rainbow", "pendulum", {}, "Rainbow needs a Discrete action space"),
        ("pqn", "pendulum", {}, "PQN needs a Discrete action space"),
        ("discrete_sac", "pendulum", {}, r"DiscreteSAC needs a Discrete action space.*sac takes a Box"),
        ("vdn", "cart_pole", {}, r"VDN needs a MultiDiscrete action space.*dqn takes a Discrete"),
        ("sac", "chasing", {"batch_size": 6000}, "a batch of batch_size 6000 is more than learning_starts 5000 transitions hold"),
        ("sac", "chasing", {"replay_size": 100}, "a batch of batch_size 256 is more than replay_size 100 transitions hold"),
        ("td3", "pendulum", {"updates": 3}, "policy_delay 2 updates, updates 3 is no multiple"),
        ("redq", "chasing", {"target_subset": 11}, "target_subset 11 is more than num_critics 10"),
        ("sac", "pendulum", {"atoms": 1}, "atoms must be 0 or at least 2"),
        ("dqn", "cart_pole", {"atoms": 5, "quantiles": 5}, "two kinds of distribution"),
        ("sac", "pendulum", {"fit_returns": 0.1}, "fit_returns needs a rollout"),
        ("mod_sac", "pendulum", {"policy_delay": 2}, "decides by itself when the actor moves"),
        ("ddpg", "pendulum", {"noise_std_range": [0.5, 0.1]}, "two numbers above 0, the least first"),
        ("sac", "cart_pole", {"atoms": 11}, "leave out atoms 11"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, env: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        train(name, env, run_dir=str(tmp_path), quiet=True, num_envs=4, total_steps=8, device="cpu", **settings)


def test_a_replay_that_does_not_fit_says_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurl.buffers.replay.available_bytes", lambda device: 1_000_000)
    with pytest.raises(
        UsageError, match=r"a replay of 1,000,000 transitions takes .* GiB on cpu, where .* are free: replay_size [\d,]+ would"
    ):
        make("sac", RandomWalk(8), replay_size=1_000_000).make_buffer()
    (fits,) = [int(word.replace(",", "")) for word in _error_of(1_000_000).split() if word.replace(",", "").isdigit()][-1:]
    make("sac", RandomWalk(8), replay_size=fits).make_buffer()


def _error_of(size: int) -> str:
    with pytest.raises(UsageError) as caught:
        make("sac", RandomWalk(8), replay_size=size).make_buffer()
    return str(caught.value).split(" would fit")[0]


def test_free_memory_is_known() -> None:
    free = memory.available_bytes(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50


def test_a_saved_replay_of_another_environment_is_refused() -> None:
    small, other = make("sac", RandomWalk(4)), make("sac", ContinuousAlternating(4))
    for algorithm, env in ((small, RandomWalk(4)), (other, ContinuousAlternating(4))):
        play(algorithm, env, 2, learns=False)
    with pytest.raises(UsageError, match="the saved replay is of another environment or size: its obs is"):
        other.replay.load_state_dict(small.replay.state_dict())
    prioritized = make("sac", RandomWalk(4), prioritized=True)
    prioritized.make_buffer()
    with pytest.raises(UsageError, match="has no priorities"):
        prioritized.replay.load_state_dict(small.replay.state_dict())
    shorter = make("sac", RandomWalk(4), replay_size=64)
    shorter.make_buffer()
    play(full := make("sac", RandomWalk(4), replay_size=96), RandomWalk(4), 30, learns=False)
    with pytest.raises(UsageError, match="another environment or size"):
        shorter.replay.load_state_dict(full.replay.state_dict())


def test_errors_that_are_no_numbers_are_refused_as_priorities() -> None:
    algorithm: Any = make("dqn", AlternatingEnv(4), prioritized=True)
    play(algorithm, AlternatingEnv(4), 3, learns=False)
    index = torch.arange(4)
    with pytest.raises(UsageError, match="1 of 4 errors are NaN or infinite"):
        algorithm.replay.update_priorities(index, torch.tensor([1.0, float("nan"), 1.0, 1.0]))


def test_sac_takes_the_form_of_its_space() -> None:
    assert type(make("sac", AlternatingEnv(2))) is DiscreteSAC
    assert type(make("sac", RandomWalk(2))) is SAC


def test_a_resume_refuses_another_shape(tmp_path: Path) -> None:
    settings = SMALL_RUN | small_settings("sac")
    train("sac", "pendulum", run_dir=str(tmp_path), total_steps=32, **settings)
    with pytest.raises(CheckpointError, match=r"num_critics 2, this run 3"):
        resume(tmp_path, num_critics=3, total_steps=64)


def test_nested_settings_lie_over_what_the_algorithm_starts_with() -> None:
    """`--network.hidden` of Rainbow must not turn off dueling."""
    config = make_settings("rainbow", "cart_pole", network={"hidden": [32]}).algorithm_config
    assert (config.network.hidden, config.network.dueling, config.network.noisy) == ((32,), True, True)
