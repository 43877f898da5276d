"""Why a fast engine cannot stand in for an algorithm: overridden methods, the machine, the policy.
Each function returns the reason, or "" if there is none.
"""

from collections.abc import Collection
from types import NoneType

from torch.nn import ModuleList

from gpurl.algorithms.base import Algorithm
from gpurl.algorithms.ppo import PPO
from gpurl.kernels import c_library
from gpurl.kernels.actor_critic_cpu import ACTIVATIONS
from gpurl.kernels.backend import host_sync_is_free, use_c, use_triton
from gpurl.nn.actor_critic import ActorCritic
from gpurl.nn.distributions import Categorical, Gaussian, Head
from gpurl.nn.mlp import Dense, Sequential
from gpurl.nn.normalizer import Normalizer, ValueNormalizer
from gpurl.nn.optimizer import FlatAdam

# methods that every engine calls, or that are called outside of iterations
CALLED_BY_ALL = (
    "parts",
    "reward_form",
    "set_symmetry",
    "end_learning",
    "change_setting",
    "take_over",
)


def overridden(algorithm: Algorithm, base: type[Algorithm], allowed: Collection[str] = ()) -> str:
    """Methods of its class `base` that a subclass or the object itself replaces, except `allowed`
    ones, and the same of its modules and optimisers: an engine that does not call them would ignore
    them.
    """
    # classes that `base` does not know, in front of it or behind it
    owners = [kind for kind in type(algorithm).__mro__ if kind not in base.__mro__]
    for owner in (*owners, algorithm):
        for name in vars(owner):
            is_method = not name.startswith("__") and callable(getattr(base, name, None))
            if is_method and name not in (*allowed, *CALLED_BY_ALL):
                return f"{algorithm.label} overrides {name}"
    # methods that are set on an object, and hooks
    modules = [module for module in algorithm.modules() if module is not algorithm]
    for part in (*modules, *algorithm.optimizers.values()):
        for name in vars(part):
            if callable(getattr(type(part), name, None)):
                return f"{name} of {type(part).__name__} is replaced"
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return f"{type(module).__name__} has hooks"
    return ""


def machine_obstacle(algorithm: Algorithm) -> str:
    """C computes on a CPU, and steps plain optimisers. Tensors without memory stand for a CPU's."""
    if algorithm.device.type == "meta":
        library = c_library.load()
        return library.why if library.functions is None else optimizer_obstacle(algorithm)
    if not host_sync_is_free(algorithm.device):
        return f"it computes on a CPU, not on {algorithm.device}"
    if not all(use_c(optimizer.flat) for optimizer in algorithm.optimizers.values()):
        return f"it could not be built: {c_library.load().why}"
    return optimizer_obstacle(algorithm)


def triton_obstacle(algorithm: Algorithm) -> str:
    """Triton computes on a GPU."""
    if use_triton(algorithm.num_updates):
        return ""
    device = algorithm.device
    return f"the device is {device}" if device.type == "cpu" else f"Triton does not run on {device}"


def optimizer_obstacle(algorithm: Algorithm) -> str:
    """Kernels of a whole step know FlatAdam, which moves all weights."""
    for optimizer in algorithm.optimizers.values():
        if type(optimizer) is not FlatAdam:
            return f"it steps by FlatAdam, not by {type(optimizer).__name__}"
        if not all(parameter.requires_grad for parameter in optimizer.module.parameters()):
            return "some weights are frozen"
    return ""


def policy_obstacle(algorithm: PPO, heads: tuple[type[Head], ...] = (Gaussian, Categorical)) -> str:
    """Kernels of a whole policy know plain MLPs without memory, some heads, and float32 or tf32."""
    network = algorithm.network
    if type(network) is not ActorCritic:
        return f"it does not know the network {type(network).__name__}"
    if algorithm.is_recurrent:
        return "it computes policies without memory"
    if not network.config.is_plain:
        return "it does not know layer norms and residual blocks"
    if network.config.activation not in ACTIVATIONS:
        return f"it does not know activation {network.config.activation}"
    if type(algorithm.head) not in heads:
        return f"it does not know {type(algorithm.head).__name__} actions"
    if algorithm.head.variant:
        return f"it does not know {algorithm.head.variant}"
    if algorithm.precision == "bf16":
        return "it computes in a higher precision than bf16"
    # what a subclass has changed in make_networks
    for layer in network.modules():
        activation = (
            "none" if layer in (network.actor, network.critic) else network.config.activation
        )
        if type(layer) not in (ActorCritic, Sequential, Dense, ModuleList):
            return f"it does not know the layer {type(layer).__name__}"
        if isinstance(layer, Dense) and (layer.activation, layer.norm) != (activation, None):
            return f"it expects activation {activation} without layer norm in every layer"
    for normalizer in (algorithm.normalizer, algorithm.value_normalizer):
        if type(normalizer) not in (NoneType, Normalizer, ValueNormalizer):
            return f"it does not know the normaliser {type(normalizer).__name__}"
    return ""


def loss_obstacle(algorithm: PPO) -> str:
    """Kernels of a whole update know the terms of PPO's loss that Schulman et al. 2017 has."""
    if algorithm.config.bounds_coef:
        return f"it does not know bounds_coef {algorithm.config.bounds_coef}"
    if algorithm.learns_symmetry:
        return f"it does not know mirrored steps, symmetry is {algorithm.config.symmetry}"
    return ""
