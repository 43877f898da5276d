"""Walks on a line, many at once in torch, whose every step is known; the interfaces of simulators
stand around them, with their traps.
"""

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor

from gpurl.envs.torch_vector import TorchVector

LENGTH = 5  # steps of an episode
ANY = {"low": -np.inf, "high": np.inf, "dtype": np.float32}


def act(obs: Tensor) -> Tensor:
    """The actions [N, 1] that all tests take: a function of obs [N, 2], so that a step that does
    not count shifts nothing.
    """
    return torch.sin(9.0 * obs[:, :1] + 20.0 * obs[:, 1:])


class Walks:
    """obs is (place, clock / 10), state is 2 place + number; an episode ends beyond 1, or after
    LENGTH steps, or by both in one step.
    """

    def __init__(self, num_envs: int) -> None:
        self.number = torch.arange(num_envs)
        self.place, self.seed = torch.zeros(num_envs), 0
        self.clock, self.episode = torch.zeros(2, num_envs, dtype=torch.int64)

    def restart(self, index: Tensor | None = None, seed: int | None = None) -> None:
        index = self.number if index is None else index.long()
        if seed is not None:
            self.seed, self.episode[index] = seed, 0
        self.place[index] = ((5 * self.number + 3 * self.episode + self.seed) % 11 - 5)[
            index
        ] / 10.0
        self.clock[index] = 0
        self.episode[index] += 1

    def advance(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(reward, terminated, truncated), each [N]; both flags may be set."""
        self.place += 0.5 * actions[:, 0]
        self.clock += 1
        return self.place - 0.1 * actions[:, 0], self.place.abs() > 1.0, self.clock >= LENGTH

    def obs(self) -> Tensor:
        return torch.stack((self.place, self.clock / 10.0), dim=1)

    def state(self) -> Tensor:
        return (2.0 * self.place + self.number).unsqueeze(1)


def by_hand(seed: int, number: int, steps: int) -> list[tuple[float, ...]]:
    """Transitions of one walk in plain numbers: obs, reward, next obs, terminated, truncated,
    state, next state.
    """
    rows: list[tuple[float, ...]] = []
    episode = 0
    while len(rows) < steps:
        place, ended = ((5 * number + 3 * episode + seed) % 11 - 5) / 10.0, False
        for clock in range(LENGTH):
            action = math.sin(9.0 * place + 2.0 * clock)
            after = place + 0.5 * action
            ended, out_of_time = abs(after) > 1.0, clock + 1 == LENGTH
            flags = (float(ended), float(out_of_time and not ended))
            rows.append(
                (
                    place,
                    clock / 10,
                    after - 0.1 * action,
                    after,
                    (clock + 1) / 10,
                    *flags,
                    2 * place + number,
                    2 * after + number,
                )
            )
            place = after
            if ended:
                break
        episode += 1
    return rows[:steps]


def played(env: TorchVector, seed: int, steps: int) -> list[list[tuple[float, ...]]]:
    """The transitions of every environment that the adapter calls real, as `by_hand` has them;
    without a state without these.
    """
    rows: list[list[tuple[float, ...]]] = [[] for _ in range(env.num_envs)]
    obs, info = env.reset(seed=seed)
    for _ in range(steps):
        timestep = env.step(act(obs))
        valid = timestep.info.get("valid", torch.ones(env.num_envs, dtype=torch.bool))
        flags = (timestep.terminated[:, None], timestep.truncated[:, None])
        columns = [obs, timestep.reward[:, None], timestep.info["final_obs"], *flags]
        columns += [info["state"], timestep.info["final_state"]] if "state" in info else []
        table = torch.cat([column.float() for column in columns], dim=1).tolist()
        for index in valid.nonzero().squeeze(1).tolist():
            rows[index].append(tuple(table[index]))
        obs, info = timestep.obs, timestep.info
    return rows


def assert_some_can_restart(env: TorchVector) -> None:
    """Those of the mask begin anew, also where an episode had just ended, and the others go on."""
    obs, _ = env.reset(seed=3)
    for steps in (1, 2, 1, 3):
        for _ in range(steps):
            obs, _, terminated, truncated, _ = env.step(act(obs))
        mask = (torch.arange(env.num_envs) == steps) | terminated | truncated
        before, (obs, info) = obs.clone(), env.reset(options={"reset_mask": mask})
        assert torch.equal(obs[~mask], before[~mask])
        assert not obs[mask, 1].any()
        assert not env.episode_length_buf[mask].any()
        assert ("state" in info) == (env.single_state_space is not None)
        timestep = env.step(torch.zeros(env.num_envs, 1))
        assert timestep.info.get("valid", torch.ones_like(mask))[mask].all()
        assert torch.allclose(
            timestep.info["final_obs"][mask], obs[mask] + torch.tensor([0.0, 0.1])
        )
        obs = timestep.obs


def assert_true_transitions(
    env: TorchVector, steps: int = 30, seed: int = 3, exact: bool = True
) -> None:
    """exact=False: where an episode ended, what was observed before the last step stands in for
    what came of it.
    """
    assert env.single_state_space is None or env.single_state_space.shape == (1,)
    endings = np.zeros(2)
    for index, rows in enumerate(played(env, seed, steps)):
        expected = np.array(by_hand(seed, index, len(rows)))
        endings += expected[:, 5:7].sum(0)
        if not exact:
            ended = expected[:, 5:7].any(1)
            expected[ended, 3:5], expected[ended, 8] = expected[ended, 0:2], expected[ended, 7]
        assert (
            len(rows) == steps
            if env.autoreset_mode != AutoresetMode.NEXT_STEP
            else steps / 2 < len(rows) < steps
        )
        np.testing.assert_allclose(rows, expected[:, : len(rows[0])], rtol=1e-4, atol=1e-4)
    assert (endings > 3).all(), "both kinds of endings were to be seen"


class WalkVector(gymnasium.vector.VectorEnv):
    """Gymnasium's vector API in each of its modes; reward [N, 1], and every tensor is written over
    in the next step.
    """

    single_observation_space, single_action_space = (
        Box(shape=(2,), **ANY),
        Box(-1.0, 1.0, (1,), np.float32),
    )

    def __init__(self, num_envs: int, mode: AutoresetMode, **metadata: Any) -> None:
        self.num_envs, self.walks, self.mode = num_envs, Walks(num_envs), mode
        self.metadata = {"autoreset_mode": mode, **metadata}
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.buffers = (
            torch.zeros(num_envs, 2),
            torch.zeros(num_envs, 1),
            *torch.zeros(2, num_envs, dtype=torch.bool),
        )
        self.ended = torch.zeros(num_envs, dtype=torch.bool)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask")
        index = None if mask is None else mask.nonzero().squeeze(1)
        self.walks.restart(index, seed)
        self.ended = self.ended & False if mask is None else self.ended & ~mask
        self.buffers[0].copy_(self.walks.obs())
        return self.buffers[0], {}

    def step(self, actions: Any) -> Any:
        again = self.ended.nonzero().squeeze(1)
        reward, terminated, truncated = self.walks.advance(actions.clamp_(-1.0, 1.0))
        info: dict[str, Any] = {}
        if self.mode == AutoresetMode.NEXT_STEP and len(again):
            self.walks.restart(again)
            reward[again], terminated[again], truncated[again] = 99.0, False, False
        done = self.ended = terminated | truncated
        if self.mode == AutoresetMode.NEXT_STEP:
            terminated[again] = True  # junk, as all of a step that was none
        if self.mode == AutoresetMode.SAME_STEP and bool(done.any()):
            info = {"final_obs": self.walks.obs(), "_final_obs": done}
            self.walks.restart(done.nonzero().squeeze(1))
        for buffer, value in zip(
            self.buffers, (self.walks.obs(), reward.unsqueeze(1), terminated, truncated)
        ):
            buffer.copy_(value)
        return *self.buffers, info


class PickWalks(gymnasium.vector.VectorEnv):
    """As a package's own vector environment: nested observations, `final_observation` in steps with
    an ending, a partial reset by `env_idx`, the clock inside.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        num_envs: int,
        max_episode_steps: int = LENGTH,
        obs_mode: str = "dict",
        auto_reset: bool = True,
    ) -> None:
        assert max_episode_steps == LENGTH
        self.num_envs, self.obs_mode, self.auto_reset = num_envs, obs_mode, auto_reset
        self.walks = Walks(num_envs)
        one = Box(shape=(1,), **ANY)
        nested = Dict({"agent": Dict({"place": one}), "extra": Dict({"time": one})})
        self.single_observation_space: Any = (
            nested if obs_mode == "dict" else Box(shape=(2,), **ANY)
        )
        self.single_action_space = Box(-1.0, 1.0, (1,), np.float32)
        self.elapsed_steps = self.walks.clock

    def observe(self) -> Any:
        place, time = self.walks.obs().split(1, dim=1)
        return (
            {"agent": {"place": place}, "extra": {"time": time}}
            if self.obs_mode == "dict"
            else self.walks.obs()
        )

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.walks.restart((options or {}).get("env_idx"), seed)
        return self.observe(), {"reconfigure": False}

    def step(self, actions: Any) -> Any:
        reward, terminated, truncated = self.walks.advance(actions)
        info: dict[str, Any] = {"success": terminated.clone(), "elapsed_steps": self.elapsed_steps}
        obs, done = self.observe(), terminated | truncated
        if self.auto_reset and bool(done.any()):
            final, final_info = obs, info
            obs, info = self.reset(options={"env_idx": self.walks.number[done]})
            info |= {
                "final_observation": final,
                "final_info": final_info,
                "_final_observation": done,
            }
        return obs, reward, terminated, truncated, info


class Walked(TorchVector):
    """A module of one's own; of the time limit inside, it knows itself."""

    max_episode_steps = LENGTH

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        mode: str = "SameStep",
    ) -> None:
        super().__init__(num_envs, device, seed, env=WalkVector(num_envs, AutoresetMode(mode)))


gymnasium.register("Walks/Pick-v1", vector_entry_point=PickWalks, max_episode_steps=LENGTH)
