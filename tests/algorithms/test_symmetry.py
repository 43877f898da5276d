"""Symmetry: what is learned from mirrored steps, the mirror loss, the asymmetry in the log, and
functions that are no mirror.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl import Callback
from gpurl.algorithms import algorithm_names, config_class, make_algorithm, resolve_algorithm
from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.algorithms.symmetry import Symmetry, find_mirror
from gpurl.api import resume, train
from gpurl.buffers.minibatches import Minibatch
from gpurl.engine.cpu_ppo import cpu_ppo_obstacle
from gpurl.engine.fused_update import fused_update_obstacle
from gpurl.envs.cart_pole import CartPole
from gpurl.envs.pendulum import Pendulum
from gpurl.envs.torch_env import TorchEnv
from gpurl.errors import UsageError
from gpurl.losses import ppo_loss
from gpurl.nn.action_scaler import ActionScaler
from gpurl.nn.actor_critic import NetworkConfig
from tests.algorithms.symmetric_tasks import mirror, three
from tests.small_runs import off_policy, small_run

TASKS = "tests.algorithms.symmetric_tasks"
CPU = torch.device("cpu")
SIGNS = torch.tensor([1.0, -1.0, -1.0])


class Logged(Callback):
    """The asymmetry after each iteration."""

    def __init__(self) -> None:
        self.asymmetry: list[float] = []

    def after_iteration(self, run: Any, metrics: dict[str, Tensor]) -> None:
        self.asymmetry.append(float(metrics["train/asymmetry"]))


def made(env: TorchEnv | None = None, has_mirror: bool = True, **settings: Any) -> PPO:
    env = env or Pendulum(16)
    values = {"horizon": 8, "minibatches": 2, "symmetry": "task" if has_mirror else ""}
    config = PPOConfig(**(values | settings))
    torch.manual_seed(0)
    spaces = env.single_observation_space, env.single_action_space
    algorithm = PPO(config, *spaces, env.num_envs, CPU, state_space=env.single_state_space)
    for parameter in algorithm.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    if has_mirror:
        algorithm.set_symmetry(find_mirror("task", env), "task")
    return algorithm


def rollout(algorithm: PPO, env: TorchEnv | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """(observations [T N, D] as they were, the data to learn from)."""
    env = env or Pendulum(16)
    obs, _ = env.reset(seed=0)
    buffer = algorithm.make_buffer()
    while not buffer.is_full:
        decision = algorithm.act(obs)
        timestep = env.step(decision.action)
        algorithm.record_step(buffer, obs, decision, timestep)
        obs = timestep.obs
    raw = buffer["obs"].flatten(0, 1).clone()
    return raw, algorithm.prepare(buffer)


def lopsided(algorithm: PPO) -> PPO:
    """Whose running mean is not symmetric."""
    assert algorithm.normalizer is not None
    algorithm.normalizer.update(torch.randn(100, 3) * 2.0 + torch.tensor([0.3, 0.7, -1.5]))
    return algorithm


# ---- data augmentation ----


@pytest.mark.parametrize("normalizes", [True, False])
def test_mirrored_copies_are_of_the_raw_observations_and_of_the_tasks_actions(
    normalizes: bool,
) -> None:
    algorithm = made(normalize_obs=normalizes)
    if normalizes:
        lopsided(algorithm)
    inputs = algorithm.inputs if not normalizes else _as_now(algorithm)
    raw, data = rollout(algorithm)
    for batch in algorithm.batches(data):
        count = batch.originals
        assert count == 64
        assert len(batch.obs) == 128
        torch.testing.assert_close(batch.action[count:], -batch.action[:count])
        # log-probabilities, values and targets are those of the originals
        for name in ("log_prob", "value", "advantage", "returns"):
            column = getattr(batch, name)
            torch.testing.assert_close(column[count:], column[:count], rtol=0.0, atol=0.0)
        # which raw observation it was: mirrored, then normalised
        known = inputs(raw)
        row = (batch.obs[:count].unsqueeze(1) - known).abs().amax(2).argmin(1)
        torch.testing.assert_close(batch.obs[:count], known[row])
        torch.testing.assert_close(batch.obs[count:], inputs(raw[row] * SIGNS))


def _as_now(algorithm: PPO) -> Any:
    """Normalises as the algorithm does before its next update."""
    assert algorithm.normalizer is not None
    shift, scale = algorithm.normalizer.shift.clone(), algorithm.normalizer.inv_std.clone()
    return lambda x: ((x - shift) * scale).clamp(-10.0, 10.0)


@pytest.mark.parametrize("options", [{}, {"state_dependent_std": True}, {"squash": True}], ids=str)
@pytest.mark.parametrize("has_gaps", [False, True])
def test_the_loss_is_the_mean_over_original_and_mirrored_steps(
    options: dict[str, Any], has_gaps: bool
) -> None:
    """Entropy and KL divergence are those of the original steps, as in rsl_rl."""
    algorithm = made(entropy_coef=0.01, **options)
    _, data = rollout(algorithm)
    batch = next(iter(algorithm.batches(data)))
    assert batch.originals is not None
    weight = torch.zeros(64)
    weight[::3] = 1.0 / len(weight[::3])
    halves = []
    for part in (slice(0, 64), slice(64, 128)):
        columns = (batch.obs, batch.action, batch.log_prob, batch.value)
        targets = (batch.advantage, batch.returns)
        half = Minibatch(*(x[part] for x in (*columns, *targets)))
        half.weight = weight if has_gaps else None
        output, value = algorithm.outputs(half)
        log_prob, entropy = algorithm.head.log_prob_and_entropy(output, half.action)
        halves.append(ppo_loss(log_prob, value, entropy, half, 0.2, 0.0, 1.0)[1])
    if has_gaps:
        batch.weight = 0.5 * torch.cat((weight, weight))
    loss, metrics = algorithm.loss(batch)
    original, mirrored = halves
    for name in ("surrogate", "value_loss", "clip_fraction"):
        wanted = 0.5 * (original[name] + mirrored[name])
        torch.testing.assert_close(metrics[name], wanted, rtol=1e-4, atol=1e-6)
    for name in ("approx_kl", "entropy"):
        torch.testing.assert_close(metrics[name], original[name], rtol=1e-4, atol=1e-6)
    assert abs(float(mirrored["approx_kl"])) > 1e-3  # of a policy that is not symmetric
    total = metrics["value_loss"] - metrics["surrogate"] - 0.01 * metrics["entropy"]
    torch.testing.assert_close(loss.detach(), total)


def test_discrete_actions_are_mirrored_too() -> None:
    env = CartPole(16)
    algorithm = made(env)
    raw, data = rollout(algorithm, env)
    batch = next(iter(algorithm.batches(data)))
    assert torch.equal(batch.action[64:], 1 - batch.action[:64])
    assert batch.action.dtype == torch.int64
    asymmetry = float(algorithm.learn(data)["train/asymmetry"])
    greedy = algorithm.act(raw[-16:], explore=False).action
    assert 0.0 <= asymmetry <= 1.0
    assert set(greedy.tolist()) <= {0, 1}


def test_privileged_observations_are_mirrored_by_the_third_argument() -> None:
    spaces = Pendulum.single_observation_space, Pendulum.single_action_space
    box = Box(-1.0, 1.0, (2,))
    symmetry = Symmetry(three, "three", (*spaces, box), ActionScaler(spaces[1]), CPU)
    rows = torch.randn(4, 5)
    mirrored, action = symmetry.rows(rows, torch.ones(4, 1))
    torch.testing.assert_close(mirrored, torch.cat((rows[:, :3] * SIGNS, rows[:, 3:].flip(1)), 1))
    assert action is not None
    torch.testing.assert_close(action, -torch.ones(4, 1))


@pytest.mark.parametrize("name", ["td3", "sac", "dqn", "discrete_sac", "flash_sac", "rainbow"])
def test_every_second_row_of_a_replayed_batch_is_mirrored(name: str) -> None:
    env: TorchEnv = Pendulum(8)
    if name in ("dqn", "discrete_sac", "rainbow"):
        env = CartPole(8)
    batches = []
    for has_mirror in (False, True):
        algorithm = off_policy(name, env, normalize_obs=False, symmetry="task" * has_mirror)
        if has_mirror:
            algorithm.set_symmetry(find_mirror("task", env), "task")
        obs, _ = env.reset(seed=0)
        buffer = algorithm.make_buffer()
        for step in range(3):
            algorithm.schedule(0.0, step)
            while not buffer.is_full:
                decision = algorithm.act(obs)
                timestep = env.step(decision.action)
                algorithm.record_step(buffer, obs, decision, timestep)
                obs = timestep.obs
            algorithm.prepare(buffer)
            buffer.clear()
        batches.append(algorithm.sample_batch())
    plain, half = batches
    for column in ("obs", "next_obs", "action", "reward", "weight"):
        torch.testing.assert_close(half[column][::2], plain[column][::2], rtol=0.0, atol=0.0)
    for column in ("reward", "weight"):
        torch.testing.assert_close(half[column], plain[column], rtol=0.0, atol=0.0)
    if isinstance(env, CartPole):
        signs = -torch.ones(4)
        torch.testing.assert_close(half["action"][1::2], 1 - plain["action"][1::2])
    else:
        signs = SIGNS
        torch.testing.assert_close(half["action"][1::2], -plain["action"][1::2])
    for column in ("obs", "next_obs"):
        torch.testing.assert_close(half[column][1::2], plain[column][1::2] * signs)


# ---- mirror loss and asymmetry ----


@pytest.mark.parametrize("augment", [True, False])
def test_the_mirror_loss_is_that_of_the_formula(augment: bool) -> None:
    algorithm = lopsided(made(symmetry_coef=0.7, symmetry_augment=augment, entropy_coef=0.01))
    inputs = _as_now(algorithm)
    raw, data = rollout(algorithm)
    batch = next(iter(algorithm.batches(data)))
    loss, metrics = algorithm.loss(batch)
    known = inputs(raw)
    row = (batch.obs[:64].unsqueeze(1) - known).abs().amax(2).argmin(1)
    mean = algorithm.network(known[row])[0].detach()
    at_mirrored = algorithm.network(inputs(raw[row] * SIGNS))[0]
    wanted = (at_mirrored + mean).square().mean()
    torch.testing.assert_close(metrics["mirror_loss"], wanted.detach())
    # its gradient is that of the first term
    without = made(symmetry_augment=augment, entropy_coef=0.01)
    without.load_state_dict(algorithm.state_dict())
    plain, _ = without.loss(batch)
    torch.testing.assert_close((loss - plain).detach(), 0.7 * wanted.detach(), rtol=1e-4, atol=1e-5)
    bias = algorithm.network.actor.bias
    (gradient,) = torch.autograd.grad(loss, bias)
    (of_plain,) = torch.autograd.grad(plain, without.network.actor.bias)
    (of_term,) = torch.autograd.grad(0.7 * wanted, bias)
    torch.testing.assert_close(gradient - of_plain, of_term, rtol=1e-4, atol=1e-5)


def test_the_mirror_loss_makes_a_policy_symmetric() -> None:
    """Its gradient alone, at the states of one rollout."""
    algorithm = made(symmetry_coef=1.0, symmetry_augment=False, learning_rate=1e-3)
    _, data = rollout(algorithm)
    losses = []
    for _ in range(200):
        batch = next(iter(algorithm.batches(data)))
        output, _ = algorithm.outputs(batch)
        loss = algorithm._mirror_loss(batch, output)
        losses.append(float(loss.detach()))
        algorithm.optimizer.step(loss)
    assert sum(losses[-20:]) / 20 < 0.15 * losses[0]


def test_the_asymmetry_is_the_difference_of_greedy_actions_in_the_units_of_the_task() -> None:
    algorithm = made(symmetry_augment=False)
    raw, data = rollout(algorithm)
    last = raw[-16:]
    # as it was before the normaliser was updated by this rollout
    fresh = made(symmetry_augment=False)
    action, of_mirrored = (fresh.act(rows, explore=False).action for rows in (last, last * SIGNS))
    wanted = float((of_mirrored + action).abs().mean())
    assert wanted > 0.05
    assert float(algorithm.learn(data)["train/asymmetry"]) == pytest.approx(wanted, rel=1e-4)
    # an odd function of the mirrored numbers alone is symmetric
    odd = made(symmetry_augment=False, normalize_obs=False, network=NetworkConfig(hidden=(8,)))
    with torch.no_grad():
        for layer in (odd.network.trunk.layers[0], odd.network.actor):
            layer.bias.zero_()  # type: ignore[union-attr]
        odd.network.trunk.layers[0].weight[..., 0].zero_()  # type: ignore[union-attr]
    assert float(odd.learn(rollout(odd)[1])["train/asymmetry"]) < 1e-5


def test_engines_that_know_no_mirrored_steps_step_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurl.engine.obstacles.use_triton", lambda tensor: True)
    reason = "it does not know mirrored steps, symmetry is task"
    for obstacle in (cpu_ppo_obstacle, fused_update_obstacle):
        assert obstacle(made()) == reason
        assert obstacle(made(symmetry_augment=False, symmetry_coef=0.1)) == reason
        # what is only measured is no part of an update
        assert obstacle(made(symmetry_augment=False)) == obstacle(made(has_mirror=False))


@pytest.mark.parametrize("settings", [{}, {"symmetry_augment": False}], ids=str)
def test_a_run_logs_the_asymmetry_and_resumes(tmp_path: Path, settings: dict[str, Any]) -> None:
    logged = Logged()
    name = f"{TASKS}:mirror"
    run = small_run(tmp_path, 2, symmetry=name, callbacks=[logged], **settings)
    assert len(logged.asymmetry) == 2
    assert min(logged.asymmetry) > 0.0
    assert resume(tmp_path, total_steps=3 * 128, symmetry="task").outcome.steps == 3 * 128
    # a policy needs no mirror to act
    assert run.policy().act(torch.zeros(2, 3).numpy()).shape == (2, 1)


@pytest.mark.parametrize(
    ("env", "name"), [("pendulum", "task"), (f"{TASKS}:Hidden", f"{TASKS}:three")]
)
def test_replaying_algorithms_log_it_too(tmp_path: Path, env: str, name: str) -> None:
    settings: dict[str, Any] = {"updates": 4, "batch_size": 8, "learning_starts": 8}
    names = ("actor_network", "critic_network")
    logged = Logged()
    train(
        "sac", env, run_dir=str(tmp_path), num_envs=8, total_steps=64, symmetry=name,
        eval_episodes=0, quiet=True, device="cpu", log_every=0.0, replay_size=100, horizon=2,
        callbacks=[logged], **settings, **{name: {"hidden": [8]} for name in names},
    )  # fmt: skip
    assert len(logged.asymmetry) == 4
    assert min(logged.asymmetry) > 0.0


# ---- what is no mirror ----


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_involution", r"mirroring obs twice does not .* number 2: wanted .*, got "),
        ("rotates_actions", r"mirroring action twice does not .* number 0: wanted .*, got "),
        (
            "transposed",
            r"wanted \(obs, action\) for obs \[64, 3\], action \[64, 1\], got obs \[3, 64\]",
        ),
        ("one_value", "got Tensor"),
        ("in_place", "changes obs in place.* it must return a new tensor"),
        (
            "fails",
            r"raised IndexError for obs \[64, 3\].*symmetric_tasks.py:\d+: return obs\[:, 7\]",
        ),
        ("by_other_rows", "mirrors obs of a row by other rows"),
        ("by_obs", "mirrors action by what is in obs"),
        ("out_of_box", r"takes actions out of Box\(-2.0, 2.0"),
        ("mirrored", f"{TASKS} has no function mirrored; did you mean mirror"),
    ],
)
def test_a_function_that_is_no_mirror_is_named_with_what_is_wrong(name: str, expected: str) -> None:
    algorithm = made(has_mirror=False)
    with pytest.raises(UsageError, match=f"symmetry {TASKS}:{name}.*{expected}"):
        algorithm.set_symmetry(find_mirror(f"{TASKS}:{name}", None), f"{TASKS}:{name}")


def test_names_and_policies_without_a_mirror_are_refused(tmp_path: Path) -> None:
    tiny: dict[str, Any] = {"num_envs": 8, "device": "cpu", "quiet": True, "root": str(tmp_path)}
    for name, env, expected in (
        ("task", f"{TASKS}:NoMirror", r"needs a method mirror\(obs, action\) of NoMirror"),
        ("mirror", "pendulum", "it must be MODULE:FUNCTION, as my_task:mirror, or task"),
        ("no_such_module:mirror", "pendulum", "no_such_module cannot be imported"),
        (
            f"{TASKS}:mirror",
            f"{TASKS}:Hidden",
            r"must be mirrored too: wanted mirror\(obs, action, ",
        ),
    ):
        with pytest.raises(UsageError, match=expected):
            train("ppo", env, symmetry=name, **tiny)
    memory = NetworkConfig(memory="gru")
    with pytest.raises(UsageError, match="needs a policy without memory"):
        made(network=memory)
    with pytest.raises(UsageError, match="compares mean actions of a Box"):
        made(CartPole(16), symmetry_coef=0.1)
    with pytest.raises(UsageError, match=r"symmetry_coef 0\.1 needs the mirror of the task"):
        PPOConfig(symmetry_coef=0.1)
    unloaded = PPO(
        PPOConfig(horizon=8, symmetry="task"),
        Pendulum.single_observation_space,
        Pendulum.single_action_space,
        16,
        CPU,
    )
    with pytest.raises(UsageError, match=r"symmetry task is not loaded: call set_symmetry\(\)"):
        rollout(unloaded)


def test_a_squashed_policy_needs_signs_and_permutations() -> None:
    space = Box(-1.0, 1.0, (2,))
    spaces = Pendulum.single_observation_space, space, None

    def swap(obs: Tensor, action: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return obs * SIGNS, None if action is None else action.flip(1)

    def turn(obs: Tensor, action: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Small actions only."""
        turned = None if action is None else torch.where(action.abs() < 0.5, -action, action)
        return obs * SIGNS, turned

    scaler = ActionScaler(space)
    Symmetry(swap, "swap", spaces, scaler, CPU, is_squashed=True)
    Symmetry(turn, "turn", spaces, scaler, CPU)
    with pytest.raises(
        UsageError, match=r"turn does not only permute actions .* which squash needs"
    ):
        Symmetry(turn, "turn", spaces, scaler, CPU, is_squashed=True)


def test_with_privileged_observations_a_run_trains(tmp_path: Path) -> None:
    run = small_run(tmp_path, 1, env=f"{TASKS}:Hidden", symmetry=f"{TASKS}:three")
    assert run.outcome.steps == 128


def test_what_uses_no_symmetry_says_so() -> None:
    assert "symmetry" not in algorithm_names()
    env = CartPole(8)
    spaces = env.single_observation_space, env.single_action_space
    pqn = make_algorithm("pqn", config_class(resolve_algorithm("pqn"))(), *spaces, 8)
    with pytest.raises(UsageError, match="PQN does not use the symmetry of a task: leave out task"):
        pqn.set_symmetry(mirror, "task")
