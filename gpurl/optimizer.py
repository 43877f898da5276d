"""All weights of a module as views of one flat tensor, and Adam on it: one kernel, one clip, one reduction between ranks."""

import torch
from torch import Tensor, nn

from gpurl.kernels.adam import adam_step

ALIGNMENT = 4  # floats: every weight starts at 16 bytes, which vectorised loads need
BLOCK = 1024  # the whole is padded to the kernel's block


class FlatAdam:
    """Adam over `module`'s parameters, moved into one flat float32 tensor (a later `copy.deepcopy` of the module would undo that).

    The learning rate is a 0-d tensor on the device: schedules write it there, nothing is baked into a graph.
    """

    def __init__(
        self, module: nn.Module, learning_rate: float, epsilon: float = 1e-5, weight_decay: float = 0.0, max_grad_norm: float | None = None
    ) -> None:
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        device = self.parameters[0].device
        sizes = [parameter.numel() for parameter in self.parameters]
        self._pads = [torch.zeros(-size % ALIGNMENT, device=device) for size in sizes]
        used = sum(size + -size % ALIGNMENT for size in sizes)
        self.flat = torch.zeros(used + -used % BLOCK, device=device)
        self.gradient = torch.zeros_like(self.flat)
        self._gradient_used = self.gradient[:used]
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.step_count = torch.zeros((), dtype=torch.int64, device=device)
        self.learning_rate = torch.tensor(learning_rate, device=device)
        self.epsilon, self.weight_decay, self.max_grad_norm = epsilon, weight_decay, max_grad_norm
        self._move_into_flat()

    def _move_into_flat(self) -> None:
        offset = 0
        for parameter in self.parameters:
            size = parameter.numel()
            view = self.flat[offset : offset + size].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            offset += size + -size % ALIGNMENT

    def step(self, loss: Tensor) -> Tensor:
        """Differentiate the 0-d `loss` and take one step; returns the gradient's norm before clipping, 0-d."""
        gradients = torch.autograd.grad(loss, self.parameters)
        pieces = [piece for pair in zip((gradient.reshape(-1) for gradient in gradients), self._pads) for piece in pair if piece.numel()]
        torch.cat(pieces, out=self._gradient_used)
        return adam_step(
            self.flat,
            self.gradient,
            self.exp_avg,
            self.exp_avg_sq,
            self.step_count,
            self.learning_rate,
            eps=self.epsilon,
            weight_decay=self.weight_decay,
            decoupled=True,
            max_grad_norm=self.max_grad_norm,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Moments, step and learning rate."""
        return {name: getattr(self, name) for name in ("exp_avg", "exp_avg_sq", "step_count", "learning_rate")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict()`."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
