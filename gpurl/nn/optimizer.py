"""All weights of a module as views of one flat tensor, and Adam on it: one kernel, one clip, one
reduction between ranks.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.autograd.graph import _engine_run_backward
from torch.nn.parameter import is_lazy

from gpurl.errors import UsageError
from gpurl.kernels.adam import MAX_LOSSES, AdamOptions, AdamState, SkippedSteps, adam_step

ALIGNMENT = 4  # floats: every weight starts at a multiple of 16 bytes, for vectorised loads
BLOCK = 1024  # the flat tensor is padded to the kernel's block


def flatten(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Move the parameters of `module` into one flat float32 tensor, and their gradients into
    another: (parameters, gradients). UsageError for parameters that this cannot hold.
    """
    check_parameters(module)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    sizes = [parameter.numel() for parameter in parameters]
    used = sum(size + -size % ALIGNMENT for size in sizes)
    flat = torch.zeros(used + -used % BLOCK, device=parameters[0].device)
    gradient = torch.zeros_like(flat)
    # every parameter and its gradient become views
    offset = 0
    for parameter, size in zip(parameters, sizes):
        view = flat[offset : offset + size].view_as(parameter)
        view.copy_(parameter.detach())
        parameter.data = view
        parameter.grad = gradient[offset : offset + size].view_as(parameter)
        offset += size + -size % ALIGNMENT
    return flat, gradient


def check_parameters(module: nn.Module, may_be_lazy: bool = False) -> None:
    """UsageError for a trained parameter that is not float32, or of a lazy module that has no shape
    yet.
    """
    dtype = torch.get_default_dtype()
    for name, parameter in module.named_parameters():
        where = f"parameter {name} of {type(module).__name__}"
        if is_lazy(parameter) and not may_be_lazy:
            raise UsageError(
                f"{where}: wanted a shape, got none yet; call its lazy module once in make_networks"
            )
        if parameter.requires_grad and parameter.dtype != dtype:
            raise UsageError(
                f"{where}: wanted {dtype}, got {parameter.dtype}; networks of gpurl compute "
                f"in low precision with --precision bf16"
            )


class FlatAdam:
    """Adam over `module`'s parameters, moved into one flat float32 tensor (a later `copy.deepcopy`
    of the module would undo that).

    The learning rate is a 0-d tensor on the device, which schedules write, so that a captured graph
    reads the new value. A step whose gradient or losses are not finite changes nothing; `skipped`
    counts such steps and keeps the first, which `gpurl.guards.steps` reports.
    """

    def __init__(
        self,
        module: nn.Module,
        learning_rate: float,
        epsilon: float = 1e-5,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        target: nn.Module | None = None,
        tau: float = 1.0,
        losses: tuple[str, ...] = (),
    ) -> None:
        """target: a module of the same structure, which becomes a copy of `module`; each step moves
        its trained weights by Polyak averaging with tau, and copies the buffers.

        losses: names of the losses that `step` gets.
        """
        self.module = module
        self.losses = losses
        self.flat, self.gradient = flatten(module)
        self.parameters = tuple(each for each in module.parameters() if each.requires_grad)
        self._views = [each.grad for each in self.parameters if each.grad is not None]
        self._one = torch.ones((), device=self.flat.device)
        self._zeros = torch.zeros(ALIGNMENT, device=self.flat.device)
        # the state of Adam, and the record of skipped steps
        step = torch.zeros((), dtype=torch.int64, device=self.flat.device)
        counts = torch.zeros(5, dtype=torch.int64, device=self.flat.device)
        first_losses = torch.zeros(MAX_LOSSES, device=self.flat.device)
        self.skipped = SkippedSteps(counts, torch.zeros_like(self.flat), first_losses)
        self.state = AdamState(
            self.flat,
            torch.zeros_like(self.flat),
            torch.zeros_like(self.flat),
            step,
            skipped=self.skipped,
            ticket=torch.zeros(1, dtype=torch.int32, device=self.flat.device),
        )
        self.options = AdamOptions(
            eps=epsilon,
            weight_decay=weight_decay,
            decoupled=True,
            max_grad_norm=max_grad_norm,
            tau=tau,
        )
        # of the loss that `evaluate` computed last, under torch.func.vmap
        self._gradients: tuple[Tensor, ...] | None = None
        self.initial_rate = learning_rate
        self._learning_rate = torch.tensor(learning_rate, device=self.flat.device)
        self.target = None
        # (of the target, of the module)
        self._target_tensors: list[tuple[Tensor, Tensor]] = []
        self.target_buffers: list[tuple[Tensor, Tensor]] = []
        if target is not None:
            pairs = list(zip(target.parameters(), module.parameters(), strict=True))
            for copy, parameter in pairs:
                copy.requires_grad = parameter.requires_grad
            self.target, _ = flatten(target)
            self.target_buffers = list(zip(target.buffers(), module.buffers(), strict=True))
            self._target_tensors = [*pairs, *self.target_buffers]
            self.copy_to_target()

    @property
    def learning_rate(self) -> Tensor:
        """0-d. Assigning to it writes into the same tensor, which C and captured graphs read."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: Tensor | float) -> None:
        self._learning_rate.fill_(rate)

    @torch.no_grad()
    def copy_to_target(self) -> None:
        """Make the target a copy of the module: trained weights, frozen weights and buffers."""
        for copy, tensor in self._target_tensors:
            copy.copy_(tensor)

    def evaluate(
        self, loss_function: Callable[..., Any], batch: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, metrics) of a batch, for `step`. Under torch.func.vmap, which autograd cannot look
        into, a loss must come from here, where its gradient is computed with it. UsageError, with
        the function's place, if it returns others.
        """
        if not transforms_are_active():
            return call_loss(loss_function, batch)

        def compute(*parameters: Tensor) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
            with self._replaced(parameters):
                loss, metrics = call_loss(loss_function, batch)
            return loss, (loss, metrics)

        numbers = tuple(range(len(self.parameters)))
        differentiate = torch.func.grad(compute, numbers, has_aux=True)
        self._gradients, (loss, metrics) = differentiate(*self.parameters)
        return loss, metrics

    @contextmanager
    def _replaced(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """A `with` block in which the module has these in place of its parameters."""
        number = {id(parameter): k for k, parameter in enumerate(self.parameters)}
        places = [
            (each._parameters, name, parameter)
            for each in self.module.modules()
            for name, parameter in each._parameters.items()
            if id(parameter) in number
        ]
        try:
            for owner, name, parameter in places:
                owner[name] = parameters[number[id(parameter)]]  # type: ignore[assignment]
            yield
        finally:
            for owner, name, parameter in places:
                owner[name] = parameter

    def step(
        self,
        loss: Tensor,
        losses: Tensor | None = None,
        move_target: bool = True,
        of: Callable[..., Any] | None = None,
    ) -> Tensor:
        """Differentiate the 0-d `loss` with respect to the parameters and take one step.

        losses: [L] float32 without gradient, named by the constructor's `losses`; by default the
        loss itself. If one of them or the gradient is not finite, the step is skipped: nothing
        changes, not even the target. of: the function that computed the loss, for errors. Returns
        the gradient's norm before clipping, 0-d. UsageError unless `loss` depends on these
        parameters.
        """
        self.differentiate(loss, of)
        losses = loss.detach() if losses is None else losses
        return self.step_along_gradient(move_target, losses=losses)

    def differentiate(self, loss: Tensor, of: Callable[..., Any] | None = None) -> None:
        """Write the gradient of the 0-d `loss` into the parameters' `.grad`; see `step`."""
        if transforms_are_active():
            gradients = self._taken_gradients(of)
        else:
            check_loss(loss, of)
            # torch.autograd.grad without its checks, which take as long as a small network on a CPU
            gradients = _engine_run_backward(
                (loss,), (self._one,), False, False, self.parameters, True, accumulate_grad=False
            )
        if all(gradient is None for gradient in gradients):
            name = type(self.module).__name__
            raise UsageError(f"{_place(of)}: wanted a loss that depends on a weight of {name}")
        # into the flat gradient, with zeros for parameters that the loss does not depend on
        filled = [
            torch.zeros_like(view) if gradient is None else gradient
            for view, gradient in zip(self._views, gradients)
        ]
        if transforms_are_active():  # where _foreach_copy_ would be a copy for each
            gaps = [self._zeros[: -each.numel() % ALIGNMENT] for each in filled]
            rows = [row for each, gap in zip(filled, gaps) for row in (each.flatten(), gap)]
            flat = torch.cat([row for row in rows if row.numel()])
            self.gradient[: len(flat)].copy_(flat)
        else:
            torch._foreach_copy_(self._views, filled)

    def _taken_gradients(self, of: Callable[..., Any] | None) -> tuple[Tensor, ...]:
        """Those of the loss that `evaluate` has computed, once."""
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            raise UsageError(f"{_place(of)}: wanted a loss that optimizer.evaluate computed")
        return gradients

    def step_along_gradient(self, move_target: bool = True, losses: Tensor | None = None) -> Tensor:
        """Take one step along the gradients in the parameters' `.grad`; returns their norm before
        clipping, 0-d.

        `.grad` of every parameter is a view of one flat tensor: write into it, never assign it. If
        the gradient or losses [up to MAX_LOSSES] are not finite, the step is skipped and the norm
        is not finite.
        """
        self.reduce(self.gradient, losses)
        state = self.state
        if self.target is not None and move_target:
            state = state._replace(target=self.target)
            # running statistics are averages already
            for copy, buffer in self.target_buffers:
                copy.copy_(buffer)
        return adam_step(state, self.gradient, self.learning_rate, self.options, losses)

    @torch.no_grad()
    def move_target(self, norm: Tensor) -> None:
        """Polyak averaging after a step with move_target=False, for weights that were changed in
        between. norm: what the step returned; if it is not finite, nothing changes.
        """
        assert self.target is not None
        moved = torch.lerp(self.target, self.flat, self.options.tau)
        # by selection: 0 times NaN is NaN
        torch.where(norm.isfinite(), moved, self.target, out=self.target)

    @staticmethod
    def reduce(gradient: Tensor, losses: Tensor | None) -> None:
        """Hook: change the flat `gradient` [P] and the losses [L] in place, to average them over
        ranks: see `Algorithm.join`.
        """

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A `with` block in which autograd skips the gradients of the parameters."""
        if transforms_are_active():  # there only those of `evaluate` have one
            yield
            return
        for parameter in self.parameters:
            parameter.requires_grad = False
        try:
            yield
        finally:
            for parameter in self.parameters:
                parameter.requires_grad = True

    def forget_moments(self) -> None:
        """Begin anew with Adam's moments and its count of steps."""
        for tensor in (self.state.exp_avg, self.state.exp_avg_sq, self.state.step):
            tensor.zero_()

    def parts_of(self, flat: Tensor) -> dict[str, Tensor]:
        """name of each parameter -> its slice of `flat` [P]."""
        assert self.flat.shape == flat.shape, (self.flat.shape, flat.shape)
        parts = {}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                start = parameter.storage_offset() - self.flat.storage_offset()
                parts[name] = flat[start : start + parameter.numel()]
        return parts

    def state_dict(self) -> dict[str, Tensor]:
        """Moments, step and learning rate."""
        _, exp_avg, exp_avg_sq, step, *_ = self.state
        return {
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
            "step": step,
            "learning_rate": self.learning_rate,
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict()`."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


class FrozenWeights:
    """Steps of a FlatAdam that move some of its weights only; the others get a gradient of 0, keep
    their values to the bit, whatever the weight decay, and have moments of 0.
    """

    def __init__(self, optimizer: FlatAdam, moving: Iterable[Tensor]) -> None:
        """moving: views of the weights that steps move; other tensors among them are ignored."""
        self.optimizer = optimizer
        self.moves = torch.zeros_like(optimizer.flat, dtype=torch.bool)  # [P]
        memory = optimizer.flat.untyped_storage().data_ptr()
        for tensor in moving:
            if tensor.untyped_storage().data_ptr() == memory:
                start = tensor.storage_offset() - optimizer.flat.storage_offset()
                self.moves[start : start + tensor.numel()] = True

    def step(self, loss: Tensor, losses: Tensor, of: Callable[..., Any]) -> Tensor:
        """As `FlatAdam.step`."""
        optimizer = self.optimizer
        before = optimizer.flat.clone()
        optimizer.differentiate(loss, of)
        optimizer.gradient.mul_(self.moves)
        norm = optimizer.step_along_gradient(losses=losses)
        torch.where(self.moves, optimizer.flat, before, out=optimizer.flat)
        return norm


def _place(of: Callable[..., Any] | None) -> str:
    """The loss function with its file and line."""
    if of is None:
        return "the loss"
    function = inspect.unwrap(of)
    line = function.__code__.co_firstlineno
    return f"{function.__qualname__} ({inspect.getsourcefile(function)}:{line})"


def check_loss(loss: Tensor, of: Callable[..., Any] | None) -> None:
    """UsageError, with the place of the function `of`, unless `loss` is 0-d and differentiable."""
    if isinstance(loss, Tensor) and not loss.dim() and loss.requires_grad:
        return
    expected = f"{_place(of)}: wanted a loss that is a 0-d tensor with a gradient"
    if not isinstance(loss, Tensor):
        raise UsageError(f"{expected}, got a {type(loss).__name__}")
    if loss.dim():
        raise UsageError(f"{expected}, got one of shape {tuple(loss.shape)}: take its mean")
    raise UsageError(
        f"{expected}, got one that does not require grad: nothing in it depends on a weight"
    )


def call_loss(loss_function: Callable[..., Any], batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics) of a batch; UsageError, with the function's place, if it returns others."""
    result = loss_function(batch)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        got = f"a {type(result).__name__}"
        if isinstance(result, tuple):
            got = f"({', '.join(type(each).__name__ for each in result)})"
        raise UsageError(f"{_place(loss_function)}: wanted (loss, a dict of metrics), got {got}")
    check_loss(result[0], loss_function)
    return result


def stack_metrics(metrics: dict[str, Tensor], of: Callable[..., Any]) -> Tensor:
    """[M] float32 of 0-d metrics; UsageError, with the place of the function `of`, for others."""
    for name, metric in metrics.items():
        if not isinstance(metric, Tensor) or metric.dim():
            got = tuple(metric.shape) if isinstance(metric, Tensor) else type(metric).__name__
            raise UsageError(f"{_place(of)}: wanted a 0-d tensor as metric {name!r}, got {got}")
    return torch.stack(tuple(metrics.values())).float()
