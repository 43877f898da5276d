"""stable-baselines3 on our environments: what it stores is what they gave. Skipped where it is not
here.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpurl import adapters
from gpurl.errors import UsageError
from tests.outward_truth import assert_same, env_of, truth

GAMMA = 0.9


def test_sb3_bootstraps_time_outs_from_the_true_successor() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.callbacks import BaseCallback

    stored: dict[str, Any] = {}

    class Keep(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            buffer = self.model.rollout_buffer
            stored.update(
                {
                    key: torch.tensor(getattr(buffer, key))
                    for key in ("observations", "actions", "rewards", "episode_starts")
                }
            )
            played = truth("chasing", stored["actions"].clamp(-1.0, 1.0))
            with torch.no_grad():
                value = self.model.policy.predict_values(played["final_obs"].flatten(0, 1)).view(
                    12, 4
                )
            stored["expected"] = played["reward"] + GAMMA * value * played["truncated"]
            stored["played"] = played

    model = sb3.PPO(
        "MlpPolicy",
        adapters.to_sb3(env_of("chasing")),
        n_steps=12,
        batch_size=48,
        n_epochs=1,
        gamma=GAMMA,
        device="cpu",
    )
    model.learn(48, callback=Keep())
    assert_same(stored["observations"], stored["played"]["obs"])
    assert_same(stored["rewards"], stored["expected"])
    assert_same(stored["episode_starts"][1:], stored["played"]["truncated"][:-1].float())
    assert stored["played"]["truncated"].sum() == 8
    assert [episode["l"] for episode in model.ep_info_buffer] == [5] * 8
    assert_same(
        [episode["r"] for episode in model.ep_info_buffer],
        stored["played"]["return"][stored["played"]["truncated"]],
    )


def test_sb3_replays_the_true_successor() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.utils import set_random_seed

    # weights and actions by which some episodes reach their time limit and some do not
    set_random_seed(0)
    model = sb3.DQN(
        "MlpPolicy",
        adapters.to_sb3(env_of("cart_pole")),
        buffer_size=400,
        learning_starts=60,
        device="cpu",
    )
    model.action_space.seed(0)
    model.learn(100)
    replay, size = model.replay_buffer, 25
    played = truth("cart_pole", replay.actions[:size, :, 0])
    for key, key_played in (
        ("observations", "obs"),
        ("next_observations", "final_obs"),
        ("rewards", "reward"),
        ("timeouts", "truncated"),
    ):
        assert_same(getattr(replay, key)[:size], played[key_played])
    assert_same(replay.dones[:size], played["terminated"] | played["truncated"])
    assert played["terminated"].any()
    assert played["truncated"].any()


def test_sb3s_calls_on_all_environments() -> None:
    pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecNormalize

    env = adapters.to_sb3(env_of("chasing"))
    env.seed(5)
    first = env.reset()
    assert (env.reset() != first).any(1).all()
    env.seed(5)
    np.testing.assert_array_equal(env.reset(), first)
    infos = env.step(np.zeros((4, 2), np.float32))[3]
    assert infos == [{}] * 4
    assert len({id(info) for info in infos}) == 4
    assert env.get_attr("max_episode_steps", [0, 2]) == [5, 5]
    assert env.env_is_wrapped(Monitor, 1) == [True]
    assert (env.has_attr("num_agents"), env.has_attr("nothing")) == (True, False)
    assert env.env_method("state_dict")[3].keys() == {"state", "clocks", "random"}
    with pytest.raises(
        UsageError, match="set_attr: the 4 environments are one object; leave out indices, got"
    ):
        env.set_attr("max_episode_steps", 3, indices=[1])
    env.set_attr("max_episode_steps", 3)
    env.set_options([{"reset_mask": np.ones(4, bool)}, {}, {}, {}])
    with pytest.raises(UsageError, match="take the same options"):
        env.reset()
    env.set_options()
    model = pytest.importorskip("stable_baselines3").PPO(
        "MlpPolicy", VecNormalize(env), n_steps=2, device="cpu"
    )
    assert evaluate_policy(model, env, 4, return_episode_rewards=True)[1] == [3] * 4


def test_sb3_with_a_seed_trains_alike() -> None:
    sb3 = pytest.importorskip("stable_baselines3")

    def trained() -> Tensor:
        shape = {"n_steps": 6, "batch_size": 12, "n_epochs": 1}
        model = sb3.PPO(
            "MlpPolicy", adapters.to_sb3(env_of("cart_pole")), **shape, seed=1, device="cpu"
        ).learn(48)
        return torch.nn.utils.parameters_to_vector(model.policy.parameters())

    assert torch.equal(trained(), trained())
