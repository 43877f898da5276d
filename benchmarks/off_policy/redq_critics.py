"""A step of REDQ's ten critics (target, forward, backward, Adam, target networks): gpurl's stacked
ensemble against a loop over ten modules.

They are compared first: from the same weights with the same noise both must have the same values
after some steps.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.off_policy.job import Job, Measurement, peak_mib, timed
from benchmarks.off_policy.sac_updates import spaces_of
from gpurl.algorithms.redq import REDQ, REDQConfig
from gpurl.errors import GpurlError
from gpurl.kernels.random import CounterRandom
from gpurl.kernels.squash import squashed_sample
from gpurl.nn.encoders import EncoderConfig

COMPARED = 10  # steps
Batch = dict[str, Tensor]


def make_batch(job: Job) -> Batch:
    """A batch like those of Replay.sample."""
    (obs_size, action_size), rows = job.shapes[0], job.batch_sizes[0]
    generator = torch.Generator().manual_seed(job.seed)
    obs, next_obs = (torch.randn(rows, obs_size, generator=generator) for _ in range(2))
    action = torch.rand(rows, action_size, generator=generator) * 2 - 1
    discount = 0.99 * (torch.rand(rows, generator=generator) >= 0.05).float()
    reward, weight = obs[:, 0] - action.square().mean(1), torch.ones(rows)
    batch = {
        "obs": obs,
        "next_obs": next_obs,
        "action": action,
        "reward": reward,
        "discount": discount,
        "weight": weight,
    }
    return {name: column.to(job.device) for name, column in batch.items()}


def gpurl_redq(job: Job) -> REDQ:
    """REDQ of gpurl."""
    body = EncoderConfig(job.hidden)
    rows = job.batch_sizes[0]
    config = REDQConfig(
        batch_size=rows,
        replay_size=rows,
        learning_starts=rows,
        actor_network=body,
        critic_network=body,
    )
    device = torch.device(job.device)
    return REDQ(config, *spaces_of(job.shapes[0]), num_envs=1, device=device, seed=job.seed)


def gpurl_step(algorithm: REDQ, batch: Batch) -> None:
    """A step as in `learn`."""
    algorithm.critic_step(batch, move_target=True)
    algorithm.update_random.advance()
    algorithm.choice_random.advance()


class Loop:
    """The same with one module for each critic, autograd, one fused Adam over all parameters, and
    all target networks moved in one call.
    """

    def __init__(self, job: Job) -> None:
        config = REDQConfig()
        obs_size, self.action_size = job.shapes[0]
        self.num_critics = config.num_critics
        self.subset = config.target_subset
        self.tau = config.tau
        self.actor = mlp(obs_size, job.hidden, 2 * self.action_size).to(job.device)
        self.critics, self.targets = (
            nn.ModuleList(
                mlp(obs_size + self.action_size, job.hidden, 1) for _ in range(self.num_critics)
            ).to(job.device)
            for _ in range(2)
        )
        self.weights = list(self.critics.parameters())
        self.target_weights = list(self.targets.parameters())
        with torch.no_grad():
            torch._foreach_copy_(self.target_weights, self.weights)
        self.optimizer = torch.optim.Adam(
            self.weights, lr=config.learning_rate, eps=1e-8, fused=True
        )

    def step(self, batch: Batch, noise: Tensor, drawn: list[int]) -> None:
        """noise: [B, A] of the next action; drawn: the critics whose targets are used."""
        with torch.no_grad():
            action, log_prob = squashed_sample(self.actor(batch["next_obs"]), noise)
            inputs = torch.cat((batch["next_obs"], action), 1)
            values = torch.stack([self.targets[member](inputs) for member in drawn])
            value = values.amin(0).squeeze(1)
            target = batch["reward"] + batch["discount"] * (value - log_prob)
        inputs = torch.cat((batch["obs"], batch["action"]), 1)
        losses = [
            nn.functional.mse_loss(critic(inputs).squeeze(1), target) for critic in self.critics
        ]
        self.optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.target_weights, self.weights, self.tau)

    def random_step(self, batch: Batch) -> None:
        """A step with noise and critics drawn by torch."""
        noise = torch.randn(len(batch["obs"]), self.action_size, device=batch["obs"].device)
        self.step(batch, noise, torch.randperm(self.num_critics)[: self.subset].tolist())

    def values(self, batch: Batch) -> Tensor:
        """[2E, B] values of the critics and of the targets for a batch."""
        inputs = torch.cat((batch["obs"], batch["action"]), 1)
        with torch.no_grad():
            return torch.cat([network(inputs).T for network in (*self.critics, *self.targets)])


def mlp(num_inputs: int, hidden: tuple[int, ...], num_outputs: int) -> nn.Sequential:
    """Layers with ReLU between them."""
    layers = list[nn.Module]()
    for sizes in itertools.pairwise((num_inputs, *hidden)):
        layers += [nn.Linear(*sizes), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], num_outputs))


# ---- comparing and measuring ----


@torch.no_grad()
def copy_weights(algorithm: REDQ, loop: Loop) -> None:
    """Copy gpurl's weights into the modules of the loop."""
    groups = (
        (algorithm.actor, [loop.actor]),
        (algorithm.critic, loop.critics),
        (algorithm.target_critic, loop.targets),
    )
    for ours, theirs in groups:
        for member, network in enumerate(theirs):
            linears = (layer for layer in network if isinstance(layer, nn.Linear))
            for layer, linear in zip(ours.layers, linears, strict=True):
                linear.weight.copy_(layer.weight[member])
                linear.bias.copy_(layer.bias[member, 0])


def compare(job: Job) -> str:
    """A message of how far the values moved and how far they are apart after some steps; GpurlError
    if they differ.
    """
    algorithm, loop, batch = gpurl_redq(job), Loop(job), make_batch(job)
    copy_weights(algorithm, loop)
    noise, choice = (
        CounterRandom(job.seed * 4 + number, rows, job.device)
        for number, rows in ((2, job.batch_sizes[0]), (3, 1))
    )
    start = loop.values(batch)
    for _ in range(COMPARED):
        order = choice.uniform(shape=(loop.num_critics,))[0].argsort()[: loop.subset]
        loop.step(batch, noise.normal((loop.action_size,)).clone(), order.tolist())
        gpurl_step(algorithm, batch)
        noise.advance()
        choice.advance()
    inputs = torch.cat((batch["obs"], batch["action"]), 1)
    networks = (algorithm.critic, algorithm.target_critic)
    with torch.inference_mode():
        ours = torch.cat([network.forward(inputs).squeeze(2) for network in networks])
    return same(ours, loop.values(batch), start)


def same(ours: Tensor, theirs: Tensor, start: Tensor) -> str:
    """A message of how far values [2E, B] moved and are apart, for critics and targets. GpurlError
    unless they are a hundred times nearer to each other than to their start.
    """
    messages = []
    halves = zip(*(values.chunk(2) for values in (ours, theirs, start)))
    for name, (one, other, before) in zip(("critics", "targets"), halves):
        apart, moved = (float((one - values).abs().max()) for values in (other, before))
        messages.append(f"{name} moved by {moved:.3g}, {apart:.2g} apart")
        if not 0.0 <= 100.0 * apart < moved:
            raise GpurlError(
                f"the critics are not the same after {COMPARED} steps, so nothing is timed: "
                f"{messages[-1]}"
            )
    return "values after as many steps: " + "; ".join(messages)


def measure(job: Job) -> list[Measurement]:
    """Microseconds a step."""
    batch = make_batch(job)
    function: Callable[[], Any]
    if job.trainer == "gpurl":
        algorithm = gpurl_redq(job)
        function = lambda: gpurl_step(algorithm, batch)  # noqa: E731
    else:
        loop = Loop(job)
        function = lambda: loop.random_step(batch)  # noqa: E731
    seconds = timed(job, {"": function})[""]
    name = f"redq critics 10x{job.shapes[0][0]}+{job.shapes[0][1]}, batch {job.batch_sizes[0]}"
    return [
        Measurement(name, "1", seconds * 1e6, "us"),
        Measurement("redq process", "-", peak_mib(job), "peak MiB"),
    ]
