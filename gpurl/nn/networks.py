"""Networks: stacked MLPs whose forward and backward are written out, a GRU before them, and the
actor-critic of both.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gpurl.checks import check_choices
from gpurl.errors import UsageError

MANY_ROWS = 1024
MANY_NUMBERS = 16384
Carry = tuple[Tensor, ...]  # () without memory, else one [N, H] tensor a memory


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

    def __post_init__(self) -> None:
        check_choices(self, {"activation": tuple(_FORWARD), "memory": ("none", "gru")})
        if min((*self.hidden, self.memory_size)) < 1:
            raise UsageError(
                f"hidden and memory_size must be at least 1, got {self.hidden} and "
                f"{self.memory_size}"
            )
        if self.shared and not self.hidden:
            raise UsageError("shared needs at least one hidden layer to share, hidden is empty")


def _tanh_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """tanh of `stacked_affine`. Of many numbers on a CPU as 2 sigmoid(2z) - 1: a third of
    torch.tanh's time there, absolute error 1e-7.
    """
    if x.device.type != "cpu" or x.shape[-2] * bias.numel() < MANY_NUMBERS:
        return stacked_affine(x, weight, bias).tanh_()
    z = stacked_affine(x, weight, bias, scale=2.0).sigmoid_()
    return torch.add(z.new_full((), -1.0), z, alpha=2.0, out=z)


_FORWARD = {
    "tanh": _tanh_layer,
    "elu": lambda x, weight, bias: torch.nn.functional.elu_(stacked_affine(x, weight, bias)),
    "relu": lambda x, weight, bias: stacked_affine(x, weight, bias).relu_(),
}
# gradient before the activation from the gradient and the value after it, in place of the gradient
SLOPE = {
    "none": lambda gradient, h: gradient,
    "tanh": lambda gradient, h: torch.ops.aten.tanh_backward.grad_input(
        gradient, h, grad_input=gradient
    ),
    "elu": lambda gradient, h: torch.ops.aten.elu_backward.grad_input(
        gradient, 1.0, 1.0, 1.0, True, h, grad_input=gradient
    ),
    "relu": lambda gradient, h: torch.ops.aten.threshold_backward.grad_input(
        gradient, h, 0.0, grad_input=gradient
    ),
}


def _one_by_one(x: Tensor) -> bool:
    """Whether matrices go through one multiplication each: on a CPU a batched one of many rows
    [..., B, D] uses one core only.
    """
    return x.device.type == "cpu" and x.shape[-2] >= MANY_ROWS


def stacked_affine(x: Tensor, weight: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    """scale * (x_e W_e^T + b_e), [E, B, out]; x: [E, B, in], or [B, in] for all; weight: [E, out,
    in]; bias: [E, 1, out].
    """
    num_towers = weight.shape[0]
    x = x if x.dim() == 3 else x.expand(num_towers, *x.shape)
    if not _one_by_one(x):
        return torch.baddbmm(bias, x, weight.transpose(1, 2), beta=scale, alpha=scale)
    out = x.new_empty(num_towers, x.shape[1], weight.shape[1])
    for e in range(num_towers):
        torch.addmm(bias[e], x[e], weight[e].t(), beta=scale, alpha=scale, out=out[e])
    return out


def stacked_weight_gradient(gradient: Tensor, x: Tensor, out: Tensor) -> None:
    """sum over rows of gradient_e x_e -> out [E, out, in]; gradient: [E, B, out]; x: [E, B, in], or
    [B, in] for all.
    """
    x = x if x.dim() == 3 else x.expand(gradient.shape[0], *x.shape)
    if out.dtype != gradient.dtype:
        out.copy_(torch.bmm(gradient.transpose(1, 2), x))
        return
    if not _one_by_one(x):
        torch.bmm(gradient.transpose(1, 2), x, out=out)
        return
    for e in range(
        gradient.shape[0]
    ):  # the thinner factor goes first, which CPU libraries do up to 5 times faster
        if gradient.shape[2] <= x.shape[2]:
            torch.mm(gradient[e].t(), x[e], out=out[e])
        else:
            out[e].copy_(torch.mm(x[e].t(), gradient[e]).t())


def stacked_input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """gradient_e W_e, [E, B, in]; gradient: [E, B, out]; weight: [E, out, in]."""
    if not _one_by_one(gradient):
        return torch.bmm(gradient, weight)
    out = gradient.new_empty(*gradient.shape[:2], weight.shape[2])
    for e in range(gradient.shape[0]):
        torch.mm(gradient[e], weight[e], out=out[e])
    return out


class Layer(nn.Module):
    """Weight [out, in] and bias [out], orthogonal initialisation with `gain` (Saxe et al. 2014)."""

    def __init__(self, num_inputs: int, num_outputs: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(num_outputs, num_inputs), gain))
        self.bias = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, in] -> [B, out]."""
        return torch.addmm(self.bias, x, self.weight.t())

    def backward(self, gradient: Tensor, x: Tensor) -> None:
        """Write the gradients of weight and bias into their `.grad`; gradient: [B, out] of the
        output for x [B, in].
        """
        torch.mm(gradient.t(), x, out=self.weight.grad)
        torch.sum(gradient, 0, out=self.bias.grad)


class Towers(nn.Module):
    """E networks of equal hidden layers, activated throughout, as one: weights [E, out, in], one
    matrix multiplication a layer.
    """

    def __init__(self, num_towers: int, sizes: tuple[int, ...], activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.dtype = (
            torch.float32
        )  # of the products; bfloat16 keeps the parameters and their gradients float32
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for num_inputs, num_outputs in itertools.pairwise(sizes):
            stack = [
                nn.init.orthogonal_(torch.empty(num_outputs, num_inputs), math.sqrt(2.0))
                for _ in range(num_towers)
            ]
            self.weights.append(nn.Parameter(torch.stack(stack)))
            self.biases.append(nn.Parameter(torch.zeros(num_towers, 1, num_outputs)))
        self._layers = list(
            zip(self.weights, self.biases)
        )  # a plain list: walking an nn.Module costs more than a small layer

    def forward(self, x: Tensor, first: int = 0) -> list[Tensor]:
        """x: [B, in] -> x and the outputs [E, B, H] of all layers; without layers x itself, [1, B,
        in]. E: the towers from `first` on.
        """
        outputs = [x.to(self.dtype) if self._layers else x.unsqueeze(0)]
        for weight, bias in self._layers:
            outputs.append(
                _FORWARD[self.activation](
                    outputs[-1], weight[first:].to(self.dtype), bias[first:].to(self.dtype)
                )
            )
        return outputs

    def backward(self, gradient: Tensor, outputs: list[Tensor], needs_input: bool) -> Tensor | None:
        """Write the parameters' gradients into their `.grad`; gradient: [E, B, H] of the last
        output, overwritten -> that of x [B, in].
        """
        gradient = gradient.to(outputs[-1].dtype)
        for number in reversed(range(len(self._layers))):
            weight, bias = self._layers[number]
            gradient = SLOPE[self.activation](gradient, outputs[number + 1])
            torch.sum(gradient, 1, keepdim=True, dtype=torch.float32, out=bias.grad)
            stacked_weight_gradient(gradient, outputs[number], weight.grad)
            if number or needs_input:
                gradient = stacked_input_gradient(gradient, weight.to(gradient.dtype))
        return gradient.sum(0, dtype=torch.float32) if needs_input else None


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

    def unroll(self, x: Tensor, h: Tensor, start: Tensor) -> Tensor:
        """x: [T, N, in]; h: [N, H] before the first step; start: [T, N] bool, where the memory is
        emptied before the step -> [T, N, H].
        """
        gates = self.input(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        keep = (~start).unsqueeze(2)
        outputs = []
        for t in range(x.shape[0]):
            h = self._step(gates[t], h * keep[t])
            outputs.append(h)
        return torch.stack(outputs)

    @torch.enable_grad()
    def unroll_episodes(self, x: Tensor, h: Tensor, ended: Tensor) -> Tensor:
        """`unroll` for autograd to go back through, where episodes ended [T, N] with the step."""
        return self.unroll(x, h, torch.cat((torch.zeros_like(ended[:1]), ended[:-1])))

    def backward(self, outputs: Tensor, gradient: Tensor) -> None:
        """Write the parameters' gradients into their `.grad`; gradient: [T, N, H] of `outputs`,
        which `unroll` gave under autograd.
        """
        parameters = list(self.parameters())
        for parameter, found in zip(parameters, torch.autograd.grad(outputs, parameters, gradient)):
            assert parameter.grad is not None
            parameter.grad.copy_(found)


class ActorCritic(nn.Module):
    """Observations to the policy head's numbers and to a value; separate towers or one that both
    read, with or without memory.

    The gradient is written out in `backward`: for small networks autograd's walk costs more than
    the arithmetic.
    """

    def __init__(self, config: NetworkConfig, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.memory = Gru(num_inputs, config.memory_size) if config.memory == "gru" else None
        sizes = (config.memory_size if self.memory is not None else num_inputs, *config.hidden)
        self.towers = Towers(1 if config.shared else 2, sizes, config.activation)
        self.actor = Layer(sizes[-1], num_outputs, 0.01)
        self.critic = Layer(sizes[-1], 1, 1.0)

    def initial_carry(self, num_envs: int, device: torch.device) -> Carry:
        """Empty memory of `num_envs` episodes."""
        return (
            () if self.memory is None else (torch.zeros(num_envs, self.memory.size, device=device),)
        )

    def remember(self, obs: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """obs: [N, D], one step -> (what the towers read [N, F], next carry)."""
        if self.memory is None:
            return obs, carry
        memory = self.memory(obs, carry[0])
        return memory, (memory,)

    def unroll(self, obs: Tensor, h: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
        """obs [T, N, D], memory h [N, H] before them, ended [T, N] -> (what the towers read [T * N,
        F], what memory.backward needs).
        """
        assert self.memory is not None
        sequence = self.memory.unroll_episodes(obs, h, ended)
        return sequence.detach().flatten(0, 1), sequence

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Of the hidden layers' products."""
        self.towers.dtype = dtype

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Any]:
        """x: [B, F] -> (the policy head's numbers [B, A], value [B], what `backward` needs)."""
        outputs = self.towers(x)
        last = outputs[-1].float()
        return self.actor(last[0]), self.critic(last[-1]).squeeze(1), outputs

    def value(self, x: Tensor) -> Tensor:
        """x: [B, F] -> value [B], without the actor."""
        return self.critic(self.towers(x, first=-1)[-1][-1].float()).squeeze(1)

    def backward(
        self, output_gradient: Tensor, value_gradient: Tensor, outputs: Any
    ) -> Tensor | None:
        """Write all gradients into the parameters' `.grad`; with a memory returns that of x [B, F],
        else None.
        """
        last, of_value = outputs[-1].float(), value_gradient.unsqueeze(1)
        self.actor.backward(output_gradient, last[0])
        self.critic.backward(of_value, last[-1])
        gradient = torch.empty_like(last)
        torch.mm(output_gradient, self.actor.weight, out=gradient[0])
        if len(last) == 2:
            torch.mm(of_value, self.critic.weight, out=gradient[1])
        else:
            gradient[0].addmm_(of_value, self.critic.weight)
        return self.towers.backward(gradient, outputs, needs_input=self.memory is not None)


class AsymmetricActorCritic(ActorCritic):
    """An actor that reads observations and a critic that reads a state which only it is given
    (Pinto et al. 2017): rows hold both.
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

    def remember(self, obs: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """obs: [N, D + S], one step -> (what the towers read [N, F + S], next carry); the memory is
        the actor's.
        """
        features, next_carry = super().remember(obs[:, : self.num_inputs], carry)
        return (
            obs if self.memory is None else torch.cat((features, obs[:, self.num_inputs :]), dim=1)
        ), next_carry

    def unroll(self, obs: Tensor, h: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
        features, sequence = super().unroll(obs[..., : self.num_inputs], h, ended)
        return torch.cat((features, obs[..., self.num_inputs :].flatten(0, 1)), dim=1), sequence

    def set_dtype(self, dtype: torch.dtype) -> None:
        super().set_dtype(dtype)
        self.critic_towers.dtype = dtype

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, F + S] -> what the actor reads [B, F], what the critic reads [B, S]."""
        width = self.num_inputs if self.memory is None else self.memory.size
        return x[:, :width], x[:, width:]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Any]:
        of_actor, of_critic = self._split(x)
        acting, judging = self.towers(of_actor), self.critic_towers(of_critic)
        return (
            self.actor(acting[-1][0].float()),
            self.critic(judging[-1][0].float()).squeeze(1),
            (acting, judging),
        )

    def value(self, x: Tensor) -> Tensor:
        return self.critic(self.critic_towers(self._split(x)[1])[-1][0].float()).squeeze(1)

    def backward(
        self, output_gradient: Tensor, value_gradient: Tensor, outputs: Any
    ) -> Tensor | None:
        """As that of ActorCritic; with a memory returns the gradient of its part of x."""
        acting, judging = outputs
        of_value = value_gradient.unsqueeze(1)
        self.actor.backward(output_gradient, acting[-1][0].float())
        self.critic.backward(of_value, judging[-1][0].float())
        self.critic_towers.backward(
            torch.mm(of_value, self.critic.weight).unsqueeze(0), judging, needs_input=False
        )
        return self.towers.backward(
            torch.mm(output_gradient, self.actor.weight).unsqueeze(0),
            acting,
            needs_input=self.memory is not None,
        )
