"""SAC's updates, nothing else: batches from a filled replay, critics, actor, temperature, targets.
gpurl's and stable-baselines3's.

They are compared first: from the same weights on the same transitions their critics' losses must
fall alike.
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
from gpurl.nn.mlp import BodyConfig, Sequential

UPDATES = 16  # a call
COMPARED, WINDOW, ALIKE = (
    300,
    50,
    0.15,
)  # updates; of which the first and last so many count; how far mean losses may be apart
Steps = dict[str, Tensor]


def spaces_of(shape: Shape) -> tuple[Box, Box]:
    """Of observations and actions."""
    return Box(-np.inf, np.inf, (shape[0],), np.float32), Box(-1.0, 1.0, (shape[1],), np.float32)


def make_steps(job: Job, shape: Shape) -> Steps:
    """name -> [T, 1, ...]: transitions of which rewards can be learnt, as one environment gives
    them that starts anew now and then.
    """
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
    """gpurl's, whose `learn` takes so many updates."""
    body = BodyConfig(job.hidden)
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
    """Spaces, and nothing behind them."""

    def __init__(self, shape: Shape) -> None:
        self.observation_space, self.action_space = spaces_of(shape)


def sb3_sac(job: Job, shape: Shape, steps: Steps) -> Any:
    """stable-baselines3's, with a filled buffer and a logger that writes nowhere."""
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
    """gpurl's weights, and those of its targets, into stable-baselines3's networks."""
    for ours, theirs in (
        (algorithm.critic, model.critic),
        (algorithm.target_critic, model.critic_target),
    ):
        for member, network in enumerate(theirs.q_networks):
            _copy_layers(
                ours, member, [layer for layer in network if isinstance(layer, torch.nn.Linear)]
            )
    actor, heads = (
        model.actor,
        torch.nn.Linear(model.actor.mu.in_features, 2 * model.actor.mu.out_features),
    )
    _copy_layers(
        algorithm.actor,
        0,
        [*(layer for layer in actor.latent_pi if isinstance(layer, torch.nn.Linear)), heads],
    )
    with torch.no_grad():
        for name in ("weight", "bias"):
            for head, values in zip((actor.mu, actor.log_std), getattr(heads, name).chunk(2)):
                getattr(head, name).copy_(values)


@torch.no_grad()
def _copy_layers(network: Sequential, member: int, layers: list[torch.nn.Linear]) -> None:
    for ours, theirs in zip(network.layers, layers, strict=True):
        theirs.weight.copy_(ours.weight[member])
        theirs.bias.copy_(ours.bias[member, 0])


# ---- comparing and measuring ----


def compare(job: Job) -> str:
    """GpurlError unless both critics' losses fall, and alike; what they were, in words."""
    told = []
    for shape in job.shapes:
        steps = make_steps(job, shape)
        algorithm, model = gpurl_sac(job, shape, steps, updates=1), sb3_sac(job, shape, steps)
        copy_weights(algorithm, model)
        losses: dict[str, list[float]] = {"gpurl": [], "sb3": []}
        for _ in range(COMPARED):
            losses["gpurl"].append(
                float(algorithm.learn({})["train/critic_loss"]) / 2
            )  # theirs is half of the sum of squares
            model.train(1, job.batch_sizes[0])
            losses["sb3"].append(float(model.logger.name_to_value["train/critic_loss"]))
        told.append(alike(shape, losses))
    return "; ".join(told)


def alike(shape: Shape, losses: dict[str, list[float]]) -> str:
    """GpurlError unless the losses of both fall, and begin and end alike."""
    means = {
        name: [statistics.mean(part) for part in (values[:WINDOW], values[-WINDOW:])]
        for name, values in losses.items()
    }
    words = ", ".join(f"{name} {first:.3g} to {last:.3g}" for name, (first, last) in means.items())
    told = f"critic loss {shape[0]}+{shape[1]}: {words}"
    falls = all(last < first for first, last in means.values())
    if not falls or any(
        abs(one / other - 1.0) > ALIKE for one, other in zip(means["gpurl"], means["sb3"])
    ):
        raise GpurlError(f"the updates do not learn alike, so nothing is timed: {told}")
    return told


def measure(job: Job) -> list[Measurement]:
    """Updates a second at every shape."""
    found = []
    for shape in job.shapes:
        steps = make_steps(job, shape)
        if job.trainer == "gpurl":
            algorithm = gpurl_sac(job, shape, steps, UPDATES)
            function = lambda algorithm=algorithm: algorithm.learn({})  # noqa: E731
        else:
            model = sb3_sac(job, shape, steps)
            function = lambda model=model: model.train(UPDATES, job.batch_sizes[0])  # noqa: E731
        seconds = timed(job, {"": function})[""]
        found.append(
            Measurement(
                f"sac {shape[0]}+{shape[1]}, batch {job.batch_sizes[0]}",
                "1",
                UPDATES / seconds,
                "updates/s",
            )
        )
    return [*found, Measurement("sac process", "-", peak_mib(job), "peak MiB")]
