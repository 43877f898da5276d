"""Networks: an MLP whose forward and backward are written out, a GRU trunk, and the actor-critic of both."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpurl.errors import UsageError

Carry = tuple[Tensor, ...]  # () without memory, else one [N, H] tensor a memory


@dataclass(frozen=True)
class NetworkConfig:
    """Shape of the policy and value networks."""

    hidden: tuple[int, ...] = (64, 64)
    """Units of the hidden layers."""
    activation: str = "tanh"
    """tanh, elu or relu."""
    shared: bool = False
    """One trunk for actor and critic instead of two networks."""
    memory: str = "none"
    """gru puts a recurrent trunk before actor and critic."""
    memory_size: int = 64
    """Units of the memory."""

    def __post_init__(self) -> None:
        for field, choices in (("activation", tuple(_BACKWARD)), ("memory", ("none", "gru"))):
            if getattr(self, field) not in choices:
                raise UsageError(f"network.{field} is {getattr(self, field)!r}; it must be one of {', '.join(choices)}")
        if self.shared and not self.hidden:
            raise UsageError("network.shared needs at least one hidden layer to share, network.hidden is empty")


def _affine(x: Tensor, weight: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    """scale * (x W^T + b); x: [B, in], weight: [out, in], bias: [out]."""
    return torch.addmm(bias, x, weight.t(), beta=scale, alpha=scale)


def _tanh_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """tanh(x W^T + b). On a CPU as 2 sigmoid(2z) - 1: a third of the time of torch.tanh there, absolute error 1e-7."""
    if x.device.type != "cpu":
        return _affine(x, weight, bias).tanh_()
    z = _affine(x, weight, bias, scale=2.0).sigmoid_()
    return torch.add(z.new_full((), -1.0), z, alpha=2.0, out=z)


LAYERS = {
    "none": _affine,
    "tanh": _tanh_layer,
    "elu": lambda x, weight, bias: torch.nn.functional.elu_(_affine(x, weight, bias)),
    "relu": lambda x, weight, bias: _affine(x, weight, bias).relu_(),
}
_BACKWARD = {  # gradient before the activation from the gradient and the value after it, written to `out`
    "tanh": lambda gradient, h, out: torch.ops.aten.tanh_backward.grad_input(gradient, h, grad_input=out),
    "elu": lambda gradient, h, out: torch.ops.aten.elu_backward.grad_input(gradient, 1.0, 1.0, 1.0, True, h, grad_input=out),
    "relu": lambda gradient, h, out: torch.ops.aten.threshold_backward.grad_input(gradient, h, 0.0, grad_input=out),
}


def mlp_forward(x: Tensor, activations: tuple[str, ...], weights: tuple[Tensor, ...]) -> list[Tensor]:
    """Outputs of all layers, the last one the result. x: [B, in]; weights: (weight [out, in], bias [out]) a layer, in order."""
    outputs = []
    for number, activation in enumerate(activations):
        x = LAYERS[activation](x, weights[2 * number], weights[2 * number + 1])
        outputs.append(x)
    return outputs


class _MlpFunction(torch.autograd.Function):
    """mlp_forward with its gradient: fewer nodes for autograd to walk, activations in place, nothing kept but layer outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activations: tuple[str, ...], *weights: Tensor) -> Tensor:
        outputs = mlp_forward(x, activations, weights)
        ctx.save_for_backward(x, *outputs, *weights[0::2])
        ctx.activations = activations
        return outputs[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0]
        num_layers = len(ctx.activations)
        inputs, weights = ctx.saved_tensors[: num_layers + 1], ctx.saved_tensors[num_layers + 1 :]
        result: list[Tensor] = []
        for layer in reversed(range(num_layers)):
            if ctx.activations[layer] != "none":  # in place, but never in the caller's gradient
                out = gradient if layer < num_layers - 1 else torch.empty_like(gradient)
                gradient = _BACKWARD[ctx.activations[layer]](gradient, inputs[layer + 1], out)
            result += [gradient.sum(0), _weight_gradient(gradient, inputs[layer])]
            if layer > 0 or ctx.needs_input_grad[0]:
                gradient = gradient @ weights[layer]
        return gradient if ctx.needs_input_grad[0] else None, None, *reversed(result)


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """[out, in] from gradient [B, out] and x [B, in]; the thinner factor goes first, which CPU libraries do up to 5 times faster."""
    return gradient.t() @ x if gradient.shape[1] <= x.shape[1] else (x.t() @ gradient).t()


class Layer(nn.Module):
    """Weight [out, in] and bias [out], orthogonal initialisation with `gain` (Saxe et al. 2014)."""

    def __init__(self, num_inputs: int, num_outputs: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(num_outputs, num_inputs), gain))
        self.bias = nn.Parameter(torch.zeros(num_outputs))


class Mlp(nn.Module):
    """sizes[0] inputs to sizes[-1] outputs; every layer but the last is activated, the last one too when `last_activated`."""

    def __init__(self, sizes: tuple[int, ...], activation: str, output_gain: float = math.sqrt(2.0), last_activated: bool = False) -> None:
        super().__init__()
        gains = [math.sqrt(2.0)] * (len(sizes) - 2) + [output_gain]
        self.layers = nn.ModuleList(Layer(i, o, gain) for i, o, gain in zip(sizes, sizes[1:], gains))
        self.activations = (activation,) * (len(sizes) - 2) + (activation if last_activated else "none",)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]."""
        weights = tuple(self.parameters())
        flat = x.flatten(0, -2) if x.dim() > 2 else x
        if torch.is_grad_enabled():
            y: Tensor = _MlpFunction.apply(flat, self.activations, *weights)
        else:
            y = mlp_forward(flat, self.activations, weights)[-1]
        return y.unflatten(0, x.shape[:-1]) if x.dim() > 2 else y


class Gru(nn.Module):
    """Gated recurrent unit (Cho et al. 2014, in the form of torch.nn.GRU): step by step while acting, unrolled for the update."""

    def __init__(self, num_inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.input = Layer(num_inputs, 3 * size, 1.0)
        self.recurrent = Layer(size, 3 * size, 1.0)

    def _step(self, gates: Tensor, h: Tensor) -> Tensor:
        """gates: [N, 3H] of the input; h: [N, H] -> [N, H]."""
        reset_in, update_in, new_in = gates.chunk(3, dim=-1)
        reset_h, update_h, new_h = _affine(h, self.recurrent.weight, self.recurrent.bias).chunk(3, dim=-1)
        new = torch.tanh(new_in + torch.sigmoid(reset_in + reset_h) * new_h)
        return torch.lerp(new, h, torch.sigmoid(update_in + update_h))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """One step: x [N, in], h [N, H] -> next h [N, H]."""
        return self._step(_affine(x, self.input.weight, self.input.bias), h)

    def unroll(self, x: Tensor, h: Tensor, start: Tensor) -> Tensor:
        """x: [T, N, in]; h: [N, H] before the first step; start: [T, N] bool, where the memory is emptied before the step -> [T, N, H]."""
        gates = _affine(x.flatten(0, 1), self.input.weight, self.input.bias).unflatten(0, x.shape[:2])
        keep = (~start).unsqueeze(2)
        outputs = []
        for t in range(x.shape[0]):
            h = self._step(gates[t], h * keep[t])
            outputs.append(h)
        return torch.stack(outputs)


class ActorCritic(nn.Module):
    """Observation features to the policy head's numbers and to a value; separate or shared trunk, with or without memory."""

    def __init__(self, config: NetworkConfig, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.memory = Gru(num_inputs, config.memory_size) if config.memory == "gru" else None
        width = config.memory_size if self.memory is not None else num_inputs
        hidden, activation = config.hidden, config.activation
        self.trunk = Mlp((width, *hidden), activation, last_activated=True) if config.shared else None
        sizes = hidden[-1:] if config.shared else (width, *hidden)
        self.actor = Mlp((*sizes, num_outputs), activation, output_gain=0.01)
        self.critic = Mlp((*sizes, 1), activation, output_gain=1.0)

    def initial_carry(self, num_envs: int, device: torch.device) -> Carry:
        """Empty memory of `num_envs` episodes."""
        return () if self.memory is None else (torch.zeros(num_envs, self.memory.size, device=device),)

    def features(self, obs: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """obs: [N, D], one step -> (features [N, F], next carry)."""
        if self.memory is not None:
            obs = self.memory(obs, carry[0])
            carry = (obs,)
        return (obs if self.trunk is None else self.trunk(obs)), carry

    def unrolled_features(self, obs: Tensor, carry: Carry, start: Tensor) -> Tensor:
        """obs: [T, N, D] of consecutive steps -> [T, N, F]; start [T, N]: a new episode begins at this step."""
        if self.memory is not None:
            obs = self.memory.unroll(obs, carry[0], start)
        return obs if self.trunk is None else self.trunk(obs)

    def value(self, features: Tensor) -> Tensor:
        """[..., F] -> [...]."""
        return self.critic(features).squeeze(-1)
