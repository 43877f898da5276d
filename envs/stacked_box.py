"""Observations of several frames, of which a replay buffer keeps the newest only."""

import numpy as np
from gymnasium.spaces import Box


class StackedBox(Box):
    """`frames` observations of `frame`, [frames, *frame], the newest last. An episode begins with
    its first frame in all places, and every step moves them by one.
    """

    def __init__(self, frame: Box, frames: int) -> None:
        low, high = (np.stack([limit] * frames) for limit in (frame.low, frame.high))
        super().__init__(low, high, dtype=frame.dtype.type)
        self.frames = frames
