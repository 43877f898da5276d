"""All weights of a module as views of one flat tensor, and Adam on it: one kernel, one clip, one reduction between ranks."""

import torch
from torch import Tensor, nn

from gpurl.kernels.adam import AdamOptions, AdamState, adam_step

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
        used = sum(size + -size % ALIGNMENT for size in sizes)
        self.flat = torch.zeros(used + -used % BLOCK, device=device)
        self.gradient = torch.zeros_like(self.flat)
        step = torch.zeros((), dtype=torch.int64, device=device)
        self.state = AdamState(self.flat, torch.zeros_like(self.flat), torch.zeros_like(self.flat), step)
        self.options = AdamOptions(eps=epsilon, weight_decay=weight_decay, decoupled=True, max_grad_norm=max_grad_norm)
        self.learning_rate = torch.tensor(learning_rate, device=device)
        self._move_into_flat()

    def _move_into_flat(self) -> None:
        offset = 0
        for parameter in self.parameters:
            size = parameter.numel()
            view = self.flat[offset : offset + size].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self.gradient[offset : offset + size].view_as(parameter)
            offset += size + -size % ALIGNMENT

    def step(self) -> Tensor:
        """Take one step along the gradients that were written into the parameters' `.grad`; returns their norm before clipping, 0-d.

        `.grad` of every parameter is a view of one flat tensor: write into it, never assign it.
        """
        return adam_step(self.state, self.gradient, self.learning_rate, self.options)

    def state_dict(self) -> dict[str, Tensor]:
        """Moments, step and learning rate."""
        _, exp_avg, exp_avg_sq, step, _ = self.state
        return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": step, "learning_rate": self.learning_rate}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict()`."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
