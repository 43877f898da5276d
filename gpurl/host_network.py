"""The actor-critic's forward and backward in numpy, on the same memory: for a few rows torch's calls cost more than the arithmetic."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpurl.networks import ActorCritic

FEW_ROWS, MANY_NUMBERS = 256, 2048


def _tanh(z: np.ndarray) -> None:
    """Of many numbers 2 sigmoid(2z) - 1: torch's sigmoid takes a third of the time of anybody's tanh, with an absolute error of 1e-7."""
    if z.size < MANY_NUMBERS:
        np.tanh(z, out=z)
        return
    z *= 2.0
    torch.from_numpy(z).sigmoid_()
    z *= 2.0
    z -= 1.0


ACTIVATIONS: dict[str, Callable[[np.ndarray], Any]] = {  # in place
    "tanh": _tanh,
    "elu": lambda z: torch.nn.functional.elu_(torch.from_numpy(z)),
    "relu": lambda z: np.maximum(z, 0.0, out=z),
}
SLOPES = {  # by the value after the activation
    "tanh": lambda h: 1.0 - h * h,
    "elu": lambda h: np.minimum(h, 0.0) + 1.0,
    "relu": lambda h: h > 0.0,
}


class HostNetwork:
    """`network` without a memory, whose parameters and `.grad` lie in CPU memory for good, as FlatAdam leaves them."""

    def __init__(self, network: ActorCritic) -> None:
        self.activation = network.towers.activation
        self.layers = [(*_views(w), *_views(b)) for w, b in zip(network.towers.weights, network.towers.biases)]
        self.actor = (*_views(network.actor.weight), *_views(network.actor.bias))
        self.critic = (*_views(network.critic.weight), *_views(network.critic.bias))

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """As `ActorCritic.forward`."""
        outputs = [x]
        for weight, _, bias, _ in self.layers:
            z = np.matmul(outputs[-1], weight.transpose(0, 2, 1))  # [E, B, out]
            z += bias
            ACTIVATIONS[self.activation](z)
            outputs.append(z)
        if not self.layers:
            outputs = [outputs[0][None]]
        output = outputs[-1][0] @ self.actor[0].T
        output += self.actor[2]
        value = outputs[-1][-1] @ self.critic[0][0]
        value += self.critic[2]
        return output, value, outputs

    def backward(self, of_output: np.ndarray, of_value: np.ndarray, outputs: list[np.ndarray]) -> None:
        """As `ActorCritic.backward`."""
        last = outputs[-1]
        np.matmul(of_output.T, last[0], out=self.actor[1])
        np.add.reduce(of_output, 0, out=self.actor[3])
        np.matmul(of_value, last[-1], out=self.critic[1][0])
        self.critic[3][0] = of_value.sum()
        gradient, ones = np.empty_like(last), np.ones((1, last.shape[1]), np.float32)
        np.matmul(of_output, self.actor[0], out=gradient[0])
        if len(last) == 2:
            np.multiply.outer(of_value, self.critic[0][0], out=gradient[1])
        else:
            gradient[0] += np.multiply.outer(of_value, self.critic[0][0])
        for number in reversed(range(len(self.layers))):
            weight, weight_gradient, _, bias_gradient = self.layers[number]
            gradient *= SLOPES[self.activation](outputs[number + 1])
            np.matmul(ones, gradient, out=bias_gradient)
            np.matmul(gradient.transpose(0, 2, 1), outputs[number], out=weight_gradient)
            if number:
                gradient = np.matmul(gradient, weight)


def _views(parameter: torch.nn.Parameter) -> tuple[np.ndarray, np.ndarray]:
    """(parameter, its gradient) as arrays on the same memory."""
    assert parameter.grad is not None
    return parameter.detach().numpy(), parameter.grad.numpy()
