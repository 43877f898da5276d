"""How far a training or a video is and how long it still takes, by its steps or its time limit."""

import time
from collections import deque

# speed is that of the last minute, pauses for evaluations included
SECONDS_OF_SPEED = 60.0


class Progress:
    """Progress to `total_steps` (None: without an end) or to `max_seconds` from now, whichever
    comes first.
    """

    def __init__(self, total_steps: int | None, max_seconds: float | None = None) -> None:
        self.total_steps = total_steps
        self.max_seconds = max_seconds
        self.step = 0
        self._begin = time.monotonic()
        self._updates: deque[tuple[float, int]] = deque()  # time and step

    def update(self, step: int) -> None:
        """The training is at `step` now."""
        now = time.monotonic()
        self.step = step
        self._updates.append((now, step))
        while len(self._updates) > 2 and now - self._updates[1][0] >= SECONDS_OF_SPEED:
            self._updates.popleft()

    def share(self) -> float | None:
        """Of the way that lies behind, 0 to 1; None without an end."""
        shares = []
        if self.total_steps:
            shares.append(self.step / self.total_steps)
        if self.max_seconds:
            shares.append((time.monotonic() - self._begin) / self.max_seconds)
        return min(max(shares), 1.0) if shares else None

    def seconds_left(self, steps_per_second: float) -> float | None:
        """None if it is not known; steps_per_second: until two updates tell the speed."""
        now = time.monotonic()
        first, first_step = self._updates[0] if self._updates else (now, 0)
        if now > first and self.step > first_step:
            steps_per_second = (self.step - first_step) / (now - first)
        limits = []
        if self.total_steps and 0 < steps_per_second < float("inf"):
            limits.append((self.total_steps - self.step) / steps_per_second)
        if self.max_seconds:
            limits.append(self.max_seconds - (now - self._begin))
        return max(min(limits), 0.0) if limits else None


def clock(seconds: float) -> str:
    """ "1:02:03"."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
