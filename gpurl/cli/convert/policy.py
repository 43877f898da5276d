"""An MLP policy of another trainer as a run of gpurl: which tensor is which layer, the units of
actions, normalised observations.

Tensors do not show their activation, so the user names it. Everything else follows from names and
shapes and is reported. What is not one actor from the environment's observations to its actions is
refused.
"""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from gpurl.algorithms import resolve_algorithm
from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.cli.convert.tensors import Converted, natural_order
from gpurl.envs.registry import make_env
from gpurl.errors import CheckpointError, UsageError, visible
from gpurl.nn.distributions import Gaussian, make_head
from gpurl.nn.mlp import Dense
from gpurl.nn.normalizer import Normalizer
from gpurl.run.policy_run import write_policy_run
from gpurl.run.settings import Settings
from gpurl.run.setup import choose_device, make_trainer

# actor_critic is the name of both in one module; assymetric_vf_nets is rl_games' spelling
CRITIC = re.compile(r"(?<!actor)(?<!actor_)critic|value|vf")
# rnd_state_dict: rsl_rl's random network distillation
NOT_WEIGHTS = re.compile(r"optim|target|normaliz|mean_std|preprocessor|\brnd_")
MAX_LAYERS = 8  # all orders are tried


class Layer(NamedTuple):
    """A dense layer of the file."""

    name: str
    weight: Tensor  # [out, in]
    bias: Tensor  # [out]


class ForeignNormalizer(NamedTuple):
    """A library's normaliser: (x - mean) / (sqrt(variance + inside) + outside)."""

    mean: str  # end of the name
    variance: str  # last part of the name
    inside: float
    outside: float


class Moments(NamedTuple):
    """What a normaliser of the file holds, each [D]."""

    name: str
    mean: Tensor
    variance: Tensor
    deviation: Tensor  # the divisor


OBS_NORMALIZERS = (
    ForeignNormalizer("obs_normalizer._mean", "_var", 0.0, 1e-2),  # rsl_rl
    ForeignNormalizer("running_mean_std.running_mean", "running_var", 1e-5, 0.0),  # rl_games
    # skrl; beside the first one, the second is of the critic's states
    ForeignNormalizer("observation_preprocessor.running_mean", "running_variance", 0.0, 1e-8),
    ForeignNormalizer("state_preprocessor.running_mean", "running_variance", 0.0, 1e-8),
)
VALUE_NORMALIZERS = (
    ForeignNormalizer("value_mean_std.running_mean", "running_var", 1e-5, 0.0),  # rl_games
    ForeignNormalizer("value_preprocessor.running_mean", "running_variance", 0.0, 1e-8),  # skrl
)


def write_policy(
    converted: Converted, settings: Settings, unit_actions: bool, command: list[str]
) -> tuple[Path, list[str]]:
    """(a new run folder at step 0 that holds the policy, notes for the user). unit_actions: the
    policy acts in [-1, 1], whatever the environment's limits.

    UsageError or CheckpointError where the tensors are not one policy.
    """
    if not issubclass(resolve_algorithm(settings.algorithm), PPO):
        raise UsageError(
            f"convert makes runs of ppo and a2c, not {settings.algorithm}; others can clone one: "
            f"gpurl train bc --teacher RUN"
        )

    # the networks and normalisers of the file decide a part of the settings
    env = make_env(settings.env, 1, "cpu", **settings.env_options)
    num_inputs = torch.Size(env.single_observation_space.shape or ()).numel()
    num_outputs = make_head(env.single_action_space, algorithm=settings.algorithm).num_outputs
    env.close()
    tensors = converted.tensors
    actor, critic, is_shared = _networks(converted, num_inputs, num_outputs, settings.env)
    obs_moments = _moments(tensors, OBS_NORMALIZERS, num_inputs)
    value_moments = _moments(tensors, VALUE_NORMALIZERS, 1) if critic else None
    config = cast(PPOConfig, settings.algorithm_config)
    hidden = tuple(layer.weight.shape[0] for layer in actor[:-1])
    network = dataclasses.replace(
        config.network,
        hidden=hidden,
        shared=is_shared,
        memory="none",
        body="mlp",
        layer_norm=False,
    )
    config = dataclasses.replace(
        config,
        network=network,
        normalize_obs=obs_moments is not None,
        normalize_value=value_moments is not None,
        asymmetric=False,
        squash=False,
        distribution="normal",
        std_type="log",
        state_dependent_std=False,
    )
    settings = dataclasses.replace(settings, algorithm_config=config)

    # a new run whose networks and normalisers are filled with the tensors
    trainer = make_trainer(settings, choose_device("cpu"))
    algorithm = cast(PPO, trainer.algorithm)
    try:
        with torch.no_grad():
            notes = _fill_network(algorithm, actor, critic)
            if isinstance(algorithm.head, Gaussian):
                notes += _fill_head(algorithm, algorithm.head, tensors, unit_actions)
            notes += _fill_normalizer(algorithm.value_normalizer, value_moments)
            notes += _fill_normalizer(algorithm.normalizer, obs_moments)
        if algorithm.normalizer is None:
            notes.append(
                "no normaliser of observations in it: if the policy saw normalised ones "
                "(stable-baselines3's VecNormalize, CleanRL's wrappers), it acts otherwise here"
            )
        else:
            notes.append(
                f"observations are clipped {algorithm.normalizer.clip:.0f} deviations away "
                f"(rl_games and skrl: 5, rsl_rl: nowhere)"
            )
        write_policy_run(trainer, command)
    finally:
        trainer.env.close()
    return trainer.folder, notes


# ---- which tensors are the actor and the critic ----


def _networks(
    converted: Converted, num_inputs: int, num_outputs: int, env: str
) -> tuple[list[Layer], list[Layer], bool]:
    """(actor; critic, empty where none has the actor's hidden layers; whether the critic is one
    layer on the actor's hidden ones).
    """
    layers = _dense_layers(converted.tensors)
    critic_layers = [layer for layer in layers if CRITIC.search(layer.name)]
    actor_layers = [layer for layer in layers if not CRITIC.search(layer.name)]
    # the actor: all layers that are not named as the critic's
    actors = _chains(actor_layers, num_inputs, num_outputs)
    if not actors:
        raise CheckpointError(
            f"no actor of {env} in it: wanted layers from {num_inputs} numbers to {num_outputs}, "
            f"found\n{_listing(layers) or '  no dense layers'}"
        )
    actor = _choose_order(actors, actor_layers, converted.ordered)

    # the critic: one layer on the hidden layers of the actor, or a network of the same shape
    num_features = actor[-1].weight.shape[1]
    if len(actor) > 1 and [layer.weight.shape for layer in critic_layers] == [(1, num_features)]:
        return actor, critic_layers, True
    hidden_shapes = [layer.weight.shape for layer in actor[:-1]]
    critics = [
        chain
        for chain in _chains(critic_layers, num_inputs, 1)
        if [layer.weight.shape for layer in chain[:-1]] == hidden_shapes
    ]
    if not critics:
        return actor, [], False
    return actor, _choose_order(critics, critic_layers, converted.ordered), False


def _dense_layers(tensors: dict[str, Tensor]) -> list[Layer]:
    """All dense layers, in the order of the file."""
    layers = []
    for name, weight in tensors.items():
        layer = name.removesuffix(".weight")
        bias = tensors.get(f"{layer}.bias")
        # convolutions, embeddings, normalisers and the optimiser's moments are no dense layers
        if layer == name or weight.dim() != 2 or NOT_WEIGHTS.search(layer) or bias is None:
            continue
        if bias.shape == weight.shape[:1]:
            layers.append(Layer(layer, weight.float(), bias.float()))
    return layers


def _chains(layers: list[Layer], num_inputs: int, num_outputs: int) -> list[list[Layer]]:
    """All orders of all layers in which each takes as many numbers as the one before it gives, the
    nearest to the order of the file first.
    """
    chains = []
    if 0 < len(layers) <= MAX_LAYERS:
        for order in itertools.permutations(layers):
            sizes = [num_inputs, *(layer.weight.shape[0] for layer in order)]
            shapes = [(size, before) for before, size in itertools.pairwise(sizes)]
            if sizes[-1] == num_outputs and shapes == [layer.weight.shape for layer in order]:
                chains.append(list(order))
    return chains


def _choose_order(chains: list[list[Layer]], layers: list[Layer], is_ordered: bool) -> list[Layer]:
    """The chain in the order of the names' numbers, else in the order of the file, `layers`.

    CheckpointError where neither decides, or the two differ: another policy would play.
    """
    # numbers in names, as actor.0 and actor.2, show the order of layers of the same shape
    numbered = [chain for chain in chains if _is_numbered(chain)] or chains
    if is_ordered and _names(chains[0]) == _names(layers) and chains[0] is not numbered[0]:
        raise CheckpointError(
            "its layers fit in the order of the file and in that of their names, and these are two "
            f"policies; number the names in the order of the layers:\n{_listing(chains[0])}"
        )
    if len(numbered) > 1 and not is_ordered:
        raise CheckpointError(
            f"its layers fit in {len(numbered)} orders, and safetensors keeps none; convert the "
            f"file it was written from, or number the names in the order of the layers:\n"
            f"{_listing(chains[0])}"
        )
    return numbered[0]


def _names(layers: list[Layer]) -> list[str]:
    return [layer.name for layer in layers]


def _is_numbered(layers: list[Layer]) -> bool:
    """Whether names that differ in numbers only stand in the order of these numbers."""
    last: dict[str, str] = {}
    for name in _names(layers):
        pattern = re.sub(r"[0-9]+", "#", name)
        if pattern in last and natural_order(name) < natural_order(last[pattern]):
            return False
        last[pattern] = name
    return True


def _listing(layers: list[Layer]) -> str:
    return "\n".join(
        f"  {visible(layer.name)}: {layer.weight.shape[1]} -> {layer.weight.shape[0]}"
        for layer in layers
    )


def _moments(
    tensors: dict[str, Tensor], kinds: tuple[ForeignNormalizer, ...], size: int
) -> Moments | None:
    """The first normaliser of `size` numbers, except the critic's own; None without one."""
    for kind, (name, mean) in itertools.product(kinds, tensors.items()):
        owner = name.removesuffix(kind.mean)
        is_kind = owner != name and not owner[-1:].isalnum() and not CRITIC.search(owner)
        variance = tensors.get(f"{name.rpartition('.')[0]}.{kind.variance}")
        if is_kind and variance is not None and mean.numel() == variance.numel() == size:
            variance = variance.flatten().double()
            deviation = (variance + kind.inside).sqrt() + kind.outside
            return Moments(name, mean.flatten().double(), variance, deviation)
    return None


# ---- filling gpurl's modules; each returns notes for the user ----


def _fill_network(algorithm: PPO, actor: list[Layer], critic: list[Layer]) -> list[str]:
    network = algorithm.network
    # hidden layers: member 0 is the actor's, a critic of its own is member 1
    chains = [actor] if network.config.shared or not critic else [actor, critic]
    for member, chain in enumerate(chains):
        for target, layer in zip(network.trunk.layers, chain[:-1]):
            assert isinstance(target, Dense)
            target.weight[member].copy_(layer.weight)
            target.bias[member, 0].copy_(layer.bias)
    # last layers
    notes = []
    for label, last, chain in (
        ("actor", network.actor, actor),
        ("critic", network.critic, critic),
    ):
        if chain:
            last.weight[0].copy_(chain[-1].weight)
            last.bias[0, 0].copy_(chain[-1].bias)
            notes.append(f"{label}: {', '.join(map(visible, _names(chain)))}")
    if not critic:
        notes.append("no critic with hidden layers as the actor's: the critic is untrained")
    return notes


def _fill_head(
    algorithm: PPO, head: Gaussian, tensors: dict[str, Tensor], unit_actions: bool
) -> list[str]:
    """Standard deviation and units of continuous actions."""
    # the standard deviation, or its logarithm where the name says so
    names = [
        name
        for name, tensor in tensors.items()
        if re.search(r"std|sigma", name)
        and not NOT_WEIGHTS.search(name)
        and tensor.numel() == head.num_outputs
    ]
    if names:
        value = tensors[names[0]].flatten().float()
        is_log = re.search(r"log_?std|sigma", names[0])
        head.log_std.copy_(value if is_log else value.log())
        note = f"standard deviation: {visible(names[0])}"
    else:
        note = (
            f"no standard deviation of {head.num_outputs} numbers in it: it begins at "
            f"{algorithm.config.initial_std}"
        )
    # a policy in the environment's units; gpurl's policies act in [-1, 1]
    if not unit_actions:
        _, _, half_width, centre = head.box.units
        algorithm.network.actor.weight.div_(half_width.unsqueeze(1))
        algorithm.network.actor.bias.sub_(centre).div_(half_width)
        if names:
            head.log_std.sub_(half_width.log())
    return [note]


def _fill_normalizer(normalizer: Normalizer | None, moments: Moments | None) -> list[str]:
    if normalizer is None or moments is None:
        return []
    normalizer.mean.copy_(moments.mean)
    normalizer.variance.copy_(moments.variance)
    normalizer.count.fill_(1e6)  # so that new observations change the moments slowly
    normalizer.shift.copy_(moments.mean)
    normalizer.inv_std.copy_(1.0 / moments.deviation)
    return [f"normalised by {visible(moments.name)}"]
