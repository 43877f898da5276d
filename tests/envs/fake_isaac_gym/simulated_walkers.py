"""The dynamics under the fake tasks: walkers on a line whose observations tell all there is, so
that any transition can be worked out.
"""

import ctypes
import os
import signal
import sys
from typing import Any

import torch

# position, steps since its start, number of the environment, of the episode, where that began, what
# the task drew when it was made
NUM_OBS = 6
REACH = 3.0  # from its start a walker falls


class Walkers:
    """N of them. All numbers are multiples of 1/64 and small, so float32 holds them exactly."""

    def __init__(self, num_envs: int, device: str, fault: str, fault_step: int) -> None:
        self.number = torch.arange(num_envs, device=device, dtype=torch.float32)
        self.position, self.age, self.start = (
            torch.zeros(num_envs, device=device) for _ in range(3)
        )
        self.episode = torch.zeros(num_envs, device=device)
        self.world = torch.randint(0, 100, ()).to(self.number)
        self.fault, self.fault_step, self.steps = fault, fault_step, 0

    def restart(self, rows: Any) -> None:
        self.episode[rows] += 1
        self.start[rows] = (
            self.number[rows]
            + torch.randint(0, 64, (len(rows),), device=self.start.device).float() / 64
        )
        self.position[rows] = self.start[rows]
        self.age[rows] = 0

    def advance(self, actions: Any) -> None:
        self.steps += 1
        if self.steps >= self.fault_step and self.fault:
            _break(self.fault)
        self.position += actions[:, 0]
        self.age += 1

    def obs(self) -> Any:
        return torch.stack(
            (
                self.position,
                self.age,
                self.number,
                self.episode,
                self.start,
                self.world.expand_as(self.start),
            ),
            dim=1,
        )

    def reward(self) -> Any:
        return 2.0 * (self.position - self.start) + self.age / 8

    def has_fallen(self) -> Any:
        return (self.position - self.start).abs() > REACH


def _break(how: str) -> None:
    if how == "raise":
        raise RuntimeError("the walkers stumbled")
    if how == "hang":
        print("about to hang")
        ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock, as a simulator may
    if how == "kill":
        sys.stderr.write("about to be killed\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "print":
        print("noise " * 50000)
