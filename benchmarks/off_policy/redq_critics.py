"""A step of REDQ's ten critics: target, forward, backward, Adam, target networks. gpurl's stacked
ensemble, and a loop over ten modules.

They are compared first: from the same weights with the same noise both must give the same values
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
from gpurl.nn.mlp import BodyConfig

COMPARED = 10  # steps
Batch = dict[str, Tensor]


def make_batch(job: Job) -> Batch:
    """As Replay.sample gives them."""
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
    """gpurl's."""
    body, rows = BodyConfig(job.hidden), job.batch_sizes[0]
    config = REDQConfig(
        batch_size=rows,
        replay_size=rows,
        learning_starts=rows,
        actor_network=body,
        critic_network=body,
    )
    return REDQ(
        config,
        *spaces_of(job.shapes[0]),
        num_envs=1,
        device=torch.device(job.device),
        seed=job.seed,
    )


def gpurl_step(algorithm: REDQ, batch: Batch) -> None:
    """A step, as `learn` takes it."""
    algorithm.critic_step(batch, move_target=True)
    algorithm.update_random.advance()
    algorithm.choice_random.advance()


class Loop:
    """The same with a module a critic, autograd, one fused Adam over all, and the target networks
    moved in one call.
    """

    def __init__(self, job: Job) -> None:
        config, (obs_size, action_size) = REDQConfig(), job.shapes[0]
        self.num_critics, self.subset, self.action_size, self.tau = (
            config.num_critics,
            config.target_subset,
            action_size,
            config.tau,
        )
        self.actor = mlp(obs_size, job.hidden, 2 * action_size).to(job.device)
        self.critics, self.targets = (
            [
                mlp(obs_size + action_size, job.hidden, 1).to(job.device)
                for _ in range(config.num_critics)
            ]
            for _ in range(2)
        )
        self.weights, self.target_weights = (
            [p for each in group for p in each.parameters()]
            for group in (self.critics, self.targets)
        )
        with torch.no_grad():
            torch._foreach_copy_(self.target_weights, self.weights)
        self.optimizer = torch.optim.Adam(
            self.weights, lr=config.learning_rate, eps=1e-8, fused=True
        )

    def step(self, batch: Batch, noise: Tensor, drawn: list[int]) -> None:
        """noise: [B, A] of the next action; drawn: the critics whose targets are asked."""
        with torch.no_grad():
            action, log_prob = squashed_sample(self.actor(batch["next_obs"]), noise)
            inputs = torch.cat((batch["next_obs"], action), 1)
            value = (
                torch.stack([self.targets[member](inputs) for member in drawn]).amin(0).squeeze(1)
            )
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
        """With noise and critics drawn by torch."""
        noise = torch.randn(len(batch["obs"]), self.action_size, device=batch["obs"].device)
        self.step(batch, noise, torch.randperm(self.num_critics)[: self.subset].tolist())

    def values(self, batch: Batch) -> Tensor:
        """[2E, B] what critics and targets say of a batch."""
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
    """gpurl's weights into the loop's modules."""
    groups = (
        (algorithm.actor, [loop.actor]),
        (algorithm.critic, loop.critics),
        (algorithm.target_critic, loop.targets),
    )
    for ours, theirs in groups:
        for member, network in enumerate(theirs):
            for layer, linear in zip(
                ours.layers, (each for each in network if isinstance(each, nn.Linear)), strict=True
            ):
                linear.weight.copy_(layer.weight[member])
                linear.bias.copy_(layer.bias[member, 0])


def compare(job: Job) -> str:
    """GpurlError unless both give the same values after some steps; how far they moved and how far
    they are apart, in words.
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
    with torch.inference_mode():
        ours = torch.cat(
            [
                network.forward(inputs).squeeze(2)
                for network in (algorithm.critic, algorithm.target_critic)
            ]
        )
    return same(ours, loop.values(batch), start)


def same(ours: Tensor, theirs: Tensor, start: Tensor) -> str:
    """GpurlError unless values [2E, B] are a hundred times nearer to each other than to where they
    started, critics' and targets' alike.
    """
    told = []
    for name, rows in zip(
        ("critics", "targets"), zip(*(values.chunk(2) for values in (ours, theirs, start)))
    ):
        one, other, before = rows
        apart, moved = (float((one - values).abs().max()) for values in (other, before))
        told.append(f"{name} moved by {moved:.3g}, {apart:.2g} apart")
        if not 0.0 <= 100.0 * apart < moved:
            raise GpurlError(
                f"the critics are not the same after {COMPARED} steps, so nothing is timed: "
                f"{told[-1]}"
            )
    return "values after as many steps: " + "; ".join(told)


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
