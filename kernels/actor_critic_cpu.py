"""The MLP actor-critic on a CPU: acting, values and PPO's minibatch steps, by actor_critic_cpu.c.

Each operation of torch passes over all activations, and for a few rows its calls cost more than the
arithmetic. C computes the formulas of gpurl/nn/actor_critic.py, gpurl/losses.py,
gpurl/nn/distributions.py, gpurl/nn/normalizer.py, gpurl/nn/action_scaler.py and adam.py, which are
the references.
"""

import ctypes
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpurl.kernels import c_library
from gpurl.kernels.adam import AdamOptions, AdamState, c_arguments
from gpurl.kernels.random import CounterRandom

ACTIVATIONS = ("tanh", "elu", "relu")
METRICS = ("surrogate", "value_loss", "approx_kl", "clip_fraction", "entropy", "grad_norm")
MAX_LAYERS = 64  # of both towers together
# weight [E, out, in] and bias [E, 1, out]; C writes the gradients into their `.grad`
Layer = tuple[nn.Parameter, nn.Parameter]


class GaussianPolicy(NamedTuple):
    """Constants of a diagonal normal distribution: log_std [A], clamped to its limits; units [4, A]
    of `ActionScaler`: lowest, highest, half width and centre.
    """

    log_std: nn.Parameter
    min_log_std: float
    max_log_std: float
    units: Tensor


class Scale(NamedTuple):
    """A normalised x is (x - shift) * inv_std, clipped to +-`limit`; shift, inv_std: [D] of
    observations, [1] of values.
    """

    shift: Tensor
    inv_std: Tensor
    limit: float = math.inf


class Acted(NamedTuple):
    """Actions for N rows."""

    action: Tensor  # [N, A] float32, or [N] int64
    log_prob: Tensor  # [N]
    env_action: Tensor  # [N, A] within the limits, in the environment's units; or `action` itself
    value: Tensor  # [N] in units of returns


def _fields(**groups: str) -> list[tuple[str, Any]]:
    types = {"integers": ctypes.c_int64, "numbers": ctypes.c_double, "pointers": ctypes.c_void_p}
    return [(name, types[group]) for group, names in groups.items() for name in names.split()]


class _Layer(ctypes.Structure):
    _fields_ = _fields(
        integers="inputs outputs tower", pointers="weight bias weight_gradient bias_gradient"
    )


class _Loss(ctypes.Structure):
    _fields_ = _fields(
        integers="head actions has_valid normalizes_advantage clips_value",
        numbers="clip_range entropy_coef value_coef clip_range_value min_log_std max_log_std",
        pointers="log_std log_std_gradient",
    )


class _Policy(ctypes.Structure):
    _fields_ = _fields(
        integers="head",
        numbers="min_log_std max_log_std obs_limit",
        pointers="log_std units obs_shift obs_inv_std value_shift value_inv_std key gamma",
    )


class ActInputs:
    """The inputs of `act` and `value` of `network` besides its weights. C keeps the addresses of
    the tensors and reads their values at each call: they must never be moved.

    gaussian None: a categorical policy. obs, value None: observations, or values, are not
    normalised. ValueError unless the tensors are contiguous, on a CPU and of the network's sizes.
    """

    def __init__(
        self,
        network: "ActorCriticCpu",
        random: CounterRandom,
        gaussian: GaussianPolicy | None,
        obs: Scale | None = None,
        value: Scale | None = None,
    ) -> None:
        inputs = network.num_inputs
        outputs = network.num_outputs
        self.network = network
        self.random = random
        self.is_gaussian = gaussian is not None
        self._tensors = (gaussian, obs, value, random.key, random.gamma)  # keeps them alive
        # the struct that C reads; without a scale its pointers stay NULL
        policy = self._policy = _Policy(head=gaussian is None)
        policy.key = _address("key", random.key, (random.num_envs,), torch.int64)
        policy.gamma = _address("gamma", random.gamma, (random.num_envs,), torch.int64)
        if gaussian is not None:
            policy.log_std = _address("log_std", gaussian.log_std, (outputs,))
            policy.units = _address("units", gaussian.units, (4, outputs))
            policy.min_log_std = gaussian.min_log_std
            policy.max_log_std = gaussian.max_log_std
        if obs is not None:
            policy.obs_shift = _address("obs.shift", obs.shift, (inputs,))
            policy.obs_inv_std = _address("obs.inv_std", obs.inv_std, (inputs,))
            policy.obs_limit = obs.limit
        if value is not None:
            policy.value_shift = _address("value.shift", value.shift, (1,))
            policy.value_inv_std = _address("value.inv_std", value.inv_std, (1,))
        self.address = ctypes.addressof(policy)


class PpoSteps:
    """The loss and the optimiser of `ActorCriticCpu.ppo_steps`: tensors that must never be moved,
    and constants. gaussian None: a categorical policy.
    """

    def __init__(
        self,
        network: "ActorCriticCpu",
        gaussian: GaussianPolicy | None,
        value_coef: float,
        clip_range_value: float | None,
        normalizes_advantage: bool,
        optimizer: tuple[AdamState, Tensor, Tensor, AdamOptions],
    ) -> None:
        """optimizer: (state, gradient [P], learning rate 0-d, options) of `adam_step`."""
        self._tensors = (gaussian, optimizer)  # keeps them alive
        # the struct that C reads; `ppo_steps` fills in what changes between updates
        loss = self.loss = _Loss(head=gaussian is None, value_coef=value_coef)
        loss.actions = self.actions = 1 if gaussian is None else network.num_outputs
        loss.normalizes_advantage = normalizes_advantage
        if clip_range_value is not None:
            loss.clips_value = True
            loss.clip_range_value = clip_range_value
        if gaussian is not None:
            gradient = gaussian.log_std.grad
            assert gradient is not None
            loss.log_std = _address("log_std", gaussian.log_std, (network.num_outputs,))
            loss.log_std_gradient = _address("its gradient", gradient, (network.num_outputs,))
            loss.min_log_std = gaussian.min_log_std
            loss.max_log_std = gaussian.max_log_std
        # C takes Adam's steps itself, between minibatches
        self.adam = c_arguments(*optimizer)


class ActorCriticCpu:
    """Hidden layers of E stacked towers, weights [E, out, in] and biases [E, 1, out]; the actor
    [1, A, H] reads tower 0, the critic [1, 1, H] the last one.

    Parameters and gradients must be float32, contiguous, on the CPU and never moved, as in
    FlatAdam; C reads their values at each call. Results depend neither on the number of threads
    (torch.get_num_threads()), nor does a row's result depend on other rows.
    """

    def __init__(self, hidden: list[Layer], actor: Layer, critic: Layer, activation: str) -> None:
        functions = self._functions = _functions()
        self._tensors = [*hidden, actor, critic]  # keeps them alive
        # sizes, from the shapes of the weights
        towers = hidden[0][0].shape[0] if hidden else 1
        self.num_inputs = self._tensors[0][0].shape[2]
        self.num_outputs = actor[0].shape[1]
        # the layers as C reads them, tower after tower, then the two heads
        layers = [_layer(layer, tower, tower) for tower in range(towers) for layer in hidden]
        layers += [_layer(actor, 0, 0), _layer(critic, 0, towers - 1)]
        plan = functions.plan_make(
            (_Layer * len(layers))(*layers),
            towers,
            len(hidden),
            self.num_inputs,
            ACTIVATIONS.index(activation),
        )
        if not plan:
            raise MemoryError("no memory for the actor-critic's buffers")
        self._plan = ctypes.c_void_p(plan)
        weakref.finalize(self, functions.plan_free, self._plan)

    def act(self, x: Tensor, policy: ActInputs) -> Acted:
        """Sample an action for each row of x [N, D] float32, not normalised, row n by stream n of
        `policy.random`, which the caller advances.

        Computes Normalizer, ActorCritic.forward and ValueNormalizer, then `sample` and `to_env` of
        Gaussian or Categorical. ValueError unless x has one row per stream and is on the CPU.
        """
        x = x.contiguous()
        random = policy.random
        rows = self._check(x, policy)
        if rows != random.num_envs:
            raise ValueError(f"act needs a row for each of {random.num_envs} streams, got {rows}")
        # memory for the results, which C fills
        if policy.is_gaussian:
            action = torch.empty(rows, self.num_outputs, dtype=torch.float32)
            env_action = torch.empty(rows, self.num_outputs, dtype=torch.float32)
        else:
            action = env_action = torch.empty(rows, dtype=torch.int64)
        log_prob = torch.empty(rows, dtype=torch.float32)
        value = torch.empty(rows, dtype=torch.float32)
        acted = Acted(action, log_prob, env_action, value)
        self._call(
            self._functions.act, policy.address, c_library.address(x), rows,
            random.take_words(self.num_outputs), *c_library.addresses(acted),
        )  # fmt: skip
        return acted

    def value(self, x: Tensor, policy: ActInputs) -> Tensor:
        """[N] values as `act` returns them, for any number of rows x [N, D]; without sampling."""
        x = x.contiguous()
        rows = self._check(x, policy)
        value = torch.empty(rows, dtype=torch.float32)
        addresses = c_library.addresses((x, value))
        self._call(self._functions.values, policy.address, addresses[0], rows, addresses[1])
        return value

    def ppo_steps(
        self,
        steps: PpoSteps,
        packed: Tensor,
        has_valid: bool,
        order: Tensor,
        minibatches: int,
        clip_range: float,
        entropy_coef: float,
    ) -> dict[str, Tensor]:
        """One optimiser step on each of `minibatches` equal parts of order [S] int64, which
        numbers rows; returns METRICS, [minibatches] float64 each.

        packed: [.., W] float32; a row is obs [D], action [actions], log_prob, value, advantage,
        returns, then valid (1 or 0) if has_valid; C ignores further columns.
        """
        # C reads without checks, so the layout of the rows is checked here
        packed = packed.contiguous()
        order = order.contiguous()
        width = self.num_inputs + steps.actions + 4 + has_valid
        assert (packed.dtype, order.dtype) == (torch.float32, torch.int64)
        assert len(order) % minibatches == 0, (order.shape, minibatches)
        assert packed.shape[1] >= width, (packed.shape, width)
        steps.loss.has_valid = has_valid
        steps.loss.clip_range = clip_range
        steps.loss.entropy_coef = entropy_coef
        metrics = torch.empty(minibatches, len(METRICS), dtype=torch.float64)
        self._call(
            self._functions.ppo_steps, ctypes.byref(steps.loss), ctypes.byref(steps.adam),
            c_library.address(packed), packed.shape[1],
            c_library.address(order), len(order) // minibatches, minibatches,
            c_library.address(metrics),
        )  # fmt: skip
        return dict(zip(METRICS, metrics.unbind(1)))

    def _check(self, x: Tensor, policy: ActInputs) -> int:
        """Number of rows of x; ValueError unless it is what C may read."""
        # the sizes in `policy` were checked for its own network
        if policy.network is not self:
            raise ValueError("these ActInputs belong to another network")
        is_readable = x.is_cpu and x.dtype is torch.float32 and x.dim() == 2
        if not is_readable or x.shape[1] != self.num_inputs:
            raise ValueError(
                f"x must be [N, {self.num_inputs}] float32 in CPU memory, got {list(x.shape)} "
                f"{x.dtype} on {x.device}"
            )
        return x.shape[0]

    def _call(self, function: Callable[..., int], *arguments: Any) -> None:
        if function(self._plan, *arguments, torch.get_num_threads()):
            raise MemoryError("no memory for the actor-critic's buffers")


@functools.cache
def _functions() -> Any:
    """The library, with argument types declared."""
    functions = c_library.functions()
    number = ctypes.c_int64
    pointer = ctypes.c_void_p
    functions.plan_make.argtypes = [pointer, number, number, number, number]
    functions.plan_make.restype = pointer
    functions.plan_free.argtypes = [pointer]
    functions.plan_free.restype = None
    functions.act.argtypes = [*[pointer] * 3, number, number, *[pointer] * 4, number]
    functions.values.argtypes = [*[pointer] * 3, number, pointer, number]
    functions.ppo_steps.argtypes = [
        *[pointer] * 4, number, pointer, number, number, pointer, number
    ]  # fmt: skip
    return functions


def _address(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> int:
    """The address of `tensor`; ValueError unless it has the layout that C expects."""
    is_plain = tensor.is_cpu and tensor.is_contiguous() and tensor.dtype is dtype
    if not is_plain or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must be {list(shape)} {dtype}, contiguous and in CPU memory, got "
            f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )
    return c_library.address(tensor)


def _layer(layer: Layer, member: int, tower: int) -> _Layer:
    """Member number `member` of a stacked layer, whose input is the output of `tower`."""
    weight, bias = layer
    outputs, inputs = weight.shape[1:]
    addresses = []
    for tensor in (weight, bias, weight.grad, bias.grad):
        assert tensor is not None
        address = _address("weights and their .grad", tensor, tuple(tensor.shape))
        addresses.append(address + 4 * member * tensor[0].numel())  # 4 bytes a float
    return _Layer(inputs, outputs, tower, *addresses)
