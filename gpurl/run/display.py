"""What a training shows on the console: a live table in a terminal, one line every few seconds in a
file or a pipe.
"""

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

SECONDS_PER_LINE = 5.0
SECONDS_PER_FRAME = 0.25

# label on the left, tags of which the first present is shown
ROWS: dict[str, tuple[str, ...]] = {
    "episode return": ("rollout/ep_rew_mean",),
    "episode length": ("rollout/ep_len_mean",),
    "eval return": ("eval/mean_reward",),
    "value loss": ("train/value_loss", "train/critic_loss", "train/loss"),
    "actor loss": ("train/actor_loss",),
    "KL": ("train/approx_kl",),
    "learning rate": ("train/learning_rate",),
}


def engineering(value: float) -> str:
    """`value` with three digits and a unit prefix: 1234567 is "1.23M"."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:#.3g}".rstrip(".") + prefix
    return f"{value:.3g}"


class Display:
    """Shows the progress of one training; a closed pipe or a lost terminal silences it and stops
    nothing else.

    `live` None: a table where stdout is a terminal. `quiet`: nothing at all.
    """

    def __init__(
        self, title: str, total_steps: int | None, quiet: bool = False, live: bool | None = None
    ) -> None:
        self._title, self._total_steps = title, total_steps
        self._is_quiet = quiet
        self._muted = quiet or sys.stdout is None
        if live is None:
            live = (
                not self._muted
                and sys.stdout.isatty()
                and os.environ.get("TERM") not in (None, "dumb", "unknown")
            )
        self._is_live = live and not self._muted
        self._live: Any = None  # rich.live.Live
        self._step, self._values = 0, dict[str, float]()
        self._next_show, self._has_news = 0.0, False

    def __enter__(self) -> "Display":
        if self._is_live:
            self._safely(self._start_live)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._has_news:
                self._safely(self._show)
        finally:
            if self._live is not None:
                self._safely(
                    self._live.stop, even_muted=True
                )  # gives cursor, stdout and stderr back

    def update(self, step: int, values: dict[str, float]) -> None:
        """Take the newest values by native tag (those not given keep their last value) and show
        them if it is time to.
        """
        self._step, self._has_news = step, True
        self._values.update(values)
        if time.monotonic() >= self._next_show:
            self._next_show = time.monotonic() + (
                SECONDS_PER_FRAME if self._is_live else SECONDS_PER_LINE
            )
            self._safely(self._show)

    def note(self, text: str) -> None:
        """A line that stays, above the table."""
        if self._live is not None:
            self._safely(
                lambda: self._live.console.print(
                    text, markup=False, highlight=False, soft_wrap=True
                )
            )
        else:
            self._safely(lambda: print(text, flush=True))

    def warn(self, text: str) -> None:
        """A line `warning: text`; on standard error if the display is quiet."""
        if self._is_quiet:
            print(f"warning: {text}", file=sys.stderr, flush=True)
        else:
            self.note(f"warning: {text}")

    # ---- output that cannot fail
    # ----------------------------------------------------------------------------------

    def _safely(self, show: Callable[[], Any], even_muted: bool = False) -> None:
        """Call `show`; when stdout is gone, mute for good and turn stdout to nowhere, else Python's
        exit reports it again.
        """
        if self._muted and not even_muted:
            return
        try:
            show()
        except (
            OSError,
            ValueError,
        ):  # a closed pipe, a lost terminal, a closed stream, a letter the stream cannot encode
            self._mute()

    def _mute(self) -> None:
        self._muted = True
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, (sys.__stdout__ or sys.stdout).fileno())
            os.close(nowhere)
        except (OSError, ValueError):  # a stream without a file descriptor
            pass

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(force_terminal=True)
        console.on_broken_pipe = self._mute  # type: ignore[method-assign]  # rich's own ends the program
        self._live = Live(
            self._table(), console=console, auto_refresh=False
        )  # no thread: it would compete with the trainer
        self._live.start(refresh=False)

    # ---- what is shown
    # --------------------------------------------------------------------------------------------

    def _show(self) -> None:
        self._has_news = False
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            print(self._line(), flush=True)

    def _steps(self) -> str:
        """How far it is: "524k/1.00M steps, 52.4 %, ETA 0:00:07"."""
        if not self._total_steps:
            return f"{engineering(self._step)} steps"
        percent = 100 * self._step / self._total_steps
        return (
            f"{engineering(self._step)}/{engineering(self._total_steps)} steps, {percent:.1f} %, "
            f"ETA {self._time_left()}"
        )

    def _time_left(self) -> str:
        fps = self._values.get("time/fps", 0.0)
        if not self._total_steps or not fps > 0 or fps == float("inf"):
            return "-"
        seconds = int(max(0, self._total_steps - self._step) / fps)
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def _cells(self) -> dict[str, str]:
        """Label and text of all that is known so far."""
        values, cells = self._values, {}
        if "time/fps" in values:
            cells["env-steps/s"] = engineering(values["time/fps"])
        collect, update = (
            values.get("time/collect_seconds", 0.0),
            values.get("time/update_seconds", 0.0),
        )
        if collect + update > 0:
            cells["collect / update"] = (
                f"{100 * collect / (collect + update):.0f} % / "
                f"{100 * update / (collect + update):.0f} %"
            )
        for label, tags in ROWS.items():
            tag = next((tag for tag in tags if tag in values), None)
            if tag is not None:
                cells[label] = f"{values[tag]:.4g}"
        return cells

    def _line(self) -> str:
        return " | ".join(
            [
                self._title,
                self._steps(),
                *(f"{label} {text}" for label, text in self._cells().items()),
            ]
        )

    def _table(self) -> "RenderableType":
        from rich import box
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        cells = [
            (Text(label, style="dim"), Text(text, style="bold"))
            for label, text in self._cells().items()
        ]
        grid = Table.grid(padding=(0, 2), expand=True)
        for _ in range(2):
            grid.add_column(ratio=1, no_wrap=True)
            grid.add_column(ratio=1, no_wrap=True)
        half = (len(cells) + 1) // 2  # two columns, read downwards
        for row in range(half):
            right = cells[row + half] if row + half < len(cells) else (Text(), Text())
            grid.add_row(*cells[row], *right)
        return Panel(
            Group(self._progress(), Text(), grid),
            title=Text(self._title, style="bold"),
            box=box.ROUNDED,
            width=80,
        )

    def _progress(self) -> "RenderableType":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if not self._total_steps:
            return Text(self._steps())
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(ProgressBar(total=self._total_steps, completed=self._step), Text(self._steps()))
        return row
