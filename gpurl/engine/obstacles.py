"""Why a fast engine cannot stand in for an algorithm: overridden methods, the machine, the policy.
Each function returns the reason, or "" if there is none.
"""

from collections.abc import Collection

from gpurl.algorithms.base import Algorithm
from gpurl.algorithms.ppo import PPO
from gpurl.kernels import c_library
from gpurl.kernels.backend import host_sync_is_free, use_c
from gpurl.nn.actor_critic import ActorCritic
from gpurl.nn.distributions import Categorical, Gaussian
from gpurl.nn.optimizer import FlatAdam


def overridden(algorithm: Algorithm, base: type[Algorithm], allowed: Collection[str] = ()) -> str:
    """Methods of its class `base` that a subclass or the object itself replaces, except `allowed`
    ones: an engine that does not call them would ignore them.
    """
    classes = type(algorithm).__mro__
    for owner in (*classes[: classes.index(base)], algorithm):
        for name in vars(owner):
            is_method = not name.startswith("__") and callable(getattr(base, name, None))
            if is_method and name not in allowed:
                return f"{algorithm.label} overrides {name}"
    return ""


def machine_obstacle(algorithm: Algorithm) -> str:
    """C computes on a CPU, and steps plain optimisers."""
    if not host_sync_is_free(algorithm.device):
        return f"it computes on a CPU, not on {algorithm.device}"
    optimizers = algorithm.optimizers.values()
    if not all(use_c(optimizer.flat) for optimizer in optimizers):
        return f"it could not be built: {c_library.load().why}"
    for optimizer in optimizers:
        if type(optimizer) is not FlatAdam or optimizer.reduce is not FlatAdam.reduce:
            return "it steps by FlatAdam without a hook"
        if not all(parameter.requires_grad for parameter in optimizer.module.parameters()):
            return "some weights are frozen"
    return ""


def policy_obstacle(algorithm: PPO) -> str:
    """Kernels of a whole policy know plain MLPs without memory, two heads, and float32 or tf32."""
    if type(algorithm.network) is not ActorCritic:
        return f"it does not know the network {type(algorithm.network).__name__}"
    if algorithm.is_recurrent:
        return "it computes policies without memory"
    if not algorithm.network.config.is_plain:
        return "it does not know layer norms and residual blocks"
    if type(algorithm.head) not in (Gaussian, Categorical):
        return f"it does not know {type(algorithm.head).__name__} actions"
    if algorithm.precision == "bf16":
        return "it computes in a higher precision than bf16"
    return ""
