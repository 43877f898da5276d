"""Whole runs of algorithms that replay: resumed they are as never stopped, NaN stays out, what does
not fit is refused.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, MultiDiscrete
from torch import Tensor

from gpurl import memory
from gpurl.algorithms import config_class, make_algorithm, resolve_algorithm
from gpurl.algorithms.discrete_sac import DiscreteSAC
from gpurl.algorithms.sac import SAC
from gpurl.algorithms.td3 import TD3
from gpurl.api import resume, train
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.envs.pendulum import Pendulum
from gpurl.envs.torch_env import State, TorchEnv
from gpurl.errors import EnvError, NonFiniteError, UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.policy import load
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from tests.guards.test_misbehaving_envs import BrokenWalk
from tests.small_runs import off_policy, play, small_settings
from tests.tiny_envs import AlternatingEnv, ContinuousAlternating, RandomWalk

SMALL_RUN: dict[str, Any] = {
    "num_envs": 8,
    "horizon": 2,
    "quiet": True,
    "device": "cpu",
    "eval_episodes": 2,
    "log_every": 0.0,
}


def test_without_its_replay_a_run_fills_it_anew_before_it_learns(tmp_path: Path) -> None:
    settings = SMALL_RUN | small_settings("td3") | {"learning_starts": 64}
    run = train("td3", "pendulum", run_dir=str(tmp_path), total_steps=128, **settings)
    updates = int(load_checkpoint(run.folder)[0]["training"]["num_updates"])
    assert updates == 4 * 5  # after 64, 80, 96, 112 and 128 transitions
    resume(tmp_path, total_steps=176)
    assert int(load_checkpoint(tmp_path)[0]["training"]["num_updates"]) == updates
    resume(tmp_path, total_steps=240)
    assert int(load_checkpoint(tmp_path)[0]["training"]["num_updates"]) == updates + 4 * 1


def test_actions_are_random_until_learning_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 transitions are there after two iterations of 16. A run that goes on without its replay
    acts by its policy.
    """
    drawn, right = list[int](), TD3.random_action

    def random_action(self: TD3) -> Tensor:
        drawn.append(trainer.engine.iteration)
        return right(self)

    monkeypatch.setattr(TD3, "random_action", random_action)
    settings = make_settings(
        "td3",
        "pendulum",
        **(SMALL_RUN | small_settings("td3") | {"learning_starts": 24, "threads": 1}),
    )
    trainer = make_trainer(settings, torch.device("cpu"))
    trainer.start()
    for _ in range(4):
        trainer.iterate()
    assert drawn == [0, 0, 1, 1]
    parts, trainer = trainer.state(), make_trainer(settings, torch.device("cpu"))
    trainer.restore(parts)
    trainer.iterate()
    assert (trainer.engine.stored, len(drawn)) == (16, 4)


def test_a_policy_needs_no_replay(tmp_path: Path) -> None:
    run = train(
        "sac",
        "pendulum",
        run_dir=str(tmp_path),
        total_steps=32,
        **(SMALL_RUN | small_settings("sac")),
    )
    policy = load(run.folder)
    assert not hasattr(policy.algorithm, "replay")
    assert policy.act(np.zeros(3, np.float32)).shape == (1,)
    assert isinstance(policy.value(np.zeros(3, np.float32)), float)


class Counting(TorchEnv):
    """Shows how many steps its episode has, so that a transition leads one further; tells none of
    its state where `forgets`.
    """

    single_observation_space, single_action_space = (
        Box(0.0, np.inf, (1,), np.float32),
        Box(-1.0, 1.0, (1,), np.float32),
    )
    breaks_at, forgets, ill_at = 0, False, 0  # calls of step
    calls = 0

    def initial_state(self, rng: CounterRandom) -> State:
        return {"steps": torch.zeros(rng.num_envs, 1)}

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        self.calls += 1
        if self.calls == self.breaks_at:
            raise EnvError("broken")
        reward = torch.full((len(action),), torch.nan if self.calls == self.ill_at else 1.0)
        return {"steps": state["steps"] + 1.0}, reward, torch.zeros(len(action), dtype=torch.bool)

    def observe(self, state: State) -> Tensor:
        return state["steps"]

    def state_dict(self) -> dict[str, Any]:
        return {} if self.forgets else super().state_dict()


def stored_transitions(folder: Path, **settings: Any) -> tuple[Tensor, Tensor]:
    """(obs, next_obs) of what the newest checkpoint's replay gives to learn from."""
    algorithm = off_policy("td3", Counting(8), **settings)
    algorithm.make_buffer()
    algorithm.load_replay_state(load_checkpoint(folder)[0]["replay"])
    batch = algorithm.replay.sample(500, 0.9)
    return tuple(batch[name][batch["weight"] > 0, 0] for name in ("obs", "next_obs"))  # type: ignore[return-value]


@pytest.mark.parametrize("change", [{"breaks_at": 11}, {"forgets": True}, {"ill_at": 11}], ids=str)
def test_no_transition_leads_over_what_was_not_stored(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout that breaks off, environments that begin anew at a resume or because they gave
    NaN.
    """
    for name, value in change.items():
        monkeypatch.setattr(Counting, name, value)
    kept = {"horizon": 4, "learning_starts": 10_000, "replay_size": 512, "save_replay": True}
    settings = (
        SMALL_RUN
        | small_settings("td3")
        | kept
        | {"total_steps": 4 * 32, "eval_episodes": 0, "nan": "reset-envs"}
    )
    name = "tests.algorithms.test_off_policy_runs:Counting"
    if "breaks_at" in change:
        with pytest.raises(EnvError, match="broken"):
            train("td3", name, run_dir=str(tmp_path), **settings)
        monkeypatch.setattr(Counting, "breaks_at", 0)
    else:
        train("td3", name, run_dir=str(tmp_path), **settings)
    resume(tmp_path, total_steps=8 * 32)
    obs, next_obs = stored_transitions(tmp_path, **kept)
    assert float(obs.max()) > 10.0
    assert torch.equal(next_obs - obs, torch.ones_like(obs))


@pytest.mark.parametrize(("replay_size", "count"), [(48, 0), (32, 1)])
def test_a_note_says_if_transitions_are_lost_before_the_first_update(
    replay_size: int, count: int
) -> None:
    sizes = {"learning_starts": 48, "replay_size": replay_size, "eval_episodes": 0, "threads": 1}
    settings = make_settings("dqn", "cart_pole", **(small_settings("dqn") | sizes))
    notes = make_trainer(settings, torch.device("cpu")).engine.notes
    text = "learning_starts 48 is more than replay_size 32: the first transitions are overwritten"
    assert sum(text in note for note in notes) == count


def test_an_update_that_breaks_off_can_be_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step of the third iteration: the first one is kept, so is the rollout in the
    replay, the iteration does not count.
    """
    kept = {"horizon": 4, "learning_starts": 32, "replay_size": 512, "save_replay": True}
    settings = (
        SMALL_RUN | small_settings("td3") | kept | {"total_steps": 4 * 32, "eval_episodes": 0}
    )
    real, calls = TD3.update_step, list[int]()

    def update_step(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 * 4 + 2:
            raise RuntimeError("broken")
        return real(*arguments, **named)

    monkeypatch.setattr(TD3, "update_step", update_step)
    with pytest.raises(RuntimeError, match="broken"):
        train(
            "td3",
            "tests.algorithms.test_off_policy_runs:Counting",
            run_dir=str(tmp_path),
            **settings,
        )

    def state() -> tuple[int, ...]:
        """(env steps, updates of whole iterations, steps of the critics, env steps that the replay
        saw)
        """
        parts = load_checkpoint(tmp_path)[0]
        training = parts["training"]
        seen = int(parts["replay"]["counts"][0]) * 8
        return (
            parts["trainer"]["steps"],
            int(training["num_updates"]),
            int(training["optimizers"]["critic"]["step"]),
            seen,
        )

    assert state() == (64, 8, 9, 96)
    resume(tmp_path)
    assert state() == (128, 16, 17, 160)
    obs, next_obs = stored_transitions(tmp_path, **kept)
    assert float(obs.max()) > 10.0
    assert torch.equal(next_obs - obs, torch.ones_like(obs))


@pytest.mark.parametrize("fault", ["nan reward", "nan obs", "inf obs"])
@pytest.mark.parametrize("horizon", [1, 4])
def test_nan_of_an_environment_never_reaches_weights_or_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, horizon: int
) -> None:
    monkeypatch.setattr(BrokenWalk, "fault", fault)
    settings = (
        SMALL_RUN
        | small_settings("td3")
        | {"horizon": horizon, "save_replay": True, "total_steps": 96, "eval_episodes": 0}
    )
    name = "tests.guards.test_misbehaving_envs:BrokenWalk"
    with pytest.raises(NonFiniteError, match="gave NaN or infinity"):
        train("td3", name, run_dir=str(tmp_path / "stop"), **settings)
    run = train("td3", name, run_dir=str(tmp_path / "skip"), nan="reset-envs", **settings)
    for folder in (tmp_path / "stop", run.folder):
        parts, _ = load_checkpoint(folder)
        kept = torch.utils._pytree.tree_leaves((parts["model"], parts["training"], parts["replay"]))
        assert all(bool(value.isfinite().all()) for value in kept if isinstance(value, Tensor))
    assert bool((parts["replay"]["flags"] & 4).any())


# ---- precision ----


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("sac", "pendulum"),
        ("sac", "cart_pole"),
        ("td3", "pendulum"),
        ("rainbow", "cart_pole"),
        ("pqn", "cart_pole"),
    ],
)
def test_bf16_rounds_products_and_keeps_weights(name: str, env: str, tmp_path: Path) -> None:
    settings = SMALL_RUN | small_settings(name) | {"horizon": 2, "total_steps": 96}
    exact, rounded = (
        load_checkpoint(
            train(name, env, run_dir=str(tmp_path / each), precision=each, **settings).folder
        )[0]
        for each in ("float32", "bf16")
    )
    weights = [name for name in exact["model"] if name.endswith("weight")]
    assert all(rounded["model"][name].dtype == torch.float32 for name in weights)
    assert any(not torch.equal(exact["model"][name], rounded["model"][name]) for name in weights)
    for name in weights:
        torch.testing.assert_close(
            rounded["model"][name], exact["model"][name], rtol=0.0, atol=0.05
        )


def test_bf16_is_refused_where_no_layer_computes_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = off_policy("sac", RandomWalk(4))
    monkeypatch.setattr(algorithm, "modules", lambda: iter(()))
    with pytest.raises(UsageError, match="SAC has no layers that compute in bf16, only in float32"):
        algorithm.set_precision("bf16")


# ---- refusals ----


@pytest.mark.parametrize(
    ("name", "env", "settings", "message"),
    [
        (
            "td3",
            "cart_pole",
            {},
            r"TD3 needs a Box action space, this one is Discrete\(2\); ppo and dqn take a Discrete",
        ),
        (
            "dqn",
            "pendulum",
            {},
            r"DQN needs a Discrete action space, this one is Box.*ppo, td3 and sac take a Box",
        ),
        ("rainbow", "pendulum", {}, "Rainbow needs a Discrete action space"),
        ("pqn", "pendulum", {}, "PQN needs a Discrete action space"),
        (
            "discrete_sac",
            "pendulum",
            {},
            r"DiscreteSAC needs a Discrete action space.*sac take a Box",
        ),
        (
            "discrete_sac",
            "cart_pole",
            {"target_entropy": 1.0},
            "target_entropy 1.0 is more than 0.693, the entropy of 2 equally likely actions",
        ),
        (
            "vdn",
            "cart_pole",
            {},
            r"VDN needs a MultiDiscrete action space.*ppo and dqn take a Discrete",
        ),
        (
            "sac",
            "mountain_car_continuous",
            {"batch_size": 6000},
            "batch_size 6000 is more than learning_starts 5000",
        ),
        (
            "sac",
            "chasing",
            {"replay_size": 100},
            "batch_size 512 is more than replay_size 100",
        ),
        (
            "td3",
            "pendulum",
            {"updates": 3, "horizon": 4},
            "policy_delay 2 updates, but updates 3 is not a multiple of it: with horizon 8 and "
            "updates 6 there are",
        ),
        ("redq", "chasing", {"target_subset": 11}, "target_subset 11 is more than num_critics 10"),
        ("sac", "pendulum", {"atoms": 1}, "atoms must be 0 or at least 2"),
        ("dqn", "cart_pole", {"atoms": 5, "quantiles": 5}, "two kinds of distribution"),
        ("sac", "pendulum", {"fit_returns": 0.1, "horizon": 1}, "fit_returns needs a rollout"),
        (
            "mod_sac",
            "pendulum",
            {"policy_delay": 2, "updates": 2},
            "decides by itself when the actor is updated",
        ),
        (
            "ddpg",
            "pendulum",
            {"noise_std_range": [0.5, 0.1]},
            "two numbers above 0, the smaller first",
        ),
        (
            "dqn",
            "cart_pole",
            {"epsilon_ladder": True, "network": {"noisy": True}},
            "epsilon_ladder would have no effect: leave out one of them",
        ),
        ("sac", "cart_pole", {"atoms": 11}, "leave out atoms 11"),
        ("sac", "pendulum", {"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ("td3", "pendulum", {"tau": 0.0}, "tau must be above 0, got 0.0"),
        (
            "td3",
            "pendulum",
            {"final_obs_fraction": 1.5},
            "final_obs_fraction must be from 0 to 1, got 1.5",
        ),
        (
            "td3",
            "pendulum",
            {"n_step": 101, "replay_size": 400},
            "n_step 101 is more than replay_size 400 holds, 100 steps of 4",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    name: str, env: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        train(
            name,
            env,
            run_dir=str(tmp_path),
            quiet=True,
            num_envs=4,
            total_steps=8,
            device="cpu",
            **settings,
        )


def test_free_memory_is_known() -> None:
    free = memory.available_bytes(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50


def test_a_saved_replay_of_another_environment_is_refused() -> None:
    small, other = off_policy("sac", RandomWalk(4)), off_policy("sac", ContinuousAlternating(4))
    for algorithm, env in ((small, RandomWalk(4)), (other, ContinuousAlternating(4))):
        play(algorithm, env, 2, learns=False)
    with pytest.raises(
        UsageError, match="the saved replay is of another environment or size: its obs is"
    ):
        other.replay.load_state_dict(small.replay.state_dict())
    prioritized = off_policy("sac", RandomWalk(4), prioritized=True)
    prioritized.make_buffer()
    with pytest.raises(UsageError, match="has no priorities"):
        prioritized.replay.load_state_dict(small.replay.state_dict())
    shorter = off_policy("sac", RandomWalk(4), replay_size=64)
    shorter.make_buffer()
    play(full := off_policy("sac", RandomWalk(4), replay_size=96), RandomWalk(4), 30, learns=False)
    with pytest.raises(UsageError, match="another environment or size"):
        shorter.replay.load_state_dict(full.replay.state_dict())


def test_overwritten_transitions_count_as_stored_after_a_resume() -> None:
    settings: dict[str, Any] = {"replay_size": 64, "save_replay": True}
    play(played := off_policy("sac", RandomWalk(4), **settings), RandomWalk(4), 30, learns=False)
    resumed = off_policy("sac", RandomWalk(4), **settings)
    resumed.make_buffer()
    assert resumed.load_replay_state(played.replay_state()) == 30 * 4  # of which 64 are left


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_errors_that_are_no_numbers_leave_priorities_as_they_were(bad: float) -> None:
    algorithm: Any = off_policy("dqn", AlternatingEnv(4), prioritized=True)
    play(algorithm, AlternatingEnv(4), 3, learns=False)
    replay, index = algorithm.replay, torch.arange(4)
    before = replay.priority.clone()
    replay.update_priorities(index, torch.tensor([3.0, bad, 3.0, 3.0]))
    changed = (replay.priority != before).view(-1)
    assert changed.nonzero().flatten().tolist() == [0, 2, 3]
    assert bool(replay.priority.isfinite().all())
    assert bool(replay.max_priority.isfinite())


def test_sac_takes_the_form_of_its_space() -> None:
    assert type(off_policy("sac", AlternatingEnv(2))) is DiscreteSAC
    assert type(off_policy("sac", RandomWalk(2))) is SAC


def test_a_resume_refuses_another_shape(tmp_path: Path) -> None:
    settings = SMALL_RUN | small_settings("sac")
    train("sac", "pendulum", run_dir=str(tmp_path), total_steps=32, **settings)
    with pytest.raises(UsageError, match=r"num_critics 2, this run 3"):
        resume(tmp_path, num_critics=3, total_steps=64)


def test_nested_settings_lie_over_what_the_algorithm_starts_with() -> None:
    """`--network.hidden` of Rainbow must not turn off dueling."""
    config = make_settings("rainbow", "cart_pole", network={"hidden": [32]}).algorithm_config
    assert (config.network.hidden, config.network.dueling, config.network.noisy) == (
        (32,),
        True,
        True,
    )


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ("catch", (64, 1_000_000)),
        ("mountain_car_continuous", (32, 50_000)),
        ("pendulum", (64, 40_000)),
        ("gymnasium_cpu:Pendulum-v1", (8, 40_000)),
        ("gymnasium_cpu:LunarLanderContinuous-v3", (8, 500_000)),
        ("gymnasium_cpu:CarRacing-v3", (8, 200_000)),
    ],
)
def test_what_is_known_of_an_environment_lies_over_what_holds_for_all(
    env: str, expected: tuple[int, int]
) -> None:
    settings = make_settings("sac", env).train
    assert (settings.num_envs, settings.total_steps) == expected


def test_a_run_that_cannot_start_gives_back_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, closed = torch.get_num_threads(), list[int]()
    monkeypatch.setattr(Pendulum, "close", lambda self: closed.append(self.num_envs))
    with pytest.raises(UsageError, match="replay_size"):
        train(
            "sac",
            "pendulum",
            run_dir=str(tmp_path),
            num_envs=3,
            replay_size=10**14,
            threads=3,
            quiet=True,
            device="cpu",
        )
    assert torch.get_num_threads() == before
    assert 3 in closed


@pytest.mark.parametrize("name", ["fast_td3", "fast_sac", "flash_sac"])
def test_the_fast_ones_learn_from_a_thousand_environments_at_once(
    name: str, tmp_path: Path
) -> None:
    """Four steps of 1024: all of them stored, some updates after each from the second on, episodes
    in 1024 phases.
    """
    networks = {network: {"hidden": [32]} for network in ("actor_network", "critic_network")}
    settings = make_settings(
        name,
        "chasing",
        num_envs=1024,
        batch_size=2048,
        learning_starts=2048,
        replay_size=8192,
        device="cpu",
        **networks,
    )
    trainer = make_trainer(settings, torch.device("cpu"))
    trainer.start()
    for _ in range(4):
        trainer.iterate()
    model: Any = trainer.algorithm
    assert model.replay.ring.counts.tolist()[0] == 4
    assert int(model.num_updates) == 3 * model.config.updates
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert len(model.replay.sample(2048, 0.99)["index"].unique()) > 1000


def test_a_multi_discrete_space_is_sent_to_what_takes_it() -> None:
    """And not from dqn to sac and back."""
    space, obs = MultiDiscrete([3, 3]), Box(-1.0, 1.0, (2,))
    for name in ("dqn", "pqn", "sac", "td3"):
        with pytest.raises(UsageError, match="ppo and a2c take a MultiDiscrete"):
            make_algorithm(name, config_class(resolve_algorithm(name))(), obs, space, 2)
