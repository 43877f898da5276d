"""A run takes no more memory than the sum says, and what an error says would fit does."""

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from gpurl.algorithms import algorithm_names
from gpurl.api import run, train
from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.envs.pendulum import Pendulum
from gpurl.envs.registry import make_env, resolve_env
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError
from gpurl.memory import LiveBytes
from gpurl.run import memory_need, setup
from gpurl.run.memory_need import check_memory
from gpurl.run.settings import Settings, make_settings
from gpurl.run.setup import training_env
from tests.small_runs import small_settings

CPU = torch.device("cpu")
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells what is used")
MIB = 1 << 20
NAMES = [name for name in algorithm_names() if name != "bc"]  # which has a teacher or a dataset
TASKS = {"vdn": "two_step_game"} | dict.fromkeys(
    ("discrete_sac", "dqn", "pqn", "rainbow"), "cart_pole"
)


def refusal(settings: Settings, free: int, patch: pytest.MonkeyPatch) -> str:
    """What the check says where so many bytes are free, "" if the run fits."""
    patch.setattr(memory_need, "available_bytes", lambda device: free)
    try:
        check_memory(settings, CPU)
    except UsageError as error:
        return str(error)
    return ""


def number_after(words: str, text: str) -> int:
    return int(text.split(f"{words} must be below ")[1].split(", or ")[0].replace(",", ""))


def output_of(program: str, words: object) -> Any:
    """What a program prints in a process of its own."""
    command = [sys.executable, "-c", program, json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_what_an_earlier_run_left_is_given_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Left:
        """Refers to itself, as the objects of a run refer to each other."""

        def __init__(self) -> None:
            self.itself = self

    settings = make_settings("sac", "pendulum", device="cpu")
    gc.collect()
    gc.disable()
    try:
        left = weakref.ref(Left())
        free = lambda device: 8 * MIB if left() else 1 << 40  # noqa: E731
        monkeypatch.setattr(memory_need, "available_bytes", free)
        check_memory(settings, CPU)
    finally:
        gc.enable()
    assert left() is None


@pytest.mark.parametrize(
    ("name", "is_quick"), [("frame_stack:catch", True), ("CartPole-v1", False)]
)
def test_what_is_quick_to_make_is_counted_before(
    name: str, is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    monkeypatch.setattr(setup, "check_memory", lambda *given: counted.append(given[2:]))
    env = training_env(make_settings("ppo", name, num_envs=2, device="cpu"), CPU)
    env.close()
    assert counted == [() if is_quick else (env,)]


def test_live_bytes_are_those_of_tensors_that_exist() -> None:
    before = torch.zeros(1000)
    with LiveBytes() as memory:
        first = torch.empty(100, device="meta")
        view = first[:50].view(5, 10)
        assert (memory.live, memory.peak) == (400, 400)
        second = torch.zeros(10, dtype=torch.float64)
        second += 1.0
        assert (memory.live, memory.peak) == (480, 480)
        del first
        assert memory.live == 480  # the view holds it
        del view
        assert (memory.live, memory.peak) == (80, 480)
        before.mul_(2.0)
    assert memory.live == 80 + 4000  # what is written counts, whoever made it
    weight = torch.ones(1000, requires_grad=True)
    with LiveBytes() as memory:
        loss = (weight.exp() * 2.0).exp().sum()
        held = memory.live
        loss.backward()
    assert held >= 2 * 4000  # both results of exp are kept for the gradient
    assert memory.peak > held


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_is_rehearsed_without_memory(name: str) -> None:
    """A failure would be taken for an algorithm of somebody's own that needs real numbers."""
    task = TASKS.get(name, "pendulum")
    settings = make_settings(name, task, num_envs=16, horizon=4, **small_settings(name))
    env = make_env(task, 1)
    few, more = (
        memory_need._peak_of_agent(settings, env, count, 10**6, CPU) for count in (16, 160_000)
    )
    replay_size = getattr(settings.algorithm_config, "replay_size", 0)
    obs_bytes = 4 * torch.Size(env.single_observation_space.shape or ()).numel()
    assert few > (10**6 * obs_bytes if replay_size else 1000)
    rollout = 4 * 160_000 * obs_bytes
    assert rollout < more - few < 200 * rollout


def test_what_is_named_fits_and_more_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def sac(replay_size: int = 4 * 10**6) -> Settings:
        return make_settings("sac", "pendulum", num_envs=64, replay_size=replay_size)

    free = 166 * MIB
    text = refusal(sac(), free, monkeypatch)
    assert text.startswith("64 environments of pendulum and sac take 0.3 GiB on cpu, where 0.2 GiB")
    most = number_after("replay_size", text)
    assert "num_envs must" not in text  # not even one environment fits beside this replay buffer
    assert not refusal(sac(most), free, monkeypatch)

    def ppo(num_envs: int, hidden: int = 64) -> Settings:
        network = {"hidden": [hidden, hidden]}
        return make_settings("ppo", "pendulum", num_envs=num_envs, network=network)

    most = number_after("num_envs", refusal(ppo(10**7), free, monkeypatch))
    assert not refusal(ppo(most), free, monkeypatch)
    assert refusal(ppo(most + most // 100 * 4), free, monkeypatch)
    # two networks, each with a layer of 12,000 x 12,000: weights, gradient, the first gradient of a
    # step that was skipped, two moments, and what a checkpoint copies
    text = refusal(ppo(64, 12_000), 7 << 30, monkeypatch)
    assert text.endswith("take smaller networks or batches")
    assert 5 * 2 * 4 * 12_000**2 / 2**30 < float(text.split("take ")[1].split()[0]) < 12.0


def test_members_that_are_put_side_by_side_exist_twice_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, one tensor of all after the other: the observations in their replay buffers."""
    fitting = {}
    monkeypatch.setattr(memory_need, "available_bytes", lambda device: 512 * MIB)
    for stack in ("off", "auto"):
        given = {"population": 4, "replay_size": 10_000_000, "stack": stack, "num_envs": 8}
        with pytest.raises(UsageError) as refused:
            check_memory(make_settings("sac", "pendulum", **given), torch.device("cuda"))
        fitting[stack] = number_after("replay_size", str(refused.value))
    # a transition has three numbers of each observation, action, reward, and what its flags take
    assert 1.2 < fitting["off"] / fitting["auto"] < 1.6


def test_an_algorithm_that_cannot_be_rehearsed_is_held_to_its_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> int:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(memory_need, "_peak_of_agent", fails)
    settings = make_settings("ppo", "pendulum", num_envs=10**6)
    assert "num_envs must be below" in refusal(settings, 400 * MIB, monkeypatch)
    assert not refusal(settings, 2 << 30, monkeypatch)


CONVOLVE = """
import json, re, sys
import torch
from gpurl.memory import LiveBytes

def kib(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

rows, channels, side = json.loads(sys.argv[1])
torch.set_num_threads(1)
layer = torch.nn.Conv2d(channels, 32, 4, stride=2)
with LiveBytes():  # what loads at the first use
    layer(torch.zeros(1, channels, side, side)).sum().backward()
before = kib("VmRSS")
with LiveBytes() as memory:
    x = torch.ones(rows, channels, side, side, requires_grad=channels == 32)
    y = layer(x)
    inputs = [*layer.parameters(), *([x] if x.requires_grad else [])]
    torch.autograd.grad(y, inputs, torch.ones_like(y))
print(json.dumps([memory.peak, (kib("VmHWM") - before) * 1024]))
"""


@LINUX
@pytest.mark.parametrize("shape", [(1000, 4, 84), (1000, 3, 64), (3000, 32, 20)])
def test_convolutions_take_the_memory_of_another_layout(shape: tuple[int, int, int]) -> None:
    counted, took = output_of(CONVOLVE, shape)
    assert 0.95 * took < counted < 1.7 * took


TRAIN = """
import json, re, sys
import gpurl, gpurl.errors
from gpurl.run import memory_need, setup

def kib(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

env, settings = json.loads(sys.argv[1])
free = settings.pop("free")
before = kib("VmRSS")
memory_need.available_bytes = lambda device: free - (kib("VmRSS") - before) * 1024
try:
    gpurl.train("ppo", env, num_envs=400_000, **settings)
except gpurl.errors.UsageError as error:
    named = int(re.search(r"num_envs must be below ([\\d,]+)", str(error))[1].replace(",", ""))
fewer = int(0.9 * named) // 4 * 4
before = kib("VmRSS")
run = gpurl.train("ppo", env, num_envs=fewer, total_steps=1, **settings)
print(json.dumps([named, run.outcome.steps, (kib("VmHWM") - before) * 1024]))
"""


@LINUX
@pytest.mark.parametrize("kind", ["C", "autograd", "images"])
def test_a_run_of_nine_tenths_of_the_number_named_fits(kind: str, tmp_path: Path) -> None:
    free = 180 * MIB
    settings: dict[str, Any] = {"free": free, "epochs": 2, "horizon": 8, "threads": 1}
    settings |= {"run_dir": str(tmp_path / "run"), "device": "cpu", "quiet": True}
    settings |= {"squash": kind == "autograd"}  # which C does not know
    env = "tests.picture_envs:Pixels" if kind == "images" else "pendulum"
    named, steps, took = output_of(TRAIN, (env, settings))
    assert steps == 8 * (int(0.9 * named) // 4 * 4)
    assert free / 4 < took < free, f"{took / MIB:.0f} MiB for {0.9 * named:.0f} environments"


@pytest.mark.parametrize("env", ["pendulum", "gymnasium_cpu:Pendulum-v1", Pendulum(4)])
def test_a_run_is_checked_once(env: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the rehearsal, whose libraries stay, less is free than what the first check named."""
    checks: list[torch.device] = []

    def free(device: torch.device) -> int:
        checks.append(device)
        return 1 << 40

    monkeypatch.setattr(memory_need, "available_bytes", free)
    words: dict[str, Any] = {"num_envs": 4, "horizon": 4, "total_steps": 16, "eval_episodes": 0}
    train("ppo", env, **words, minibatches=1, threads=1, run_dir=str(tmp_path / "run"))
    assert checks == [CPU]


def test_environments_that_exist_are_counted_by_what_they_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_need, "available_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(memory_need, "_peak_of_envs", None)  # not made again
    settings = make_settings("ppo", "pendulum", num_envs=64, network={"hidden": [8000, 8000]})
    with pytest.raises(UsageError, match="64 environments of pendulum and ppo take"):
        run(settings, env=make_env("pendulum", 64))


def test_mujoco_worlds_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of them took more memory than there was, and the kernel killed the process."""
    pytest.importorskip("mujoco")
    monkeypatch.setattr(memory_need, "available_bytes", lambda device: 1 << 30)
    settings = make_settings("ppo", "half_cheetah", num_envs=4_000_000)
    with pytest.raises(UsageError, match=r"4,000,000 environments of half_cheetah and ppo take"):
        training_env(settings, CPU)
    # mujoco-warp would compile its kernels for it
    kind = resolve_env("half_cheetah")[0]
    assert kind.is_quick_to_make({})
    assert not kind.is_quick_to_make({"simulator": "warp"})
    assert not kind.is_quick_to_make({"njmax": 64})


def test_what_does_not_fit_leaves_no_environment_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[VecEnv] = []
    close = GymnasiumCpu.close
    monkeypatch.setattr(GymnasiumCpu, "close", lambda env: (closed.append(env), close(env)))
    monkeypatch.setattr(memory_need, "available_bytes", lambda device: 1 << 20)
    settings = make_settings("ppo", "gymnasium_cpu:Pendulum-v1", num_envs=4)
    with pytest.raises(UsageError, match="4 environments of gymnasium_cpu:Pendulum-v1 and ppo"):
        training_env(settings, CPU)
    assert len(closed) == 1
