"""A world whose every step is known, for tests of the replay ring: it remembers what was played,
and walks on from any step in float64.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gpurl.kernels import c_library, replay
from gpurl.kernels.env_step import RandomStreams
from gpurl.kernels.random import stream_constants
from gpurl.kernels.replay import INVALID, TERMINATED, TRUNCATED, Batch, Block, Ring, new_ring

needs_c = pytest.mark.skipif(c_library.load().functions is None, reason="no C library")
FORMS = [
    pytest.param((replay.replay_add_reference, replay.replay_sample_reference), id="torch"),
    pytest.param((replay.replay_add, replay.replay_sample), id="C", marks=needs_c),
]
Form = tuple[Callable[..., None], Callable[..., Batch]]
ENVS, OBS, GAMMA = 3, 5, 0.9


def streams(step: int = 0) -> RandomStreams:
    return RandomStreams(*stream_constants(5, 1), torch.tensor(step))


def block_of(obs: Tensor, numbers: Tensor, flags: Tensor, final_obs: Tensor) -> Block:
    """flags: [h, N], the bits that the ring keeps."""
    terminated, truncated, invalid = (
        (flags & bit) != 0 for bit in (TERMINATED, TRUNCATED, INVALID)
    )
    return Block(obs, final_obs, terminated, truncated, ~invalid, [numbers])


class World:
    """Environments whose observations are all different numbers; remembers every step."""

    def __init__(
        self,
        seed: int = 0,
        kind: torch.dtype = torch.float32,
        ends: float = 0.2,
        width: int = 3,
        envs: int = ENVS,
        gamma: float = GAMMA,
    ) -> None:
        self.random, self.kind, self.ends, self.width = (
            np.random.default_rng(seed),
            kind,
            ends,
            width,
        )
        self.envs, self.gamma = envs, gamma
        self.obs = self._observe()
        self.steps: list[dict[str, np.ndarray]] = []

    def _observe(self) -> np.ndarray:
        if self.kind == torch.uint8:
            return self.random.integers(0, 256, (self.envs, OBS)).astype(np.uint8)
        return self.random.normal(size=(self.envs, OBS)).astype(np.float32)

    def block(self, steps: int, invalid: float = 0.0) -> Block:
        rows = []
        for _ in range(steps):
            flags = np.where(
                self.random.random(self.envs) < self.ends,
                self.random.choice([TERMINATED, TRUNCATED], self.envs),
                0,
            )
            flags |= np.where(self.random.random(self.envs) < invalid, INVALID, 0)
            after, fresh = self._observe(), self._observe()
            row = {
                "obs": self.obs,
                "numbers": self.random.normal(size=(self.envs, self.width)).astype(np.float32),
            }
            row |= {"flags": flags.astype(np.uint8), "final_obs": after}
            self.obs = np.where((flags & 3 != 0)[:, None], fresh, after)
            rows.append(row)
        self.steps += rows
        return block_of(
            *(torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0])
        )

    def mark_episode_break(self, mask: np.ndarray) -> None:
        """Every environment of mask [N] was reset from outside."""
        last = self.steps[-1]["flags"]
        last |= np.where(mask & (last & 3 == 0), TRUNCATED, 0).astype(np.uint8)
        self.obs = np.where(mask[:, None], self._observe(), self.obs)

    def transition(self, t: int, n: int, num_steps: int) -> tuple[float, float, np.ndarray, bool]:
        """(reward, discount, next_obs, may be learnt from), by walking on from step `t` of
        environment `n`.
        """
        total, discount, at = 0.0, 1.0, t
        while True:
            step = self.steps[at]
            total += discount * float(step["numbers"][n, 0])
            discount *= self.gamma
            ended = step["flags"][n] & 3
            if (
                ended
                or at + 1 == len(self.steps)
                or at + 1 == t + num_steps
                or self.steps[at + 1]["flags"][n] & INVALID
            ):
                is_continued = not ended and at + 1 < len(self.steps)
                is_valid = not self.steps[t]["flags"][n] & INVALID and not (
                    is_continued and self.steps[at + 1]["flags"][n] & INVALID
                )
                return (
                    total,
                    0.0 if ended & TERMINATED else discount,
                    step["final_obs"][n],
                    is_valid,
                )
            at += 1


def filled(
    world: World,
    form: Form,
    num_rows: int,
    blocks: tuple[int, ...],
    num_final: int = 200,
    invalid: float = 0.0,
) -> Ring:
    kind = world.kind
    ring = new_ring(num_rows, world.envs, OBS, world.width, num_final, kind, torch.device("cpu"))
    for steps in blocks:
        form[0](ring, world.block(steps, invalid))
    return ring
