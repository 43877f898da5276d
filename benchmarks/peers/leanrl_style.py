"""A PPO written for this comparison in the style of LeanRL: CleanRL's single-file loop with policy,
advantages and update compiled, captured as CUDA graphs, or both, and the environments outside.

After LeanRL's ppo_continuous_action_torchcompile.py: orthogonal weights, advantages normalised per
minibatch, no bootstrap at time limits, a new random order of all rows in each epoch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers.job import (
    ACTIVATIONS,
    TENSOR_TASK,
    Job,
    Outcome,
    rollouts,
)
from benchmarks.peers.timed_env import timed_env

MODES = {  # (torch.compile, CUDA graphs)
    "default": (False, False),
    "compile": (True, False),
    "graphs": (False, True),
    "compile+graphs": (True, True),
}
EAGER_CALLS = 3  # before the capture of a function: they allocate, compile and choose kernels
HALF_LOG_2_PI = 0.9189385332046727


class Agent(nn.Module):
    """Actor and critic, and a standard deviation for each action."""

    def __init__(self, obs_size: int, action_size: int, job: Job, device: torch.device) -> None:
        super().__init__()
        self.actor = self._network(obs_size, action_size, job, 0.01, device)
        self.critic = self._network(obs_size, 1, job, 1.0, device)
        self.log_std = nn.Parameter(torch.zeros(action_size, device=device))

    @staticmethod
    def _network(
        inputs: int, outputs: int, job: Job, last_gain: float, device: torch.device
    ) -> nn.Sequential:
        layers, size = list[nn.Module](), inputs
        for width in job.hidden:
            layers += [
                _orthogonal(nn.Linear(size, width, device=device), 2**0.5),
                ACTIVATIONS[job.activation](),
            ]
            size = width
        return nn.Sequential(
            *layers, _orthogonal(nn.Linear(size, outputs, device=device), last_gain)
        )

    def log_prob(self, mean: Tensor, action: Tensor) -> Tensor:
        """[B] of action [B, A] under a normal distribution around mean [B, A]."""
        z = (action - mean) * (-self.log_std).exp()
        return (-0.5 * z.square() - self.log_std - HALF_LOG_2_PI).sum(1)


def _orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Graphed:
    """A function of tensors that is captured as a CUDA graph at its fourth call and replayed from
    then on.

    Arguments are copied into the memory of the graph; the next call overwrites the results.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.calls = 0
        self.graph = torch.cuda.CUDAGraph()
        self.arguments: tuple[Tensor, ...] = ()
        self.results: tuple[Tensor, ...] = ()

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        if self.calls <= EAGER_CALLS:
            return self._eagerly(arguments)
        if self.calls == EAGER_CALLS + 1:
            self.arguments = tuple(argument.clone() for argument in arguments)
            with torch.cuda.graph(self.graph):
                self.results = self.function(*self.arguments)
        torch._foreach_copy_(self.arguments, arguments)
        self.graph.replay()
        return self.results

    def _eagerly(self, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Call the function on a side stream, as PyTorch requires before a capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = self.function(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        return results


class Trainer:
    """The three functions of PPO, and the loop around them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.env = timed_env(job)
        compiled, graphed = MODES[job.mode]
        device = self.env.device
        obs_size, action_size = (
            int(np.prod(space.shape or ()))
            for space in (self.env.single_observation_space, self.env.single_action_space)
        )
        self.agent = Agent(obs_size, action_size, job, device)
        rate: Any = TENSOR_TASK["learning_rate"]
        if graphed:
            rate = torch.tensor(rate, device=device)
        self.optimizer = torch.optim.Adam(
            list(self.agent.parameters()), lr=rate, eps=1e-5, fused=True, capturable=graphed
        )

        def fast(function: Callable[..., Any]) -> Callable[..., Any]:
            function = torch.compile(function) if compiled else function
            return Graphed(function) if graphed else function

        self.policy = fast(self._policy)
        self.advantages = fast(self._advantages)
        self.update = fast(self._update)

    def _policy(self, obs: Tensor) -> tuple[Tensor, ...]:
        """(action [N, A], log_prob [N], value [N]) for obs [N, D]."""
        with torch.no_grad():
            mean = self.agent.actor(obs)
            action = mean + self.agent.log_std.exp() * torch.randn_like(mean)
            return action, self.agent.log_prob(mean, action), self.agent.critic(obs).flatten()

    def _advantages(
        self, reward: Tensor, value: Tensor, done: Tensor, last_obs: Tensor
    ) -> tuple[Tensor, ...]:
        """(advantage, return), [T, N] each, by equation 11 of Schulman et al. 2016; done [T, N]: 1
        where an episode ended with the step.
        """
        with torch.no_grad():
            next_value = self.agent.critic(last_obs).flatten()
            later = torch.zeros_like(reward[0])
            rows = list[Tensor]()
            for step in range(reward.shape[0] - 1, -1, -1):
                goes_on = 1.0 - done[step]
                error = reward[step] + TENSOR_TASK["gamma"] * next_value * goes_on - value[step]
                later = error + TENSOR_TASK["gamma"] * TENSOR_TASK["gae_lambda"] * goes_on * later
                rows.append(later)
                next_value = value[step]
            advantage = torch.stack(rows[::-1])
            return advantage, advantage + value

    def _update(
        self, obs: Tensor, action: Tensor, old_log_prob: Tensor, advantage: Tensor, target: Tensor
    ) -> tuple[Tensor, ...]:
        """One step of Adam on a minibatch of B rows; the loss."""
        self.optimizer.zero_grad()
        ratio = (self.agent.log_prob(self.agent.actor(obs), action) - old_log_prob).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clamp(1 - TENSOR_TASK["clip_range"], 1 + TENSOR_TASK["clip_range"])
        policy_loss = torch.max(-advantage * ratio, -advantage * clipped).mean()
        value_loss = (self.agent.critic(obs).flatten() - target).square().mean()
        loss = policy_loss + TENSOR_TASK["value_coef"] * value_loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), TENSOR_TASK["max_grad_norm"])
        self.optimizer.step()
        return (loss.detach(),)

    def run(self) -> Outcome:
        """Train for the rollouts of the job."""
        obs = self.env.reset()[0]
        for _ in range(rollouts(self.job)):
            obs, columns = self._rollout(obs)
            advantage, target = self.advantages(
                columns.pop("reward"), columns.pop("value"), columns.pop("done"), obs
            )
            columns |= {"advantage": advantage, "target": target}
            names = ("obs", "action", "log_prob", "advantage", "target")
            self._epochs([columns[name].flatten(0, 1) for name in names])
        return self.env.outcome()

    def _rollout(self, obs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(next obs, columns [T, N, ...])."""
        steps = list[dict[str, Tensor]]()
        for _ in range(self.job.horizon):
            action, log_prob, value = (result.clone() for result in self.policy(obs))
            next_obs, reward, terminated, truncated, _ = self.env.step(action.clamp(-1.0, 1.0))
            done = (terminated | truncated).float()
            step = {"obs": obs, "action": action, "log_prob": log_prob, "value": value}
            steps.append(step | {"reward": reward, "done": done})
            obs = next_obs
        return obs, {name: torch.stack([step[name] for step in steps]) for name in steps[0]}

    def _epochs(self, columns: list[Tensor]) -> None:
        """columns: obs, action, log_prob, advantage and target, [T * N, ...] each."""
        rows = columns[0].shape[0]
        for _ in range(self.job.epochs):
            order = torch.randperm(rows, device=columns[0].device)
            for index in order.split(rows // self.job.minibatches):
                self.update(*(column[index] for column in columns))


def tensor_task(job: Job) -> Outcome:
    """The whole run."""
    return Trainer(job).run()
