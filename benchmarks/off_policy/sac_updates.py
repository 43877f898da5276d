"""SAC's updates (batches from a filled replay, critics, actor, temperature, targets): gpurl against
stable-baselines3.

They are compared first: from the same weights on the same transitions their critic losses must
decrease by similar amounts.
"""

import statistics
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from benchmarks.off_policy.job import Job, Measurement, Shape, peak_mib, timed
from gpurl.algorithms.sac import SAC, SACConfig
from gpurl.errors import GpurlError
from gpurl.nn.encoders import EncoderConfig
from gpurl.nn.mlp import Sequential

UPDATES = 16  # a call
COMPARED = 300  # updates
WINDOW = 50  # updates at the start and at the end whose mean loss is compared
MAX_DIFFERENCE = 0.15  # of the mean losses, relative
Steps = dict[str, Tensor]


def spaces_of(shape: Shape) -> tuple[Box, Box]:
    """The spaces of observations and actions."""
    return Box(-np.inf, np.inf, (shape[0],), np.float32), Box(-1.0, 1.0, (shape[1],), np.float32)


def make_steps(job: Job, shape: Shape) -> Steps:
    """name -> [T, 1, ...]: transitions of one environment with rewards that can be learnt."""
    generator = torch.Generator().manual_seed(job.seed)
    obs, final_obs = (torch.randn(job.size, 1, shape[0], generator=generator) for _ in range(2))
    action = torch.rand(job.size, 1, shape[1], generator=generator) * 2 - 1
    terminated = torch.rand(job.size, 1, generator=generator) < 0.05
    reward = 3.0 * (obs[..., 0] - action.square().mean(-1))
    return {
        "obs": obs,
        "final_obs": torch.where(terminated.unsqueeze(2), final_obs, obs.roll(-1, 0)),
        "action": action,
        "reward": reward,
        "terminated": terminated,
        "truncated": torch.zeros_like(terminated),
    }


# ---- gpurl ----


def gpurl_sac(job: Job, shape: Shape, steps: Steps, updates: int) -> SAC:
    """SAC of gpurl, with `updates` updates in each `learn`."""
    body = EncoderConfig(job.hidden)
    numbers: Any = {
        "batch_size": job.batch_sizes[0],
        "replay_size": job.size,
        "learning_starts": job.batch_sizes[0],
        "updates": updates,
    }
    config = SACConfig(**numbers, actor_network=body, critic_network=body)
    device = torch.device(job.device)
    algorithm = SAC(config, *spaces_of(shape), num_envs=1, device=device, seed=job.seed)
    algorithm.make_buffer()
    algorithm.replay.add({name: column.to(device) for name, column in steps.items()})
    algorithm.is_random = False
    return algorithm


# ---- stable-baselines3 ----


class Still(gymnasium.Env):
    """An environment with spaces only."""

    def __init__(self, shape: Shape) -> None:
        self.observation_space, self.action_space = spaces_of(shape)


def sb3_sac(job: Job, shape: Shape, steps: Steps) -> Any:
    """SAC of stable-baselines3, with a filled buffer and a logger without outputs."""
    import stable_baselines3
    from stable_baselines3.common.logger import Logger

    settings: dict[str, Any] = {
        "buffer_size": job.size,
        "batch_size": job.batch_sizes[0],
        "policy_kwargs": {"net_arch": list(job.hidden)},
    }
    model = stable_baselines3.SAC(
        "MlpPolicy", Still(shape), **settings, device=job.device, seed=job.seed
    )
    model.set_logger(Logger(None, []))
    arrays = {name: column.numpy() for name, column in steps.items()}
    for t in range(job.size):
        at = {name: array[t] for name, array in arrays.items()}
        model.replay_buffer.add(
            at["obs"], at["final_obs"], at["action"], at["reward"], at["terminated"], [{}]
        )
    return model


def copy_weights(algorithm: SAC, model: Any) -> None:
    """Copy gpurl's weights, and those of its targets, into stable-baselines3's networks."""
    # critics and targets
    pairs = ((algorithm.critic, model.critic), (algorithm.target_critic, model.critic_target))
    for ours, theirs in pairs:
        for member, network in enumerate(theirs.q_networks):
            _copy_layers(ours, member, _linear_layers(network))

    # actor; its last layer is two layers there
    actor = model.actor
    heads = torch.nn.Linear(actor.mu.in_features, 2 * actor.mu.out_features)
    _copy_layers(algorithm.actor, 0, [*_linear_layers(actor.latent_pi), heads])
    with torch.no_grad():
        for name in ("weight", "bias"):
            for head, values in zip((actor.mu, actor.log_std), getattr(heads, name).chunk(2)):
                getattr(head, name).copy_(values)


def _linear_layers(network: torch.nn.Sequential) -> list[torch.nn.Linear]:
    return [layer for layer in network if isinstance(layer, torch.nn.Linear)]


@torch.no_grad()
def _copy_layers(network: Sequential, member: int, layers: list[torch.nn.Linear]) -> None:
    for ours, theirs in zip(network.layers, layers, strict=True):
        theirs.weight.copy_(ours.weight[member])
        theirs.bias.copy_(ours.bias[member, 0])


# ---- comparing and measuring ----


def compare(job: Job) -> str:
    """A message with the critic losses of both; GpurlError unless they decrease and are similar."""
    messages = []
    for shape in job.shapes:
        steps = make_steps(job, shape)
        algorithm, model = gpurl_sac(job, shape, steps, updates=1), sb3_sac(job, shape, steps)
        copy_weights(algorithm, model)
        losses: dict[str, list[float]] = {"gpurl": [], "sb3": []}
        for _ in range(COMPARED):
            # stable-baselines3's loss is half of the sum of squares
            losses["gpurl"].append(float(algorithm.learn({})["train/critic_loss"]) / 2)
            model.train(1, job.batch_sizes[0])
            losses["sb3"].append(float(model.logger.name_to_value["train/critic_loss"]))
        messages.append(check_losses(shape, losses))
    return "; ".join(messages)


def check_losses(shape: Shape, losses: dict[str, list[float]]) -> str:
    """A message with the losses; GpurlError unless both decrease, and start and end with similar
    values.
    """
    means = {
        name: [statistics.mean(part) for part in (values[:WINDOW], values[-WINDOW:])]
        for name, values in losses.items()
    }
    words = ", ".join(f"{name} {first:.3g} to {last:.3g}" for name, (first, last) in means.items())
    message = f"critic loss {shape[0]}+{shape[1]}: {words}"
    decreases = all(last < first for first, last in means.values())
    pairs = zip(means["gpurl"], means["sb3"])
    is_similar = all(abs(one / other - 1.0) <= MAX_DIFFERENCE for one, other in pairs)
    if not (decreases and is_similar):
        raise GpurlError(f"the updates learn differently, so nothing is timed: {message}")
    return message


def measure(job: Job) -> list[Measurement]:
    """Updates a second at every shape."""
    measurements = []
    for shape in job.shapes:
        steps = make_steps(job, shape)
        if job.trainer == "gpurl":
            algorithm = gpurl_sac(job, shape, steps, UPDATES)
            function = lambda algorithm=algorithm: algorithm.learn({})  # noqa: E731
        else:
            model = sb3_sac(job, shape, steps)
            function = lambda model=model: model.train(UPDATES, job.batch_sizes[0])  # noqa: E731
        seconds = timed(job, {"": function})[""]
        name = f"sac {shape[0]}+{shape[1]}, batch {job.batch_sizes[0]}"
        measurements.append(Measurement(name, "1", UPDATES / seconds, "updates/s"))
    return [*measurements, Measurement("sac process", "-", peak_mib(job), "peak MiB")]
