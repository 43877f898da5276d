"""Every algorithm and kind of network acts from an ONNX file as `gpurl.load(RUN).act` does."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gpurl
from gpurl.algorithms import algorithm_names
from gpurl.export.parity import Observations, random_observations
from gpurl.export.run import export_run
from tests.export.runs import CASES, make_run

onnxruntime = pytest.importorskip("onnxruntime")
BATCHES = (1, 7, 64)
RECURRENT = ("ppo_gru", "ppo_lstm", "ppo_mingru")
# what training needs and acting does not
NOT_ACTING = ("critic", "target", "value", "log_std", "optimizer", "temperature")


def observations(policy: gpurl.Policy, count: int, seed: int) -> Observations:
    rng, algorithm = np.random.default_rng(seed), policy.algorithm
    return random_observations(algorithm.observation_space, algorithm.normalizer, count, rng)


def inputs_of(obs: Observations) -> dict[str, np.ndarray]:
    """The inputs of a file: of named observations each by its own name."""
    return dict(obs) if isinstance(obs, dict) else {"obs": obs}


def assert_same_actions(expected: np.ndarray, action: np.ndarray) -> None:
    assert action.dtype == expected.dtype
    assert action.shape == expected.shape
    if expected.dtype == np.float32:
        np.testing.assert_allclose(action, expected, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(action, expected)


def test_every_algorithm_has_a_case() -> None:
    assert {algorithm for algorithm, *_ in CASES.values()} >= set(algorithm_names())


@pytest.mark.parametrize("case", CASES)
def test_onnx_acts_as_the_policy(case: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, case)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an export is free of warnings
        exported = export_run(run, "onnx", tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(exported.file, providers=["CPUExecutionProvider"])
    policy = gpurl.load(run)
    if policy.module().memory_size:
        check_episodes(policy, session)
        return
    actions = []
    for seed, batch in enumerate(BATCHES):
        obs = observations(policy, batch, seed)
        expected = policy.act(obs)
        assert_same_actions(expected, session.run(["action"], inputs_of(obs))[0])
        actions.append(expected.reshape(batch, -1))
    # a constant would pass anything
    assert len(np.unique(np.concatenate(actions), axis=0)) > 1


def check_episodes(policy: gpurl.Policy, session: Any) -> None:
    """Two episodes of six steps; a row of the memory that is set to zeros begins anew."""
    actions = []
    for batch in BATCHES:
        for episode in range(2):
            policy.reset()
            memory = np.zeros((batch, policy.module().memory_size), np.float32)
            for step in range(6):
                obs = observations(policy, batch, 10 * episode + step)
                action, memory = session.run(
                    ["action", "memory_out"], inputs_of(obs) | {"memory": memory}
                )
                expected = policy.act(obs)
                assert_same_actions(expected, action)
                actions.append(expected.reshape(batch, -1))
        assert np.abs(memory).max() > 0.01
    assert len(np.unique(np.concatenate(actions), axis=0)) > 1
    # the last row's episode ends: zeros there are what reset() is to all
    memory[-1] = 0.0
    obs = observations(policy, batch, 99)
    action, _ = session.run(["action", "memory_out"], inputs_of(obs) | {"memory": memory})
    continued = policy.act(obs)
    policy.reset()
    assert_same_actions(policy.act(obs)[-1:], action[-1:])
    assert_same_actions(continued[:-1], action[:-1])


@pytest.mark.parametrize(
    "case", ["ppo", *RECURRENT, "ppo_own_trunk", "sac", "rainbow", "flash_sac"]
)
def test_the_module_is_torch_alone_and_holds_what_acts(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = gpurl.load(make_run(tmp_path, case)).module()
    assert isinstance(module, nn.Module)
    assert not any(each.training for each in module.modules())
    assert not any(each.requires_grad for each in module.parameters())
    for name in dict([*module.named_parameters(), *module.named_buffers()]):
        parts = name.removeprefix("network.").split(".")
        if case != "rainbow":  # whose stream of values acts
            assert not set(NOT_ACTING) & set(parts), name

    def no_c(*_: Any) -> None:
        raise AssertionError("C was called")

    # no call of C, no numpy, on either side of autograd
    monkeypatch.setattr("gpurl.kernels.stack_cpu.StackCpu._call", no_c)
    monkeypatch.setattr("gpurl.nn.normalizer.normalize", no_c)
    size = module.num_inputs
    arguments = [torch.randn(5, size)]
    if module.memory_size:
        arguments.append(torch.zeros(5, module.memory_size))
    outputs = module(*arguments)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    assert len(first) == 5


def test_the_module_has_weights_of_its_own(tmp_path: Path) -> None:
    policy = gpurl.load(make_run(tmp_path, "ppo"))
    module, obs = policy.module(), torch.randn(4, 3)
    before = policy.act(obs).clone()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1.0
    torch.testing.assert_close(policy.act(obs), before)


@pytest.mark.parametrize("export_format", ["pt2", "torchscript"])
@pytest.mark.parametrize("case", ["ppo_groups", "sac_groups"])
def test_groups_of_any_number_of_rows(case: str, export_format: str, tmp_path: Path) -> None:
    """What `export_run` compares: actions at one row and at seven."""
    difference = export_run(make_run(tmp_path, case), export_format).difference
    assert difference is not None
    assert difference <= 1e-5


@pytest.mark.parametrize("export_format", ["pt2", "torchscript"])
@pytest.mark.parametrize("case", ["ppo", *RECURRENT, "ppo_images", "dqn_quantiles", "vdn"])
def test_torch_files_act_as_the_policy(case: str, export_format: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, case)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exported = export_run(run, export_format)
    assert exported.difference is not None
    if export_format == "pt2":
        module = torch.export.load(exported.file).module()
    else:
        module = torch.jit.load(exported.file)
    policy = gpurl.load(run)
    for seed, batch in enumerate(BATCHES):
        obs = observations(policy, batch, seed)
        policy.reset()
        expected = policy.act(obs)
        if case in RECURRENT:
            memory = torch.zeros(batch, policy.module().memory_size)
            action = module(torch.from_numpy(obs), memory)[0]
        else:
            action = module(torch.from_numpy(obs))
        assert_same_actions(expected, action.numpy())
