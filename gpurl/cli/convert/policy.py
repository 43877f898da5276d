"""Weights of another trainer's MLP policy as a run of gpurl's: which tensor is which layer, the
units of actions, normalised observations.

Tensors do not tell their activation, so the user does. Everything else is read off names and
shapes, told, and refused where it is not one actor from the environment's observations to its
actions.
"""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpurl.algorithms import resolve_algorithm
from gpurl.algorithms.ppo import PPO
from gpurl.cli.convert.tensors import Converted, in_order
from gpurl.envs.registry import make_env
from gpurl.errors import CheckpointError, UsageError, visible
from gpurl.nn.distributions import Gaussian, make_head
from gpurl.nn.normalizer import Normalizer
from gpurl.run.display import Display
from gpurl.run.run_folder import create_run_folder, lock_run, write_run_info
from gpurl.run.settings import Settings
from gpurl.run.setup import choose_device, make_trainer

Layers = list[tuple[str, Tensor, Tensor]]  # name, weight [out, in], bias [out]

OF_CRITIC = re.compile(r"critic|value|vf")
NOT_WEIGHTS = re.compile(r"optim|target|normaliz|mean_std|preprocessor")
MAX_LAYERS = 8
# name of the mean: (name of the variance, deviation from it), as each library divides
NORMALIZERS = {
    "obs_normalizer._mean": ("_var", lambda variance: variance.sqrt() + 1e-2),  # rsl_rl
    "running_mean_std.running_mean": (
        "running_var",
        lambda variance: (variance + 1e-5).sqrt(),
    ),  # rl_games
    "state_preprocessor.running_mean": (
        "running_variance",
        lambda variance: variance.sqrt() + 1e-8,
    ),  # skrl
    "observation_preprocessor.running_mean": (
        "running_variance",
        lambda variance: variance.sqrt() + 1e-8,
    ),
}
OF_VALUES = (
    "value_mean_std.running_mean",
    "running_var",
    lambda variance: (variance + 1e-5).sqrt(),
)  # rl_games


def write_policy(
    converted: Converted, settings: Settings, unit_actions: bool, command: list[str]
) -> tuple[Path, list[str]]:
    """(a new run folder at step 0 that holds the policy, notes); unit_actions: it acts in [-1, 1],
    whatever the environment's limits.

    UsageError or CheckpointError where the tensors are not one.
    """
    env = make_env(settings.env, 1, "cpu", **settings.env_options)
    num_inputs = int(torch.Size(env.single_observation_space.shape or ()).numel())
    num_outputs = _outputs_of(settings, env)
    env.close()
    found, notes = converted.tensors, list[str]()
    actor, critic, shared = _networks(converted, num_inputs, num_outputs, settings.env)
    hidden = tuple(weight.shape[0] for _, weight, _ in actor[:-1])
    scale = _normalizer(found, num_inputs)
    of_values = _moments(found, *OF_VALUES, size=1) if critic is not None else None
    config: Any = settings.algorithm_config
    network = dataclasses.replace(config.network, hidden=hidden, shared=shared, memory="none")
    config = dataclasses.replace(
        config,
        **{
            "network": network,
            "normalize_obs": scale is not None,
            "normalize_value": of_values is not None,
        },
        **{"asymmetric": False, "squash": False},
    )
    settings = dataclasses.replace(settings, algorithm_config=config)
    trainer = make_trainer(settings, choose_device("cpu"))
    algorithm: Any = trainer.algorithm
    with torch.no_grad():
        _fill(algorithm, actor, critic, notes)
        if isinstance(algorithm.head, Gaussian):
            _fill_head(algorithm, found, unit_actions, notes)
        for normalizer, moments in (
            (algorithm.normalizer, scale),
            (algorithm.value_normalizer, of_values),
        ):
            if moments is not None:
                _fill_normalizer(normalizer, *moments)
                notes.append(f"normalised by {visible(moments[0])}")
        if scale is not None:
            notes.append(
                f"observations are clipped {algorithm.normalizer.clip:.0f} deviations away "
                f"(rl_games and skrl: 5, rsl_rl: nowhere)"
            )
    try:
        trainer.start()
        if bad := trainer.engine.guards.steps.bad_weights():  # before there is a folder
            raise CheckpointError(f"it is no policy to go on with, not finite in gpurl: {bad}")
        train = settings.train
        trainer.folder = create_run_folder(
            Path(train.root), settings.env, settings.algorithm, train.seed, train.run_dir
        )
        with lock_run(trainer.folder):
            write_run_info(trainer.folder, settings.to_dict(), command)
            if unsaved := trainer.save(Display("", 0, quiet=True)):
                raise CheckpointError(unsaved)
    finally:
        trainer.env.close()
    return trainer.folder, notes


def _outputs_of(settings: Settings, env: Any) -> int:
    if not issubclass(resolve_algorithm(settings.algorithm), PPO):
        raise UsageError(
            f"convert makes runs of ppo and a2c, not {settings.algorithm}; others can clone one: "
            f"gpurl train bc --teacher RUN"
        )
    return make_head(env.single_action_space, algorithm=settings.algorithm).num_outputs


def _networks(
    converted: Converted, num_inputs: int, num_outputs: int, env: str
) -> tuple[Layers, Layers | None, bool]:
    """(actor; critic, None where there is none of the actor's hidden layers; whether it is one
    layer on the actor's).
    """
    layers = _layers(converted.tensors)
    others = [layer for layer in layers if not OF_CRITIC.search(layer[0])]
    actors = _chains(others, num_inputs, num_outputs)
    if not actors:
        wanted = f"layers from {num_inputs} numbers to {num_outputs}"
        raise CheckpointError(
            f"no actor of {env} in it: wanted {wanted}, "
            f"found\n{_listing(layers) or '  no dense layers'}"
        )
    actor = _settled(actors, others, converted.ordered)
    of_critic = [layer for layer in layers if OF_CRITIC.search(layer[0])]
    if (
        len(actor) > 1
        and len(of_critic) == 1
        and of_critic[0][1].shape == (1, actor[-1][1].shape[1])
    ):
        return actor, of_critic, True
    critics = [
        chain for chain in _chains(of_critic, num_inputs, 1) if _hidden(chain) == _hidden(actor)
    ]
    return actor, _settled(critics, of_critic, converted.ordered) if critics else None, False


def _hidden(chain: Layers) -> list[torch.Size]:
    return [weight.shape for _, weight, _ in chain[:-1]]


def _listing(layers: Layers) -> str:
    return "\n".join(
        f"  {visible(name)}: {weight.shape[1]} -> {weight.shape[0]}" for name, weight, _ in layers
    )


def _layers(tensors: dict[str, Tensor]) -> Layers:
    """All dense layers, in the order of the file."""
    pairs = [
        (name[: -len(".weight")], tensor)
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2
    ]
    return [
        (name, weight.float(), tensors[f"{name}.bias"].float())
        for name, weight in pairs
        if not NOT_WEIGHTS.search(name)
        and f"{name}.bias" in tensors
        and tensors[f"{name}.bias"].shape == weight.shape[:1]
    ]


def _chains(layers: Layers, num_inputs: int, num_outputs: int) -> list[Layers]:
    """All orders in which shapes allow all of them to stand one behind the other, the nearest to
    the file's first.
    """
    if not 0 < len(layers) <= MAX_LAYERS:
        return []
    found = []
    for order in itertools.permutations(layers):
        sizes = [num_inputs, *(weight.shape[0] for _, weight, _ in order)]
        if sizes[-1] == num_outputs and all(
            weight.shape[1] == size for (_, weight, _), size in zip(order, sizes)
        ):
            found.append(list(order))
    return found


def _settled(chains: list[Layers], layers: Layers, ordered: bool) -> Layers:
    """The one of several that names or the order of `layers`, the file's own, tell.

    CheckpointError where neither does, or each tells another: another policy would play.
    """
    counted = [chain for chain in chains if _counts_up(_names(chain))] or chains
    if ordered and _names(chains[0]) == _names(layers) and chains[0] is not counted[0]:
        raise CheckpointError(
            "its layers fit in the order of the file and in that of their names, and these are two "
            "policies; number the names in the order "
            f"of the layers:\n{_listing(chains[0])}"
        )
    if len(counted) > 1 and not ordered:
        raise CheckpointError(
            f"its layers fit in {len(counted)} orders, and safetensors keeps none; convert the "
            f"file that it was made of, or number the "
            f"names in the order of the layers:\n{_listing(chains[0])}"
        )
    return counted[0]


def _names(layers: Layers) -> list[str]:
    return [name for name, _, _ in layers]


def _counts_up(names: list[str]) -> bool:
    """Whether names that differ in numbers alone stand in the order of these numbers."""
    last: dict[str, str] = {}
    for name in names:
        pattern = re.sub(r"[0-9]+", "#", name)
        if pattern in last and in_order(name) < in_order(last[pattern]):
            return False
        last[pattern] = name
    return True


def _normalizer(tensors: dict[str, Tensor], size: int) -> tuple[str, Tensor, Tensor, Tensor] | None:
    found = (
        _moments(tensors, mean, variance, deviation, size)
        for mean, (variance, deviation) in NORMALIZERS.items()
    )
    return next(filter(None, found), None)


def _moments(
    tensors: dict[str, Tensor], mean: str, variance: str, deviation: Any, size: int
) -> tuple[str, Tensor, Tensor, Tensor] | None:
    """(name, mean [D], variance [D], what is divided by [D]) of a normaliser whose mean is called
    so, but not the critic's own.
    """
    for name, tensor in tensors.items():
        head = name.removesuffix(mean)
        if (
            head != name
            and not (head and head[-1].isalnum())
            and not re.search(r"critic", head)
            and tensor.numel() == size
        ):
            spread = (
                tensors[name.removesuffix(mean.rpartition(".")[2]) + variance].flatten().double()
            )
            return name, tensor.flatten().double(), spread, deviation(spread)
    return None


def _fill_normalizer(
    normalizer: Normalizer, name: str, mean: Tensor, variance: Tensor, deviation: Tensor
) -> None:
    normalizer.mean.copy_(mean)
    normalizer.variance.copy_(variance)
    normalizer.count.fill_(1e6)  # what was seen there counts, and what comes moves it slowly
    normalizer.shift.copy_(mean)
    normalizer.inv_std.copy_(1.0 / deviation)


def _fill(algorithm: Any, actor: Layers, critic: Layers | None, notes: list[str]) -> None:
    """The towers, of which the actor's is the first, and what is behind them."""
    network = algorithm.network
    chains = (
        [actor] if critic is None or network.towers.weights[0].shape[0] == 1 else [actor, critic]
    )
    for place, chain in enumerate(chains if network.towers.weights else []):
        for number, (_, weight, bias) in enumerate(chain[:-1]):
            network.towers.weights[number][place].copy_(weight)
            network.towers.biases[number][place, 0].copy_(bias)
    for layer, chain in ((network.actor, actor), (network.critic, critic or [])):
        if chain:
            layer.weight.copy_(chain[-1][1])
            layer.bias.copy_(chain[-1][2])
            notes.append(
                f"{'actor' if chain is actor else 'critic'}: "
                f"{', '.join(visible(name) for name, _, _ in chain)}"
            )
    if critic is None:
        notes.append("no critic with hidden layers as the actor's: values begin anew")


def _fill_head(
    algorithm: Any, tensors: dict[str, Tensor], unit_actions: bool, notes: list[str]
) -> None:
    """Deviation and units of continuous actions."""
    head, count = algorithm.head, algorithm.head.num_outputs
    logs = re.compile(r"log_?std|sigma")
    names = [
        name
        for name, tensor in tensors.items()
        if re.search(r"std|sigma", name) and tensor.numel() == count
    ]
    name = next((name for name in names if not NOT_WEIGHTS.search(name)), None)
    if name is None:
        notes.append(
            f"no standard deviation of {count} numbers in it: it begins at "
            f"{algorithm.config.initial_std}"
        )
    else:
        value = tensors[name].flatten().float()
        head.log_std.copy_(value if logs.search(name) else value.log())
        notes.append(f"standard deviation: {visible(name)}")
    if not unit_actions:  # a policy in the environment's units; gpurl's span [-1, 1]
        half, centre = head.box.units[2], head.box.units[3]
        layer = algorithm.network.actor
        layer.weight.div_(half.unsqueeze(1))
        layer.bias.sub_(centre).div_(half)
        if name is not None:
            head.log_std.sub_(half.log())
