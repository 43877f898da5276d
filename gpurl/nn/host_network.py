"""The actor-critic and PPO's steps by the C kernel, on the same memory as the module's: for
tensors, and for arrays of a few rows.
"""

from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.actor_critic_cpu import (
    MAX_LAYERS,
    ActorCriticCpu,
    GaussianHead,
    LossOptions,
    PpoSteps,
)
from gpurl.nn.arrays import Array, as_tensor, of_kind
from gpurl.nn.distributions import Categorical, Gaussian, Head
from gpurl.nn.networks import ActorCritic
from gpurl.nn.optimizer import FlatAdam

FEW_ROWS = 256  # so many go through numpy where the kernel does not serve: heads, normalisers


class HostNetwork(ActorCriticCpu):
    """`network` without a memory, whose parameters and `.grad` lie in CPU memory for good, as
    FlatAdam leaves them.
    """

    def __init__(self, network: ActorCritic, steps: PpoSteps | None = None) -> None:
        towers, actor, critic = network.towers, network.actor, network.critic
        hidden = list(zip(towers.weights, towers.biases))
        super().__init__(
            hidden, (actor.weight, actor.bias), (critic.weight, critic.bias), towers.activation
        )
        self.steps = steps

    @staticmethod
    def serves(network: ActorCritic) -> bool:
        """Whether there is a kernel on this machine, and one for this network."""
        num_layers = sum(len(weight) for weight in network.towers.weights)
        has_kernel = (
            type(network) is ActorCritic and network.memory is None and num_layers <= MAX_LAYERS
        )
        return has_kernel and c_library.load().functions is not None

    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """As `ActorCritic.forward`."""
        output, value = self.forward(as_tensor(x))
        return of_kind(output, x), of_kind(value, x), x

    def backward(self, of_output: Array, of_value: Array, x: Array) -> None:  # type: ignore[override]
        """As `ActorCritic.backward`."""
        super().backward(as_tensor(x), as_tensor(of_output), as_tensor(of_value))

    def learn(
        self,
        packed: Tensor,
        has_valid: bool,
        order: Tensor,
        minibatches: int,
        clip_range: float,
        entropy_coef: float,
    ) -> dict[str, Tensor]:
        """`ppo_steps` of this network's loss and optimiser."""
        assert self.steps is not None
        return self.ppo_steps(
            self.steps, packed, has_valid, order, minibatches, clip_range, entropy_coef
        )


def ppo_steps_of(
    head: Head,
    optimizer: FlatAdam,
    value_coef: float,
    clip_range_value: float | None,
    normalizes_advantage: bool,
) -> PpoSteps | None:
    """PPO's loss and optimiser for `HostNetwork.ppo_steps`; None for a head that the kernel does
    not know.
    """
    if type(head) is Gaussian:
        assert head.log_std.grad is not None
        own: GaussianHead | None = GaussianHead(
            head.log_std.detach(), head.log_std.grad, head.min_log_std, head.max_log_std
        )
    elif type(head) is Categorical:
        own = None
    else:
        return None
    options = LossOptions(
        own, head.num_outputs if own else 1, value_coef, clip_range_value, normalizes_advantage
    )
    return PpoSteps(
        options, optimizer.state, optimizer.gradient, optimizer.learning_rate, optimizer.options
    )
