"""Networks of policies and values: stacked MLPs, a GRU, and the actor-critic of both."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from gpurl.checks import check_choices
from gpurl.errors import UsageError

PolicyState = tuple[Tensor, ...]  # () without memory, else one [N, H] tensor a memory


@dataclass(frozen=True)
class NetworkConfig:
    """Shape of the policy and value networks."""

    hidden: tuple[int, ...] = (64, 64)
    """Units of the hidden layers."""
    activation: str = "tanh"
    """tanh, elu or relu."""
    shared: bool = False
    """One trunk for actor and critic instead of two networks; a critic that reads a state of its
    own shares none.
    """
    memory: str = "none"
    """gru puts a recurrent trunk before actor and critic."""
    memory_size: int = 64
    """Units of the memory."""
    trunk: str = ""
    """A module of your own in place of the hidden layers, my_project.nets:MyTrunk: made with the
    shape of an observation and the options, it takes [B, *obs] and gives features [B, F].
    """
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Keyword arguments of the trunk."""

    def __post_init__(self) -> None:
        check_choices(self, {"activation": tuple(ACTIVATIONS), "memory": ("none", "gru")})
        if min((*self.hidden, self.memory_size)) < 1:
            raise UsageError(
                f"hidden and memory_size must be at least 1, got {self.hidden} and "
                f"{self.memory_size}"
            )
        if self.options and not self.trunk:
            raise UsageError(f"options {self.options} are those of a trunk, and there is none")
        if self.trunk and self.memory != "none":
            raise UsageError(f"trunk {self.trunk} has no memory {self.memory} before it: take one")
        if self.shared and not self.hidden and not self.trunk:
            raise UsageError("shared needs at least one hidden layer to share, hidden is empty")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh_,
    "elu": nn.functional.elu_,
    "relu": torch.relu_,
}  # in place, which autograd allows behind a product


class Layer(nn.Module):
    """Weight [out, in] and bias [out], orthogonal initialisation with `gain` (Saxe et al. 2014)."""

    def __init__(self, num_inputs: int, num_outputs: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(num_outputs, num_inputs), gain))
        self.bias = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, in] -> [B, out]."""
        return torch.addmm(self.bias, x, self.weight.t())

    def of_columns(self, x: Tensor) -> Tensor:
        """x: [in, B] -> [out, B]."""
        return torch.addmm(self.bias.unsqueeze(1), self.weight, x)


class Towers(nn.Module):
    """E networks of equal hidden layers, activated throughout, as one: weights [E, out, in], one
    matrix multiplication a layer.
    """

    def __init__(self, num_towers: int, sizes: tuple[int, ...], activation: str) -> None:
        super().__init__()
        self.num_towers, self.activation = num_towers, activation
        # of the products; with bfloat16 the parameters and their gradients stay float32
        self.dtype = torch.float32
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for num_inputs, num_outputs in itertools.pairwise(sizes):
            stack = [
                nn.init.orthogonal_(torch.empty(num_outputs, num_inputs), math.sqrt(2.0))
                for _ in range(num_towers)
            ]
            self.weights.append(nn.Parameter(torch.stack(stack)))
            self.biases.append(nn.Parameter(torch.zeros(num_towers, 1, num_outputs)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x: [B, in] -> columns [H, B] float32 of each tower; without hidden layers x's own.

        With the weight as the first factor its gradient comes in the weight's own memory layout,
        and all gradients go into FlatAdam's in one copy.
        """
        if not len(self.weights):
            return (x.t(),)
        columns = x.to(self.dtype).t().expand(self.num_towers, -1, -1)
        for weight, bias in zip(self.weights, self.biases):
            bias_column = bias.view(self.num_towers, -1, 1).to(self.dtype)
            z = torch.baddbmm(bias_column, weight.to(self.dtype), columns)
            columns = ACTIVATIONS[self.activation](z)
        return columns.float().unbind(0)


class Gru(nn.Module):
    """Gated recurrent unit (Cho et al. 2014, in the form of torch.nn.GRU): step by step while
    acting, unrolled for the update.
    """

    def __init__(self, num_inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.input = Layer(num_inputs, 3 * size, 1.0)
        self.recurrent = Layer(size, 3 * size, 1.0)

    def _step(self, gates: Tensor, h: Tensor) -> Tensor:
        """gates: [N, 3H] of the input; h: [N, H] -> [N, H]."""
        reset_in, update_in, new_in = gates.chunk(3, dim=-1)
        reset_h, update_h, new_h = self.recurrent(h).chunk(3, dim=-1)
        new = torch.tanh(new_in + torch.sigmoid(reset_in + reset_h) * new_h)
        return torch.lerp(new, h, torch.sigmoid(update_in + update_h))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """One step: x [N, in], h [N, H] -> next h [N, H]."""
        return self._step(self.input(x), h)

    def unroll(self, x: Tensor, h: Tensor, starts: Tensor) -> Tensor:
        """x: [T, N, in]; h: [N, H] before the first step; starts: [T, N] bool, where the memory is
        emptied before the step -> [T, N, H].
        """
        gates = self.input(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        keep = (~starts).unsqueeze(2)
        outputs = []
        for gates_now, keep_now in zip(gates.unbind(0), keep.unbind(0)):
            h = self._step(gates_now, h * keep_now)
            outputs.append(h)
        return torch.stack(outputs)


class ActorCritic(nn.Module):
    """Observations to the policy head's numbers and to a value; separate towers or one that both
    read, with or without a memory before them.

    Without a memory `forward` takes observations. With one it takes features: `remember` gives
    those of one step, `unroll` those of a sequence.
    """

    def __init__(self, config: NetworkConfig, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.memory = Gru(num_inputs, config.memory_size) if config.memory == "gru" else None
        sizes = (config.memory_size if self.memory is not None else num_inputs, *config.hidden)
        self.towers = Towers(1 if config.shared else 2, sizes, config.activation)
        self.actor = Layer(sizes[-1], num_outputs, 0.01)
        self.critic = Layer(sizes[-1], 1, 1.0)

    def initial_policy_state(self, num_envs: int, device: torch.device) -> PolicyState:
        """Empty memory of `num_envs` episodes."""
        if self.memory is None:
            return ()
        return (torch.zeros(num_envs, self.memory.size, device=device),)

    def remember(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        """obs: [N, D], one step -> (features [N, F], next policy state)."""
        assert self.memory is not None
        h = self.memory(obs, policy_state[0])
        return h, (h,)

    def unroll(self, obs: Tensor, h: Tensor, starts: Tensor) -> Tensor:
        """obs [T, N, D], memory h [N, H] before them, starts of episodes [T, N] -> features
        [T, N, F].
        """
        assert self.memory is not None
        return self.memory.unroll(obs, h, starts)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Of the hidden layers' products."""
        self.towers.dtype = dtype

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, F] -> (the policy head's numbers [B, A], value [B])."""
        towers = self.towers(x)
        return self._ends(towers[0], towers[-1])

    def _ends(self, acting: Tensor, judging: Tensor) -> tuple[Tensor, Tensor]:
        """Of what the last hidden layers give, columns [H, B]; rows, as kernels read them."""
        output = self.actor.of_columns(acting).t().contiguous()
        return output, self.critic.of_columns(judging).squeeze(0)


class AsymmetricActorCritic(ActorCritic):
    """An actor that reads observations and a critic that reads a state which only it is given
    (Pinto et al. 2017): rows hold both. The memory is the actor's.
    """

    def __init__(
        self, config: NetworkConfig, num_inputs: int, num_state: int, num_outputs: int
    ) -> None:
        super().__init__(
            replace(config, shared=True) if config.hidden else config, num_inputs, num_outputs
        )
        self.num_inputs = num_inputs
        self.critic_towers = Towers(1, (num_state, *config.hidden), config.activation)
        self.critic = Layer((num_state, *config.hidden)[-1], 1, 1.0)

    def remember(self, obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        """obs: [N, D + S], one step -> (features [N, F + S], next policy state)."""
        features, next_policy_state = super().remember(obs[:, : self.num_inputs], policy_state)
        return torch.cat((features, obs[:, self.num_inputs :]), dim=1), next_policy_state

    def unroll(self, obs: Tensor, h: Tensor, starts: Tensor) -> Tensor:
        features = super().unroll(obs[..., : self.num_inputs], h, starts)
        return torch.cat((features, obs[..., self.num_inputs :]), dim=2)

    def set_dtype(self, dtype: torch.dtype) -> None:
        super().set_dtype(dtype)
        self.critic_towers.dtype = dtype

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, F + S] -> (the policy head's numbers [B, A], value [B])."""
        width = self.num_inputs if self.memory is None else self.memory.size
        (acting,), (judging,) = self.towers(x[:, :width]), self.critic_towers(x[:, width:])
        return self._ends(acting, judging)
