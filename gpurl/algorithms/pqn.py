"""Parallelised Q-network (Gallici et al. 2024): Q-learning on rollouts; layer norms stand in for replay and target network."""

import math
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from gpurl.algorithms.algorithm import Algorithm, AlgorithmConfig, Decision, final_value
from gpurl.buffers.minibatches import Minibatches
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import check_choices, check_numbers
from gpurl.ensemble import Tape, set_dtype
from gpurl.envs.vec_env import Timestep
from gpurl.errors import UsageError
from gpurl.kernels.backend import host_may_look
from gpurl.kernels.gae import gae
from gpurl.kernels.random import CounterRandom
from gpurl.networks import Carry
from gpurl.normalizer import Normalizer
from gpurl.optimizer import FlatAdam
from gpurl.q_networks import QNetworkConfig, make_q_network
from gpurl.value_losses import td_loss


@dataclass(frozen=True)
class PQNConfig(AlgorithmConfig):
    """Settings of PQN."""

    fixed = ("network", "normalize_obs")

    horizon: int = 32
    """Steps of every environment between updates."""
    epochs: int = 4
    """Passes over each rollout."""
    minibatches: int = 16
    """Minibatches a pass."""
    learning_rate: float = 5e-4
    """Adam's step size, or where it starts."""
    schedule: str = "linear"
    """Learning rate over time: constant or linear (to 0)."""
    q_lambda: float = 0.95
    """Decay of Q(lambda): how far a target trusts the rewards of the rollout before it trusts the network."""
    epsilon_start: float = 1.0
    """Share of random actions at the start."""
    epsilon_end: float = 0.05
    """Share of random actions from epsilon_fraction of the training on."""
    epsilon_fraction: float = 0.2
    """Share of the training over which it falls, linearly."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this before they are learnt from."""
    max_grad_norm: float | None = 10.0
    """Gradient norm above which the gradient is scaled down."""
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW)."""
    normalize_obs: bool = False
    """Running normalisation of observations, inside the policy."""
    network: QNetworkConfig = field(default_factory=lambda: QNetworkConfig(hidden=(128, 128), layer_norm=True))
    """Shape of the network."""

    def __post_init__(self) -> None:
        check_choices(self, {"schedule": ("constant", "linear")})
        above_zero = ("learning_rate", "max_grad_norm", "reward_scale")
        one = ("gamma", "q_lambda", "epsilon_start", "epsilon_end", "epsilon_fraction")
        check_numbers(self, {"horizon": 1, "epochs": 1, "minibatches": 1, "weight_decay": 0}, above_zero, zero_to_one=one)
        if self.network.noisy or self.network.heads > 1:
            raise UsageError("pqn explores by epsilon and has one network: leave out network.noisy and network.heads")


class PQN(Algorithm):
    """Targets R_t = r_t + gamma (lambda R_{t+1} + (1 - lambda) max Q(s_{t+1})): equation 4 of the paper, by the recursion of GAE."""

    config: PQNConfig

    def __init__(
        self,
        config: PQNConfig,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        num_envs: int,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, num_envs, device)
        self.config = config
        if not isinstance(observation_space, Box):
            raise UsageError(f"PQN needs a Box observation space, this one is {observation_space}")
        if not isinstance(action_space, Discrete) or action_space.start != 0:
            raise UsageError(f"PQN needs a Discrete action space that begins at 0, this one is {action_space}; ppo takes a Box")
        self.num_actions, num_inputs = int(action_space.n), math.prod(observation_space.shape)
        self.network = make_q_network(1, num_inputs, self.num_actions, 1, config.network)
        self.normalizer = Normalizer(num_inputs) if config.normalize_obs else None
        if device.type != "cpu":
            self.to(device)
        self.optimizer = FlatAdam(
            self.network, config.learning_rate, epsilon=1e-8, weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm
        )
        self.action_random = CounterRandom(seed * 2 + 1, num_envs, device)
        self.minibatches = Minibatches(config.minibatches, False, CounterRandom(seed * 2 + 2, 1, device))
        self.epsilon = torch.tensor(config.epsilon_start, device=device)
        self.num_updates = torch.zeros((), dtype=torch.int64, device=device)

    def set_precision(self, precision: str) -> None:
        if precision == "bf16":
            set_dtype(self, torch.bfloat16)

    def initial_carry(self, num_envs: int) -> Carry:
        return ()

    @torch.no_grad()
    def act(self, obs: Tensor, carry: Carry = (), explore: bool = True) -> Decision:
        values = self._values(obs)
        best = values.argmax(-1)
        if not explore:
            return Decision(best, carry, {})
        chance, draw = self.action_random.integers(0, self.num_actions), self.action_random.uniform()
        self.action_random.advance()
        action = torch.where(draw < self.epsilon, chance, best)
        return Decision(action, carry, {"action": action, "value": values.amax(-1)})

    @torch.no_grad()
    def value(self, obs: Tensor, carry: Carry = ()) -> Tensor:
        return self._values(obs).amax(-1)

    def _values(self, obs: Tensor) -> Tensor:
        """obs [B, *obs] -> [B, A]."""
        return self.network.forward(self._inputs(obs.reshape(obs.shape[0], -1)))[0]

    def _inputs(self, rows: Tensor) -> Tensor:
        return rows.float() if self.normalizer is None else self.normalizer(rows.float())

    def make_buffer(self) -> RolloutBuffer:
        rows = self.config.horizon * self.num_envs
        if rows % self.config.minibatches:
            raise UsageError(
                f"PQN splits num_envs * horizon = {rows} rows into minibatches = {self.config.minibatches}, "
                f"which leaves {rows % self.config.minibatches} over"
            )
        return RolloutBuffer(self.config.horizon, self.num_envs, self.device)

    def record(self, buffer: RolloutBuffer, obs: Tensor, decision: Decision, timestep: Timestep) -> None:
        row = {"obs": obs, "reward": timestep.reward, "terminated": timestep.terminated, "truncated": timestep.truncated}
        row |= decision.columns
        if host_may_look(self.device):
            row["final_value"] = final_value(self, timestep, (), is_last=buffer.size == buffer.horizon - 1)
        else:
            row["final_obs"] = timestep.info["final_obs"]
        if "valid" in timestep.info:
            row["valid"] = timestep.info["valid"]
        buffer.add(row)

    def is_ready(self, buffer: RolloutBuffer) -> bool:
        return buffer.size == buffer.horizon

    def prepare(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """{"packed": a row a sample}."""
        with torch.inference_mode():
            if "final_value" in buffer.columns:
                final = buffer["final_value"]
            else:
                final = self._values(buffer["final_obs"].flatten(0, 1)).amax(-1).view_as(buffer["value"])
            value, valid = torch.cat((buffer["value"], final[-1:])), buffer.columns.get("valid")
            ends = buffer["terminated"], buffer["truncated"]
            returns = gae(buffer["reward"] * self.config.reward_scale, value, final, *ends, self.config.gamma, self.config.q_lambda, valid)[
                1
            ]
            rows = buffer["obs"].reshape(buffer.horizon, self.num_envs, -1)
            data = {"obs": self._inputs(rows), "action": buffer["action"], "returns": returns}
            if valid is not None:
                data["valid"] = valid
            if self.normalizer is not None:
                self.normalizer.update(rows.float(), valid)
            return {"packed": self.minibatches.pack(data)}

    def learn(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode():
            for _ in range(self.config.epochs):
                steps = [self._step(minibatch) for minibatch in self.minibatches.of_steps(data["packed"])]
            self.num_updates += 1
            metrics = {f"train/{name}": torch.stack([step[name] for step in steps]).mean() for name in steps[0]}
            return metrics | {"train/learning_rate": self.optimizer.learning_rate.clone(), "train/n_updates": self.num_updates.clone()}

    def _step(self, minibatch: dict[str, Any]) -> dict[str, Tensor]:
        tape = Tape()
        values = self.network.forward(minibatch["obs"], tape)
        action = minibatch["action"].view(1, -1, 1)
        taken = values.gather(2, action).squeeze(2)
        returns = minibatch["returns"]
        counts = (minibatch["weight"] > 0).float() if "weight" in minibatch else torch.ones_like(returns)
        gradient, loss, _ = td_loss(taken, returns, counts, None)
        self.network.backward(torch.zeros_like(values).scatter_(2, action, gradient.unsqueeze(2)), tape, needs_input=False)
        return {"loss": loss, "q_values": taken.mean(), "grad_norm": self.optimizer.step()}

    def largest_batch(self) -> int:
        return max(self.num_envs, self.num_envs * self.config.horizon // self.config.minibatches)

    def schedule(self, progress: float, steps: int) -> None:
        config = self.config
        share = min(progress / config.epsilon_fraction, 1.0) if config.epsilon_fraction else 1.0
        self.epsilon.fill_(config.epsilon_start + (config.epsilon_end - config.epsilon_start) * share)
        if config.schedule == "linear":
            self.optimizer.learning_rate.fill_(config.learning_rate * max(1.0 - progress, 0.0))

    def extra_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict(), "action_random": self.action_random.state_dict()}
        state |= {"shuffle_random": self.minibatches.random.state_dict(), "epsilon": self.epsilon, "num_updates": self.num_updates}
        return state | {"set_rate": {"schedule": self.config.schedule, "learning_rate": self.config.learning_rate}}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.action_random.load_state_dict(state["action_random"])
        self.minibatches.random.load_state_dict(state["shuffle_random"])
        self.epsilon.copy_(state["epsilon"])
        self.num_updates.copy_(state["num_updates"])
        if state["set_rate"] != {
            "schedule": self.config.schedule,
            "learning_rate": self.config.learning_rate,
        }:  # the user has changed it since
            self.optimizer.learning_rate.fill_(self.config.learning_rate)
