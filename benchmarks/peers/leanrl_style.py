"""A PPO written for this comparison in the way of LeanRL: CleanRL's single-file loop whose policy,
advantages and update are compiled, captured as CUDA graphs, or both; the environments stay outside.

After LeanRL's ppo_continuous_action_torchcompile.py: orthogonal weights, advantages normalised per
minibatch, an episode's end has no value even where only its time was up, a random order of all rows
drawn anew in each epoch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.job import (
    ACTIVATIONS,
    CHASING,
    EPOCHS,
    HIDDEN,
    MINIBATCHES,
    Job,
    Outcome,
    rollouts,
)
from benchmarks.peers.timed_chasing import TimedChasing

MODES = {  # (torch.compile, CUDA graphs)
    "default": (False, False),
    "compile": (True, False),
    "graphs": (False, True),
    "compile+graphs": (True, True),
}
EAGER_CALLS = 3  # before a function is captured: they allocate, compile and choose
HALF_LOG_2_PI = 0.9189385332046727


class Agent(nn.Module):
    """Actor and critic, and a standard deviation for each action."""

    def __init__(
        self, obs_size: int, action_size: int, activation: str, device: torch.device
    ) -> None:
        super().__init__()
        self.actor = self._network(obs_size, action_size, activation, 0.01, device)
        self.critic = self._network(obs_size, 1, activation, 1.0, device)
        self.log_std = nn.Parameter(torch.zeros(action_size, device=device))

    @staticmethod
    def _network(
        inputs: int, outputs: int, activation: str, last_gain: float, device: torch.device
    ) -> nn.Sequential:
        layers, size = list[nn.Module](), inputs
        for width in HIDDEN:
            layers += [
                _orthogonal(nn.Linear(size, width, device=device), 2**0.5),
                ACTIVATIONS[activation](),
            ]
            size = width
        return nn.Sequential(
            *layers, _orthogonal(nn.Linear(size, outputs, device=device), last_gain)
        )

    def log_prob(self, mean: Tensor, action: Tensor) -> Tensor:
        """[B] of action [B, A] under a normal distribution around mean [B, A]."""
        return (
            -0.5 * ((action - mean) * (-self.log_std).exp()).square() - self.log_std - HALF_LOG_2_PI
        ).sum(1)


def _orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Graphed:
    """A function of tensors that is captured as a CUDA graph at its fourth call and replayed from
    then on.

    Arguments are copied into memory of its own; results lie in memory that the next call
    overwrites.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function, self.calls = function, 0
        self.graph = torch.cuda.CUDAGraph()
        self.arguments, self.results = tuple[Tensor, ...](), tuple[Tensor, ...]()

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
        """On a stream of its own, as PyTorch asks before a capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = self.function(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        return results


class Trainer:
    """The three functions of PPO, and the loop around them."""

    def __init__(self, job: Job) -> None:
        self.job, self.env = job, TimedChasing(job)
        compiled, graphed = MODES[job.mode]
        device = self.env.device
        self.agent = Agent(4 * self.env.dim, self.env.dim, job.activation, device)
        rate = (
            torch.tensor(CHASING["learning_rate"], device=device)
            if graphed
            else CHASING["learning_rate"]
        )
        parameters = list(self.agent.parameters())
        self.optimizer = torch.optim.Adam(
            parameters, lr=rate, eps=1e-5, fused=True, capturable=graphed
        )

        def fast(function: Callable[..., Any]) -> Callable[..., Any]:
            function = torch.compile(function) if compiled else function
            return Graphed(function) if graphed else function

        self.policy, self.advantages, self.update = (
            fast(self._policy),
            fast(self._advantages),
            fast(self._update),
        )

    def _policy(self, obs: Tensor) -> tuple[Tensor, ...]:
        """(action [N, A], log_prob [N], value [N]) for obs [N, D]."""
        with torch.no_grad():
            mean = self.agent.actor(obs)
            action = mean + self.agent.log_std.exp() * torch.randn_like(mean)
            return action, self.agent.log_prob(mean, action), self.agent.critic(obs).flatten()

    def _advantages(
        self, reward: Tensor, value: Tensor, done: Tensor, last_obs: Tensor
    ) -> tuple[Tensor, ...]:
        """(advantage, return), [T, N] each, by equation 11 of Schulman et al. 2016; done [T, N]
        ends an episode with that step.
        """
        with torch.no_grad():
            next_value, later = self.agent.critic(last_obs).flatten(), torch.zeros_like(reward[0])
            rows = list[Tensor]()
            for step in range(reward.shape[0] - 1, -1, -1):
                goes_on = 1.0 - done[step]
                error = reward[step] + CHASING["gamma"] * next_value * goes_on - value[step]
                later = error + CHASING["gamma"] * CHASING["gae_lambda"] * goes_on * later
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
        clipped = ratio.clamp(1 - CHASING["clip_range"], 1 + CHASING["clip_range"])
        policy_loss = torch.max(-advantage * ratio, -advantage * clipped).mean()
        loss = (
            policy_loss
            + CHASING["value_coef"] * (self.agent.critic(obs).flatten() - target).square().mean()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), CHASING["max_grad_norm"])
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
            self._epochs(
                [
                    columns[name].flatten(0, 1)
                    for name in ("obs", "action", "log_prob", "advantage", "target")
                ]
            )
        return self.env.outcome()

    def _rollout(self, obs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(next obs, columns [T, N, ...])."""
        steps = list[dict[str, Tensor]]()
        for _ in range(self.job.horizon):
            action, log_prob, value = (part.clone() for part in self.policy(obs))
            next_obs, reward, terminated, truncated, _ = self.env.step(action.clamp(-1.0, 1.0))
            done = (terminated | truncated).float()
            steps.append(
                {
                    "obs": obs,
                    "action": action,
                    "log_prob": log_prob,
                    "value": value,
                    "reward": reward,
                    "done": done,
                }
            )
            obs = next_obs
        return obs, {name: torch.stack([step[name] for step in steps]) for name in steps[0]}

    def _epochs(self, columns: list[Tensor]) -> None:
        """columns: obs, action, log_prob, advantage and target, [T * N, ...] each."""
        rows = columns[0].shape[0]
        for _ in range(EPOCHS):
            for index in torch.randperm(rows, device=columns[0].device).split(rows // MINIBATCHES):
                self.update(*(column[index] for column in columns))


def chasing(job: Job) -> Outcome:
    """The whole run."""
    return Trainer(job).run()
