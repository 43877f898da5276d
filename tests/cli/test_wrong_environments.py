"""Environments with one mistake each, as users write them: `gpurl check-env` names it in one line,
once, with what was wanted, what was got and often what to do.
"""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurl.cli.main import main
from gpurl.envs.registry import make_env
from gpurl.errors import GpurlError, UsageError

TASK = """
import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gpurl.envs.torch_env import TorchEnv


class MyEnv(TorchEnv):
    single_observation_space = Box(-10.0, 10.0, (2,), np.float32)
    single_action_space = Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps = 100

    def initial_state(self, rng):
        return {"position": rng.uniform(-2.0, 2.0), "velocity": rng.uniform(-1.0, 1.0)}

    def transition(self, state, action, rng):
        velocity = state["velocity"] + 0.1 * action[:, 0]
        position = state["position"] + 0.1 * velocity
        reward = 1.0 - position.abs() - 0.1 * velocity.abs()
        terminated = position.abs() > 5.0
        return {"position": position, "velocity": velocity}, reward, terminated

    def observe(self, state):
        return torch.stack((state["position"], state["velocity"]), dim=1)
"""
FIRST = "rng.uniform(-2.0, 2.0)"
STACK = 'torch.stack((state["position"], state["velocity"]), dim=1)'
STATE = '{"position": position, "velocity": velocity}'
INIT = "    def initial_state"
LIMIT = "    max_episode_steps = 100\n"

GYM = """
import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gpurl.envs.gymnasium_cpu import GymnasiumCpu


class Single(gymnasium.Env):
    observation_space = Box(-10.0, 10.0, (2,), np.float32)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-2, 2, 2).astype(np.float32)
        self.t = 0
        return self.x, {}

    def step(self, action):
        self.t += 1
        self.x = (self.x + 0.1 * action).clip(-10, 10).astype(np.float32)
        reward = -float(abs(self.x[0]))
        return self.x, reward, bool(abs(self.x[0]) > 5.0), self.t >= 100, {}


class MyGym(GymnasiumCpu):
    def __init__(self, num_envs, device="cpu", seed=0):
        super().__init__(num_envs, device, seed, env=Single)
"""

MUJOCO = '''
import torch
from gpurl.envs.mujoco.base import MujocoEnv


class MySlider(MujocoEnv):
    model_file = """<mujoco><worldbody><body name="block"><joint type="slide" axis="1 0 0"/>
        <geom type="box" size="0.1 0.1 0.1" mass="1"/></body></worldbody>
        <actuator><motor joint="joint_0" ctrlrange="-2 2"/></actuator></mujoco>"""
    frame_skip = 20
    max_episode_steps = 100
    reset_noise_scale = 0.5

    def observe(self, data):
        return torch.cat((data.qpos, data.qvel), 1)

    def reward(self, data, before, action):
        return -data.qpos[:, 0].abs() - 0.1 * action[:, 0].square()

    def terminated(self, data):
        return data.qpos[:, 0].abs() > 2.0
'''.replace("joint type", 'joint name="joint_0" type')

VECTOR = """
import numpy as np
import torch
from gymnasium.spaces import Box
from gpurl.envs.vec_env import Timestep, VecEnv


class MyVec(VecEnv):
    single_observation_space = Box(-10.0, 10.0, (2,), np.float32)
    single_action_space = Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps = 10

    def __init__(self, num_envs, device="cpu", seed=0):
        super().__init__(num_envs, device)
        self.random = torch.Generator(self.device).manual_seed(seed)
        self.x = torch.zeros(num_envs, 2, device=self.device)
        self.returns = torch.zeros(num_envs, device=self.device)

    def first(self):
        return torch.rand(self.num_envs, 2, generator=self.random, device=self.device)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.random.manual_seed(seed)
        mask = (options or {}).get("reset_mask")
        if mask is None:
            mask = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.restart(mask)
        return self.x.clone(), {}

    def restart(self, mask):
        self.x = torch.where(mask[:, None], self.first(), self.x)
        self.returns.masked_fill_(mask, 0.0)
        self.episode_length_buf.masked_fill_(mask, 0)

    def step(self, actions):
        self.x = (self.x + 0.1 * actions).clamp(-10.0, 10.0)
        reward = -self.x[:, 0].abs()
        self.returns += reward
        self.episode_length_buf += 1
        terminated = self.x[:, 0].abs() > 5.0
        truncated = (self.episode_length_buf >= self.max_episode_steps) & ~terminated
        done = terminated | truncated
        episode = {"r": self.returns.clone(), "l": self.episode_length_buf.clone()}
        info = {
            "final_obs": self.x.clone(),
            "_final_obs": done,
            "time_outs": truncated,
            "episode": episode,
            "_episode": done,
        }
        self.restart(done)
        return Timestep(self.x.clone(), reward, terminated, truncated, info)
"""

SIMULATOR = """
import numpy as np
import torch
from gymnasium.spaces import Box
from gpurl.envs.torch_vector import TorchVector


class Sim:
    def __init__(self, num_envs, device):
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.single_observation_space = Box(-10.0, 10.0, (2,), np.float32)
        self.single_action_space = Box(-1.0, 1.0, (1,), np.float32)
        self.max_episode_steps = 10
        self.clock = torch.zeros(num_envs, dtype=torch.int64)
        self.x = torch.zeros(num_envs, 2)
        self.random = torch.Generator()

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random.manual_seed(seed)
        mask = (options or {}).get("reset_mask", torch.ones(self.num_envs, dtype=torch.bool))
        first = torch.rand(self.num_envs, 2, generator=self.random)
        self.x = torch.where(mask[:, None], first, self.x)
        self.clock.masked_fill_(mask, 0)
        return self.x.clone(), {}

    def step(self, action):
        self.x = (self.x + 0.1 * action).clamp(-10.0, 10.0)
        reward = -self.x[:, 0].abs()
        self.clock += 1
        terminated, truncated = self.x[:, 0].abs() > 5.0, self.clock >= 10
        final_obs = self.x.clone()
        obs, _ = self.reset(options={"reset_mask": terminated | truncated})
        return obs, reward, terminated, truncated, {"final_obs": final_obs}

    def close(self):
        pass


class MySim(TorchVector):
    def __init__(self, num_envs, device="cpu", seed=0):
        super().__init__(num_envs, device, seed, env=Sim(num_envs, device))
"""

Changes = tuple[tuple[str, str], ...]
WRONG: dict[str, tuple[str, Changes, str]] = {
    # ---- a TorchEnv ----
    "observation shape": (
        TASK,
        ((STACK, 'state["position"]'),),
        "MyEnv.observe: wanted a tensor of shape (8, 2), torch.float32, on cpu, got shape (8,)",
    ),
    "observation in float64": (
        TASK,
        ((STACK, STACK + ".double()"),),
        "MyEnv.observe: wanted a tensor of shape (8, 2), torch.float32, on cpu, got torch.float64",
    ),
    "observations of half the batch": (
        TASK,
        ((STACK, STACK + "[:4]"),),
        "MyEnv.observe: wanted a tensor of shape (8, 2)",
    ),
    "reward [n, 1]": (
        TASK,
        (("reward, terminated", "reward[:, None], terminated"),),
        "MyEnv.transition: reward: wanted a tensor of shape (8,), torch.float32, on cpu, got shape "
        "(8, 1): squeeze(-1) takes the last axis away",
    ),
    "reward a float": (
        TASK,
        (("reward, terminated", "float(reward[0]), terminated"),),
        "MyEnv.transition: reward: wanted a tensor of shape (8,), torch.float32, on cpu, got a "
        "float",
    ),
    "reward of numpy": (
        TASK,
        (("reward, terminated", "reward.numpy(), terminated"),),
        "got an ndarray",
    ),
    "float terminated": (
        TASK,
        (("reward, terminated", "reward, terminated.float()"),),
        "MyEnv.transition: terminated: wanted a tensor of shape (8,), torch.bool",
    ),
    "action [n, 1] meets [n]": (
        TASK,
        (("action[:, 0]", "action"),),
        "MyEnv.transition: position, as in initial_state: wanted a tensor of shape (8,), "
        "torch.float32, on cpu, got shape (8, 8): did an action [N, 1] meet a state [N]?",
    ),
    "Dict space and a tensor": (
        TASK,
        (("Box(-10.0, 10.0, (2,), np.float32)", "Dict(p=Box(-1.0, 1.0, (1,)))"),),
        "MyEnv.observe: wanted a dict of the observations ['p'], got a Tensor",
    ),
    "Tuple space": (
        TASK,
        (("Box(-10.0, 10.0, (2,), np.float32)", "Tuple((Box(-1.0, 1.0, (1,)),))"),),
        "MyEnv.single_observation_space: wanted a Box",
    ),
    "missing action space": (
        TASK,
        (("    single_action_space = Box(-1.0, 1.0, (1,), np.float32)\n", ""),),
        "MyEnv.single_action_space: wanted a gymnasium.Space, got nothing",
    ),
    "space of all": (
        TASK,
        (("single_observation_space", "observation_space"),),
        "observation_space is that of all environments, name it single_observation_space",
    ),
    "batched space": (
        TASK,
        (("Box(-10.0, 10.0, (2,),", "Box(-10.0, 10.0, (64, 2),"),),
        "a single space is that of one environment, without an axis of environments",
    ),
    "two classes": (
        TASK,
        (("class MyEnv", "class Other(TorchEnv):\n    pass\n\n\nclass MyEnv"),),
        "must define one public VecEnv class, found Other, MyEnv; name it as",
    ),
    "no class": (TASK, (("class MyEnv(TorchEnv)", "class MyEnv"),), "VecEnv class, found none"),
    "private class": (
        TASK,
        (("class MyEnv", "class _MyEnv"),),
        "found none; _MyEnv is private: its name begins with _",
    ),
    "syntax error": (
        TASK,
        (("def observe(self, state):", "def observe(self, state)"),),
        "cannot be imported: SyntaxError: expected ':' (",
    ),
    "error at import": (
        TASK,
        (("class MyEnv", "x = 1 / 0\n\n\nclass MyEnv"),),
        "cannot be imported: ZeroDivisionError: division by zero (",
    ),
    "NaN": (
        TASK,
        (("1.0 - position.abs()", "(position - 0.5).log()"),),
        "MyEnv.step: reward: wanted finite numbers, got NaN or infinity in environments [",
    ),
    "outside the Box": (
        TASK,
        (("Box(-10.0, 10.0,", "Box(-0.5, 0.5,"),),
        "MyEnv.reset: obs: wanted it inside Box(-0.5, 0.5, (2,), float32), got [",
    ),
    "changed in place": (
        TASK,
        (
            (
                "velocity = state[",
                "velocity = state['velocity'].add_(0.1)\n        velocity = state[",
            ),
        ),
        "MyEnv.transition: wanted what it is given left alone, got velocity changed in place",
    ),
    "torch.rand": (
        TASK,
        ((FIRST, "torch.rand(rng.num_envs)"),),
        "MyEnv.reset: obs: wanted the same first observations for the same seed, got others; "
        "random numbers come from rng",
    ),
    "missing state key": (
        TASK,
        ((STATE, '{"position": position}'),),
        "MyEnv.transition: state: wanted the keys ['position', 'velocity'], got ['position']",
    ),
    "two values": (
        TASK,
        (("reward, terminated\n", "reward\n"),),
        "MyEnv.transition: wanted (state, reward, terminated), got a tuple of 2",
    ),
    "no return": (
        TASK,
        ((f"        return {STATE}, reward, terminated", "        pass"),),
        "MyEnv.transition: wanted (state, reward, terminated), got nothing",
    ),
    "self.num_envs": (
        TASK,
        ((FIRST, "torch.zeros(self.num_envs)"),),
        "MyEnv.initial_state: position: wanted a tensor of 2 rows, as many as rng.num_envs, got a "
        "tensor of shape (8,): sizes come from rng.num_envs",
    ),
    "misspelt method": (
        TASK,
        (("def observe(", "def observation("),),
        "MyEnv: wanted a function observe(state), got none; is it observation?",
    ),
    "no function": (
        TASK,
        (("    def observe(", "    metrics = 3\n\n    def observe("),),
        "MyEnv: wanted a function metrics(state), got 3",
    ),
    "metrics without names": (
        TASK,
        (
            (
                "    def observe(",
                '    def metrics(self, state):\n        return state["position"]\n\n'
                "    def observe(",
            ),
        ),
        "MyEnv.metrics: wanted a dict of tensors by name, got a tensor of shape (8,)",
    ),
    "privileged space without a function": (
        TASK,
        ((LIMIT, f"    single_state_space = Box(-1.0, 1.0, (1,), np.float32)\n{LIMIT}"),),
        "MyEnv: wanted a function observe_state(state) for single_state_space, got none",
    ),
    "privileged observations without a space": (
        TASK,
        (
            (
                "    def observe(",
                f"    def observe_state(self, state):\n        return {STACK}\n\n    def observe(",
            ),
        ),
        "MyEnv: wanted a single_state_space, the Box of what observe_state gives, got none",
    ),
    "privileged space a tuple": (
        TASK,
        ((LIMIT, f"    single_state_space = (1,)\n    observe_state = len\n{LIMIT}"),),
        "MyEnv.single_state_space: wanted a gymnasium.Space or None, got (1,)",
    ),
    "privileged choices": (
        TASK,
        (
            (
                LIMIT,
                f"    single_state_space = Discrete(3)\n    observe_state = observe = len\n{LIMIT}",
            ),
        ),
        "MyEnv.single_state_space: wanted a Box, got Discrete(3)",
    ),
    "agents a text": (
        TASK,
        ((LIMIT, f'    num_agents = "3"\n{LIMIT}'),),
        "MyEnv.num_agents: wanted a whole number of at least 1, got '3'",
    ),
    "missing argument": (
        TASK,
        (("(self, state, action, rng)", "(self, state, action)"),),
        "MyEnv.transition: wanted the arguments (state, action, rng), got (state, action)",
    ),
    "reset and step of its own": (
        TASK,
        (
            ("def initial_state(self, rng)", "def reset(self, seed=None)"),
            ("def transition(self, state, action, rng)", "def step(self, action)"),
        ),
        "got a step of its own: that belongs to a VecEnv",
    ),
    "state a tensor": (
        TASK,
        (('return {"position": rng.uniform(-2.0, 2.0)', "return rng.normal((2,))  # {"),),
        "MyEnv.initial_state: wanted a dict of tensors by name, got a tensor of shape (2, 2)",
    ),
    "number in the state": (
        TASK,
        ((FIRST, "0.0"),),
        "position: wanted a tensor of 2 rows, as many as rng.num_envs",
    ),
    "dtype of the state": (
        TASK,
        ((FIRST, "rng.integers(0, 2)"),),
        "MyEnv.transition: position, as in initial_state: wanted a tensor of shape (8,), "
        "torch.int64, on cpu, got torch.float32",
    ),
    "n in the shape of rng": (
        TASK,
        ((FIRST, "rng.uniform(-2.0, 2.0, (rng.num_envs,))"),),
        "MyEnv.initial_state: position: wanted the same shape [n, ...] for every number of "
        "environments, got (2, 2) for 2 and (3, 3) for 3: the shape given to rng is that of one",
    ),
    "mean and deviation": (
        TASK,
        ((FIRST, "rng.normal(0.0, 1.0)"),),
        "TypeError: rng.normal(shape=()): takes from 1 to 2 positional arguments but 3 were given",
    ),
    "size of numpy": (
        TASK,
        ((FIRST, "rng.uniform(-2.0, 2.0, size=3)"),),
        "rng.uniform(low=0.0, high=1.0, shape=()): got an unexpected keyword argument 'size'",
    ),
    "shape first": (
        TASK,
        ((FIRST, "rng.uniform((2,))"),),
        "rng.uniform(low=0.0, high=1.0, shape=()): wanted low and high as numbers or tensors",
    ),
    "shape a number": (
        TASK,
        ((FIRST, "rng.normal(3)"),),
        "rng.normal(shape=()): wanted shape as a tuple, that of one environment, such as (3,)",
    ),
    "one limit": (
        TASK,
        ((FIRST, "rng.integers(5)"),),
        "rng.integers(low, high, shape=()): missing 1",
    ),
    "another name of a draw": (
        TASK,
        ((FIRST, "rng.randn()"),),
        "rng has no randn; its name here is rng.normal(). It has uniform(low=0.0, high=1.0, "
        "shape=()), normal(shape=()), integers(low, high, shape=())",
    ),
    "missing attribute": (
        TASK,
        (("+ 0.1 * velocity", "+ self.dt * velocity"),),
        "MyEnv.step raised AttributeError: 'MyEnv' object has no attribute 'dt' (",
    ),
    "if on a tensor": (
        TASK,
        (
            (
                "        terminated =",
                "        if reward > 0.0:\n            pass\n        terminated =",
            ),
        ),
        "each environment decides by itself in torch.where(condition, yes, no) (",
    ),
    "second axis of a choice": (
        TASK,
        (("Box(-1.0, 1.0, (1,), np.float32)", "Discrete(3)"),),
        "IndexError: too many indices for tensor of dimension 1; actions of Discrete(3) are [N]",
    ),
    "no super().__init__": (
        TASK,
        (
            (
                INIT,
                f'    def __init__(self, num_envs, device="cpu", seed=0):\n        pass\n\n{INIT}',
            ),
        ),
        "MyEnv: wanted num_envs, device and the batched spaces, got none; call super().__init__(",
    ),
    "option without a default": (
        TASK,
        (
            (
                INIT,
                "    def __init__(self, num_envs, device, seed, length):\n"
                f"        super().__init__(num_envs, device, seed)\n\n{INIT}",
            ),
        ),
        "needs a value of length, which MyEnv.__init__ gives no default",
    ),
    "time limit a text": (
        TASK,
        (("steps = 100", 'steps = "100"'),),
        "MyEnv.max_episode_steps: wanted a whole number of at least 1, or None for no time limit, "
        "got '100'",
    ),
    "time limit of 0": (TASK, (("steps = 100", "steps = 0"),), "no time limit, got 0"),
    "clock outside the state": (
        TASK,
        (("position.abs() > 5.0", "self.episode_length_buf > 20"),),
        "terminated: wanted 3 rows, as many as the state has, got torch.bool of shape (8,)",
    ),
    "mean over environments": (
        TASK,
        (("0.1 * velocity.abs()", "velocity.mean()"),),
        "MyEnv: reward: wanted the same in an environment whatever their number",
    ),
    "counter in Python": (
        TASK,
        (
            (
                "        reward =",
                "        self.t = getattr(self, 't', 0) + 1\n        reward = self.t +",
            ),
        ),
        "reward, info['episode']['r']: wanted the same values for the same seed and actions",
    ),
    "no device": (
        TASK,
        ((FIRST, "torch.zeros(rng.num_envs)"),),
        "MyEnv: wanted every tensor on self.device, so that the task runs on a GPU, got one on",
    ),
    # ---- a gymnasium.Env ----
    "several gymnasium.Envs": (
        GYM,
        (("class MyGym(GymnasiumCpu)", "class MyGym(Single)"),),
        "VecEnv class, found none. Its gymnasium.Env classes are Single, MyGym: ",
    ),
    "four values": (
        GYM,
        (("self.t >= 100, {}", "{}"),),
        "environment 0 failed in step: wanted (obs, reward, terminated, truncated, info), got a "
        "tuple of 4",
    ),
    "reset without info": (
        GYM,
        (("return self.x, {}", "return self.x"),),
        "wanted (obs, info), got an ndarray",
    ),
    "reset without a seed": (
        GYM,
        (("reset(self, *, seed=None, options=None)", "reset(self, seeds=None)"), ("seed=seed", "")),
        "environment 0 failed in reset: wanted reset(self, *, seed=None, options=None)",
    ),
    "an error in step": (
        GYM,
        (("self.t += 1", "self.t += self.speed"),),
        "environment 0 failed in step: AttributeError: 'Single' object has no attribute 'speed' (",
    ),
    "observation of another shape": (
        GYM,
        (("return self.x, reward", "return self.x[:1], reward"),),
        "wanted an observation of shape (2,), as in the space of <Single instance>, got (1,)",
    ),
    "an array as reward": (
        GYM,
        (("-float(abs(self.x[0]))", "-abs(self.x)"),),
        "environment 0 failed in step: wanted a reward of one number, got shape (2,)",
    ),
    "no reward at all": (
        GYM,
        (("return self.x, reward", "return self.x, None"),),
        "environment 0 failed in step: wanted a number as reward, got nothing",
    ),
    "a text as reward": (
        GYM,
        (("return self.x, reward", "return self.x, str(reward)"),),
        "environment 0 failed in step: wanted a number as reward, got a str",
    ),
    "no info": (
        GYM,
        (("self.t >= 100, {}", "self.t >= 100, None"),),
        "environment 0 failed in step: wanted a dict as info, got nothing",
    ),
    "an instance": (
        GYM,
        (("env=Single)", "env=Single())"),),
        "wanted env= a function that makes one environment, got an instance",
    ),
    "numpy's own random numbers": (
        GYM,
        (("self.np_random", "np.random"),),
        "MyGym.reset: obs: wanted the same first observations for the same seed, got others",
    ),
    # ---- a MujocoEnv ----
    "no model": (MUJOCO, (("model_file", "model"),), "MySlider: wanted a model_file, the path of"),
    "no reward": (
        MUJOCO,
        (("def reward(", "def rewards("),),
        "MySlider: wanted a function reward(data, before, action), got none; is it rewards?",
    ),
    "noise below 0": (
        MUJOCO,
        (("reset_noise_scale = 0.5", "reset_noise_scale = -0.5"),),
        "reset_noise_scale must be at least 0, got -0.5",
    ),
    "reward without before": (
        MUJOCO,
        (("(self, data, before, action)", "(self, data, action)"),),
        "MySlider.reward: wanted the arguments (data, before, action), got (data, action)",
    ),
    "reward of a column": (
        MUJOCO,
        (("action[:, 0].square()", "action.square()"),),
        "MySlider.reward: wanted a tensor of shape (1,), torch.float32, on cpu, got shape (1, 1)",
    ),
    "observations without an axis": (
        MUJOCO,
        (("torch.cat((data.qpos, data.qvel), 1)", "data.qpos[:, 0]"),),
        "MySlider.observe: wanted a tensor of shape (1, D) for one world, got a tensor of shape "
        "(1,): a field [N, k] keeps its axis as data.qpos[:, 0:1]",
    ),
    "a field that is none": (
        MUJOCO,
        (("data.qvel", "data.qvels"),),
        "MuJoCo has no field 'qvels'; did you mean qvel",
    ),
    "a field changed": (
        MUJOCO,
        (("(data.qpos,", "(data.qpos.clamp_(-9.0, 9.0),"),),
        "MySlider.observe: wanted data left alone, got data.qpos changed in place",
    ),
    "first state of another shape": (
        MUJOCO,
        (
            (
                "    def observe",
                "    def initial_state(self, rng):\n        return rng.normal(), rng.normal()\n\n"
                "    def observe",
            ),
        ),
        "MySlider.initial_state: qpos: wanted a tensor of shape (8, 1)",
    ),
    "reward NaN": (
        MUJOCO,
        (("-data.qpos[:, 0].abs()", "data.qpos[:, 0].log()"),),
        "MySlider.step: wanted finite states, rewards and observations, got NaN or infinity in",
    ),
    # ---- a VecEnv ----
    "attributes by hand": (
        VECTOR,
        (("super().__init__(num_envs, device)", "self.num_envs, self.device = num_envs, device"),),
        "call super().__init__(num_envs, device) in __init__",
    ),
    "a plain tuple": (
        VECTOR,
        (
            (
                "Timestep(self.x.clone(), reward, terminated, truncated, info)",
                "self.x, reward, done, done, info",
            ),
        ),
        "MyVec.step: wanted a gpurl.envs.vec_env.Timestep, got a tuple of 5",
    ),
    "no final_obs": (
        VECTOR,
        (('            "final_obs": self.x.clone(),\n', ""),),
        "MyVec.step: info['final_obs']: wanted a tensor of shape (8, 2)",
    ),
    "no reset": (
        VECTOR,
        (("def reset(", "def start("),),
        "MyVec: wanted a function reset(*, seed, options), got none",
    ),
    "no options of reset": (
        VECTOR,
        (
            (
                "def reset(self, *, seed=None, options=None):",
                "def reset(self, *, seed=None):\n        options = None",
            ),
        ),
        "MyVec.reset: wanted reset(*, seed=None, options=None), which resets the environments of",
    ),
    "mask ignored": (
        VECTOR,
        (('(options or {}).get("reset_mask")', "None"),),
        "obs: wanted the environments outside the mask left alone, got others in [1, 3, 5, 7]",
    ),
    "seed ignored": (
        VECTOR,
        (("self.random.manual_seed(seed)\n        mask", "pass\n        mask"),),
        "MyVec.reset: obs: wanted the same first observations for the same seed",
    ),
    "statistics not copied": (
        VECTOR,
        (
            ("self.returns.clone()", "self.returns"),
            ('"l": self.episode_length_buf.clone()', '"l": self.episode_length_buf'),
        ),
        "got step 0: info['episode']['r'] and step 0: info['episode']['l'] changed by a later",
    ),
    "no autoreset": (
        VECTOR,
        (("        self.restart(done)\n", ""),),
        "episode_length_buf: wanted one more a step and 0 after an end, where the next episode",
    ),
    "no autoreset, behind the steps": (
        VECTOR,
        (
            ("        self.restart(done)\n", ""),
            ("max_episode_steps = 10", "max_episode_steps = 90"),
        ),
        "episode_length_buf: wanted one more a step and 0 after an end, where the next episode",
    ),
    "final_obs behind the restart": (
        VECTOR,
        (
            (
                "self.restart(done)\n",
                'self.restart(done)\n        info["final_obs"] = self.x.clone()\n',
            ),
        ),
        "MyVec.step: info['final_obs']: wanted the last observation of the episode where one "
        "ended, got obs, the first of the next one, at all 16 ends; take it before the restart",
    ),
    "another number": (
        VECTOR,
        (("super().__init__(num_envs, device)", "super().__init__(16, device)"),),
        "MyVec.num_envs: wanted 8, as in its argument, got 16",
    ),
    # ---- a simulator behind torch_vector ----
    "simulator in numpy": (
        SIMULATOR,
        (("return self.x.clone(), {}", "return self.x.numpy(), {}"),),
        "Sim.reset: wanted a tensor, got an ndarray; gymnasium_cpu takes environments in numpy",
    ),
    "simulator of another size": (
        SIMULATOR,
        (("env=Sim(num_envs", "env=Sim(16"),),
        "num_envs is 8, but Sim has 16 environments",
    ),
    "class of a simulator": (
        SIMULATOR,
        (("env=Sim(num_envs, device)", "env=Sim"),),
        "MySim: wanted env= an instance, got the class Sim; make it, as env=Sim(num_envs, device)",
    ),
    "simulator's reward [n, 2]": (
        SIMULATOR,
        (("return obs, reward,", "return obs, self.x,"),),
        "Sim.step: reward: wanted one number for each of 8 environments, got shape (8, 2)",
    ),
    "simulator of four values": (
        SIMULATOR,
        (("truncated, {", "{"),),
        "Sim.step: wanted (obs, reward, terminated, truncated",
    ),
    "simulator without a space": (
        SIMULATOR,
        (("        self.single_action_space = Box(-1.0, 1.0, (1,), np.float32)\n", ""),),
        "Sim is no vector environment: it lacks single_observation_space or single_action_space",
    ),
    "an error in a simulator": (
        SIMULATOR,
        (("self.clock += 1", "self.clock += self.none"),),
        "Sim failed in step: AttributeError: 'Sim' object has no attribute 'none' (",
    ),
}
RIGHT = {"task": TASK, "gym": GYM, "mujoco": MUJOCO, "vector": VECTOR, "simulator": SIMULATOR}
NOTES: dict[str, tuple[str, Changes, str]] = {
    "no end": (
        TASK,
        ((LIMIT, ""), ("> 5.0", "> 1e9"), ("10.0", "np.inf")),
        "no time limit: max_episode_steps is None, and in ",
    ),
    "some ends": (TASK, ((LIMIT, ""),), "steps of random actions episodes ended in "),
    "unseen ends": (
        TASK,
        (("steps = 100", "steps = 5000"), ("> 5.0", "> 1e9"), ("10.0", "np.inf")),
        " steps of random actions, so ends are unchecked: --steps 5001",
    ),
    "images": (
        TASK,
        (
            ("Box(-10.0, 10.0, (2,), np.float32)", "Box(0, 1, (3, 16, 16), np.float32)"),
            (STACK, "torch.zeros(self.num_envs, 3, 16, 16, device=self.device)"),
        ),
        "observations of shape (3, 16, 16) look like images; they are flattened into rows of 768 "
        "numbers: convolutions read uint8 ones",
    ),
    "misspelt option": (
        MUJOCO,
        (("def terminated", "def terminate"),),
        "MySlider.terminate is not a name that gpurl reads; is it terminated?",
    ),
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module `my_wrong_env`."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "my_wrong_env.py"
    sys.modules.pop("my_wrong_env", None)


def write(module: Path, source: str, changes: Changes = ()) -> None:
    if source is MUJOCO and importlib.util.find_spec("mujoco") is None:
        pytest.skip("mujoco is not installed")
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    module.write_text(source)


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_line(
    mistake: str, module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, changes, message = WRONG[mistake]
    write(module, source, changes)
    code = main(["check-env", "my_wrong_env", "--steps", "24"])
    printed = capsys.readouterr()
    assert code in (2, 3)
    if printed.err:  # it cannot be made
        assert re.fullmatch(r"gpurl: [^\n]+\n", printed.err), printed.err
        assert message in printed.err
        assert not printed.out
    else:
        problem, verdict = printed.out.splitlines()
        assert problem.startswith("- ")
        assert message in problem
        assert verdict == "my_wrong_env: 1 problem"


@pytest.mark.filterwarnings("error")  # torch warns where a tensor is indexed as the dict
def test_a_state_that_is_no_dict_is_not_given_to_the_task(
    module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test_a_mistake_is_one_line("state a tensor", module, capsys)


def test_images_that_convolutions_read_have_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", "catch", "--steps", "8"]) == 0
    assert capsys.readouterr().out == "catch: keeps the contract\n"


@pytest.mark.parametrize("kind", RIGHT)
def test_without_a_mistake_there_is_no_problem(
    kind: str, module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(module, RIGHT[kind])
    assert main(["check-env", "my_wrong_env", "--steps", "24"]) == 0
    assert capsys.readouterr().out == "my_wrong_env: keeps the contract\n"


@pytest.mark.parametrize("case", NOTES)
def test_what_only_makes_trouble_is_a_note(
    case: str, module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, changes, message = NOTES[case]
    write(module, source, changes)
    assert main(["check-env", "my_wrong_env", "--steps", "24"]) == 0
    note, verdict = capsys.readouterr().out.splitlines()
    assert note.startswith("note: ")
    assert message in note
    assert verdict == "my_wrong_env: keeps the contract"


def test_images_that_convolutions_read_need_no_note(
    module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = ("Box(-10.0, 10.0, (2,), np.float32)", "Box(0, 255, (3, 16, 16), np.uint8)")
    zeros = "torch.zeros(self.num_envs, 3, 16, 16, dtype=torch.uint8, device=self.device)"
    write(module, TASK, (space, (STACK, zeros)))
    assert main(["check-env", "my_wrong_env", "--steps", "24"]) == 0
    assert capsys.readouterr().out == "my_wrong_env: keeps the contract\n"


def test_later_checks_are_counted(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(module, TASK, ((STACK, STACK + "[:4]"),))
    main(["check-env", "my_wrong_env", "--steps", "24"])
    assert re.search(
        r"; and \d later checks fail, probably for the same reason\n", capsys.readouterr().out
    )


def test_two_mistakes_are_two_problems(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A space that is too narrow hides no number in Python."""
    look = "        scale = float(position[0] * 0.0)\n        reward = scale +"
    write(module, TASK, (("Box(-10.0, 10.0,", "Box(-0.5, 0.5,"), ("        reward =", look)))
    main(["check-env", "my_wrong_env", "--steps", "24"])
    first, second, verdict = capsys.readouterr().out.splitlines()
    assert "wanted it inside Box" in first
    assert "wanted a step in which the host looks at no tensor" in second
    assert verdict == "my_wrong_env: 2 problems"


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        (TASK, WRONG["n in the shape of rng"][1]),
        (TASK, WRONG["self.num_envs"][1]),
        (VECTOR, WRONG["attributes by hand"][1]),
        (TASK, WRONG["time limit a text"][1]),
    ],
)
def test_a_training_says_it_too(
    source: str, changes: Changes, module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(module, source, changes)
    message = next(text for _, change, text in WRONG.values() if change is changes)
    words = ["num_envs=8", "total_steps=64", "device=cpu", "threads=1", "eval_episodes=0"]
    assert main(["train", "ppo", "my_wrong_env", *words, f"run_dir={module.parent / 'run'}"]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chasing", "--env.dimension", "3"], "no option dimension; did you mean dim? it has: "),
        (["chasing", "env.colour=red"], "environment 'chasing' has no option colour; it has: "),
        (["chasing", "--env.seed", "3"], "seed is a setting of the run: --seed, not --env.seed"),
        (
            ["frame_stack:catch", "--env.task-options.size", "3"],
            "cannot be set by a flag; in a file of --config, under env_options: task_options",
        ),
        # an attribute of a class that is not the user's
        (["pendulum", "--env.render-mode", "human"], "no option render_mode; it has: max_episode"),
        (["my_folder/my_env.py"], "a file is given by its module path, my_folder.my_env. Known: "),
        (["nowhere_to_be_found"], "(there is no nowhere_to_be_found.py in "),
        # what may be meant comes before the long list
        (["LunarLander-v2"], "'LunarLander-v2'; Gymnasium has LunarLander-v3. Known: acrobot, "),
        (["Pendulum-v0"], "mean pendulum or inverted_pendulum? Gymnasium has Pendulum-v1. "),
    ],
)
def test_a_wrong_name_or_option_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "ppo", *words]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"gpurl: [^\n]+\n", error)
    assert message in error


@pytest.mark.parametrize(
    "name", ["no_file:MyEnv", "tests.tiny_envs:RandomWalkX", "gymnasium_cpu", "lunarlander"]
)
def test_no_advice_for_a_run_where_there_is_none(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-env", name]) == 2
    assert "evaluate_run" not in capsys.readouterr().err


def test_a_device_that_is_not_there_is_no_fault_of_the_environment() -> None:
    with pytest.raises(UsageError, match=r"device cuda:99 does not exist: torch sees \d+ CUDA dev"):
        make_env("cart_pole", 2, device="cuda:99")
    with pytest.raises(UsageError, match="no device is called 'gpu'"):
        make_env("cart_pole", 2, device="gpu")


def test_names_in_the_wrong_order_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "chasing", "ppo"]) == 2
    expected = "gpurl: ppo is an algorithm and comes first: gpurl train ppo chasing\n"
    assert capsys.readouterr().err == expected


def test_an_attribute_that_could_be_an_option_is_told(module: Path) -> None:
    write(module, TASK, ((LIMIT, LIMIT + "    speed = 2.0\n"),))
    with pytest.raises(GpurlError, match=r"options are parameters of __init__: speed: float = 2.0"):
        make_env("my_wrong_env", 2, speed=3.0)
