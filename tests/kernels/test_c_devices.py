"""Every function of the C library refuses tensors that are not in CPU memory, whose addresses mean
nothing to it: the process would crash.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gpurl.envs.registry import make_env
from gpurl.kernels import c_library
from gpurl.kernels.actor_critic_cpu import ActInputs, ActorCriticCpu, GaussianPolicy, PpoSteps
from gpurl.kernels.adam import AdamOptions, AdamState, SkippedSteps, adam_step_c
from gpurl.kernels.gae import gae_c
from gpurl.kernels.linear_scan import linear_scan_backward_c, linear_scan_c
from gpurl.kernels.prioritized import prioritized_draw_c
from gpurl.kernels.random import CounterRandom, RandomStreams, random_uniform_c, stream_constants
from gpurl.kernels.replay import (
    Block,
    Ring,
    RingTensors,
    batch_memory,
    new_ring,
    replay_add_c,
    replay_sample_c,
)
from gpurl.kernels.squash import Squashed, squashed_backward_c, squashed_sample_c
from gpurl.kernels.stack_batch_cpu import StackBatch
from gpurl.kernels.stack_cpu import StackCpu
from gpurl.kernels.td_gradient import q_target, td_gradient
from gpurl.kernels.vtrace import vtrace_c

pytestmark = pytest.mark.skipif(c_library.load().functions is None, reason=c_library.load().why)
ROWS, INPUTS, OUTPUTS = 4, 3, 2
OPTIONS = AdamOptions(max_grad_norm=None)
STREAM = RandomStreams(*stream_constants(0, 1), torch.zeros(1, dtype=torch.int64))
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def parameters(*values: Tensor) -> list[nn.Parameter]:
    """Parameters with gradients, as an optimiser has them."""
    made = [nn.Parameter(value) for value in values]
    for parameter in made:
        parameter.grad = torch.zeros_like(parameter)
    return made


def weight(outputs: int = OUTPUTS, inputs: int = INPUTS) -> tuple[Tensor, Tensor]:
    return torch.ones(1, outputs, inputs), torch.ones(1, 1, outputs)


def stack(*layer: Tensor) -> StackCpu:
    one, bias = parameters(*layer)
    return StackCpu([(one, bias, "tanh")])


def stack_batch(x: Tensor, *layer: Tensor) -> None:
    one, bias = parameters(*layer)
    StackBatch([(one, bias, "tanh")], x).differentiate(by_weights=True)


def network(*layers: Tensor) -> ActorCriticCpu:
    hidden_weight, hidden_bias, actor_weight, actor_bias, critic_weight, critic_bias = parameters(
        *layers
    )
    hidden = [(hidden_weight, hidden_bias)]
    return ActorCriticCpu(hidden, (actor_weight, actor_bias), (critic_weight, critic_bias), "tanh")


LAYERS = (*weight(INPUTS), *weight(), *weight(1))


def act(x: Tensor, log_std: Tensor, units: Tensor) -> None:
    gaussian = GaussianPolicy(*parameters(log_std), -5.0, 2.0, units)
    actor_critic = network(*LAYERS)
    actor_critic.act(x, ActInputs(actor_critic, CounterRandom(0, ROWS), gaussian))


def values(x: Tensor) -> None:
    actor_critic = network(*LAYERS)
    actor_critic.value(x, ActInputs(actor_critic, CounterRandom(0, ROWS), None))


def ppo_steps(packed: Tensor, order: Tensor, gradient: Tensor, state: AdamState) -> None:
    actor_critic = network(*LAYERS)
    adam = state, gradient, torch.tensor(0.1), OPTIONS
    steps = PpoSteps(actor_critic, None, 1.0, None, False, adam)
    actor_critic.ppo_steps(steps, packed, False, order, 2, 0.2, 0.0)


def adam_state() -> AdamState:
    skipped = SkippedSteps(torch.zeros(5, dtype=torch.int64), torch.zeros(9), torch.zeros(9))
    return AdamState(*torch.ones(3, 9), torch.tensor(0), torch.ones(9), skipped)


def ring() -> RingTensors:
    return RingTensors(*new_ring(4, 2, 3, 1, 4, torch.float32, torch.device("cpu")))


def block() -> Block:
    obs = torch.ones(2, 2, 3)
    flag = torch.zeros(2, 2, dtype=torch.bool)
    return Block(obs, obs.clone(), flag, flag.clone(), flag.clone(), [torch.ones(2, 2)])


def run_worlds(mask: Tensor) -> None:
    pytest.importorskip("mujoco")
    env: Any = make_env("inverted_pendulum", ROWS, simulator="mujoco")
    env.reset()
    env._worlds.forward(mask)


def cases() -> dict[str, Case]:
    """For each function of the library: a call, and all tensors that it is given."""
    reward = torch.ones(3, ROWS)
    flag = torch.zeros(3, ROWS, dtype=torch.bool)
    x = torch.ones(ROWS, INPUTS)
    y = torch.ones(1, ROWS, OUTPUTS)
    row = torch.ones(ROWS)
    action = torch.ones(2, ROWS, OUTPUTS)
    sampled = batch_memory(Ring(*ring()), ROWS, None)
    return {
        "act": (act, (x, torch.zeros(OUTPUTS), torch.ones(4, OUTPUTS))),
        "adam": (
            lambda *tensors: adam_step_c(*tensors[:3], OPTIONS, tensors[3]),
            (adam_state(), torch.ones(9), torch.tensor(0.1), torch.ones(1)),
        ),
        "gae": (
            lambda *tensors: gae_c(*tensors[:5], 0.9, 0.9, tensors[5]),
            (reward, torch.ones(4, ROWS), reward.clone(), flag, flag.clone(), flag.clone()),
        ),
        "linear_scan": (linear_scan_c, (reward, reward.clone(), row)),
        "linear_scan_backward": (
            linear_scan_backward_c,
            (reward, row, reward.clone(), reward.clone()),
        ),
        "plan_make": (network, LAYERS),
        "ppo_steps": (
            ppo_steps,
            (torch.ones(ROWS, INPUTS + 5), torch.arange(ROWS), torch.ones(9), adam_state()),
        ),
        "prioritized_draw": (
            lambda priority, stream: prioritized_draw_c(priority, stream, 0, 2),
            (torch.ones(5), STREAM),
        ),
        "q_target": (q_target, (y, y.clone(), row, row.clone())),
        "random_numbers": (lambda *stream: random_uniform_c(*stream, 0, 2), STREAM),
        "replay_add": (
            lambda tensors, given: replay_add_c(Ring(*tensors), given),
            (ring(), block()),
        ),
        "replay_sample": (
            lambda tensors, out, stream: replay_sample_c(
                Ring(*tensors), out, 0.9, 1, stream, 0, True
            ),
            (ring(), sampled, STREAM),
        ),
        "run_worlds": (run_worlds, (torch.ones(ROWS, dtype=torch.bool),)),
        "squashed_backward": (
            lambda action, step, is_free, *gradients: squashed_backward_c(
                Squashed(action, row, step, is_free), *gradients
            ),
            (*action, torch.zeros(ROWS, OUTPUTS, dtype=torch.bool), action[0].clone(), row),
        ),
        "squashed_sample": (
            squashed_sample_c,
            (torch.ones(ROWS, 2 * OUTPUTS), torch.ones(ROWS, OUTPUTS)),
        ),
        "stack_backward": (
            lambda gradient, x, y, hidden, *layer: stack(*layer).backward(
                gradient, x, y, hidden, True, True
            ),
            (y, x, y.clone(), torch.zeros(1), *weight()),
        ),
        "stack_backward of a batch": (stack_batch, (x, *weight())),
        "stack_forward": (lambda x, *layer: stack(*layer).forward(x, True), (x, *weight())),
        "td_gradient": (
            lambda *tensors: td_gradient(*tensors[:4], False, tensors[4]),
            (y, torch.zeros(ROWS), row, row.clone(), y.clone()),
        ),
        "values": (values, (x,)),
        "vtrace": (
            lambda *tensors: vtrace_c(*tensors[:6], 0.9, 0.9, tensors[6]),
            (reward, torch.ones(4, ROWS), reward.clone(), flag, flag.clone(), reward, flag),
        ),
    }


@pytest.mark.parametrize("name", cases())
def test_a_function_refuses_a_tensor_of_another_device(name: str) -> None:
    call, tensors = cases()[name]
    call(*tensors)
    leaves, tree = tree_flatten(tensors)
    for number, leaf in enumerate(leaves):
        if leaf is None:
            continue
        moved = [*leaves]
        moved[number] = leaf.to("meta")
        with pytest.raises(ValueError, match=r"CPU memory, got .* on meta"):
            call(*tree_unflatten(moved, tree))


def test_every_function_is_tried() -> None:
    sources = "".join(path.read_text() for path in c_library._sources())
    exported = set(re.findall(r'^(?:EXPORT|.*default"\)\)\)).*?(\w+)\(', sources, re.MULTILINE))
    assert len(exported) > 15
    without_tensors = {"plan_free", "catch_mujoco_errors"}
    assert {name.split()[0] for name in cases()} == exported - without_tensors


def test_one_place_makes_addresses() -> None:
    """The one that looks at the device."""
    kernels = c_library.FOLDER.parent.glob("*.py")
    assert [path.name for path in kernels if "data_ptr" in path.read_text()] == ["c_library.py"]
