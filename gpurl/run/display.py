"""The console output of a training: a live table in a terminal, a line every few seconds in a file
or a pipe.
"""

import itertools
import math
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

from gpurl.run.notebook import LiveTable, display_module
from gpurl.run.progress import Progress, clock
from gpurl.run.terminal import (
    SECONDS_PER_FRAME,
    SECONDS_PER_LINE,
    can_animate,
    hidden_control_keys,
    say,
    silence,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

WIDTH = 80  # of the table, letters

# label, and tags of which the first that is present is shown
ROWS: dict[str, tuple[str, ...]] = {
    "episode return": ("rollout/ep_rew_mean",),
    "episode length": ("rollout/ep_len_mean",),
    "eval return": ("eval/mean_reward",),
    "eval of all members": ("eval/population_mean",),
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


def counted(number: int, noun: str) -> str:
    """ "1 thread", "2 threads"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Display:
    """Shows the progress of one training. If a pipe is closed or a terminal is lost it becomes
    silent, and training continues.

    `live` None: a table if stdout is a terminal. `quiet`: nothing but warnings. `max_seconds`: the
    time limit of the training, which begins now.
    """

    def __init__(
        self,
        title: str,
        total_steps: int | None,
        quiet: bool = False,
        live: bool | None = None,
        max_seconds: float | None = None,
    ) -> None:
        self._title = title
        self._progress = Progress(total_steps, max_seconds)
        self._is_quiet = quiet
        self._muted = quiet or sys.stdout is None
        self._notebook = LiveTable() if not self._muted and display_module() is not None else None
        if live is None:
            live = not self._muted and can_animate(sys.stdout)
        self._is_live = live and not self._muted and self._notebook is None
        self._live: Live | None = None
        self._cleanup = ExitStack()
        # the newest numbers, and whether they are still to be shown
        self._values: dict[str, float] = {}
        self._best_evaluation = -math.inf
        self._next_show = 0.0
        self._has_news = False
        # what the training waits for, beside its numbers
        self._activity = ""

    def __enter__(self) -> "Display":
        if self._notebook is not None:
            self._safely(self._show)
        elif self._is_live:
            self._safely(self._start_live)
        else:
            self._print(self._title)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._has_news:
                self._safely(self._show)
        finally:
            if self._live is not None:  # stop gives cursor, stdout and stderr back
                self._safely(self._live.stop, even_muted=True)
            self._cleanup.close()

    @property
    def is_live(self) -> bool:
        """Whether a table is on the screen."""
        return self._live is not None and not self._muted

    def update(self, step: int, values: dict[str, float]) -> None:
        """Take the newest values by native tag (tags that are missing keep their last value), and
        show them if it is time to.
        """
        self._progress.update(step)
        self._has_news = True
        self._values.update(values)
        evaluated = values.get("eval/mean_reward", -math.inf)
        if evaluated > self._best_evaluation:  # never of NaN
            self._best_evaluation = evaluated
        self._show_if_due(self._show)

    def activity(self, text: str) -> None:
        """What the training waits for, such as the progress of a video: in the table until "", or a
        line every few seconds.
        """
        self._activity = text
        if self._is_live or self._notebook is not None:
            self._has_news = True
            self._show_if_due(self._show)
        elif text:
            self._show_if_due(lambda: self._print(text))

    def _show_if_due(self, show: Callable[[], object]) -> None:
        if time.monotonic() < self._next_show:
            return
        is_animated = self._is_live or self._notebook is not None
        self._next_show = time.monotonic() + (
            SECONDS_PER_FRAME if is_animated else SECONDS_PER_LINE
        )
        self._safely(show)

    def note(self, text: str) -> None:
        """A line that stays, above the table."""
        if self._live is None:
            self._print(text)
        else:
            show = self._live.console.print
            self._safely(lambda: show(text, markup=False, highlight=False, soft_wrap=True))

    def warn(self, text: str) -> None:
        """A line `warning: text`; on standard error if the display is quiet."""
        if self._is_quiet:
            say(f"warning: {text}", is_error=True)
        else:
            self.note(f"warning: {text}")

    # ---- output that cannot fail ----

    def _safely(self, show: Callable[[], object], even_muted: bool = False) -> None:
        """Call `show`. If stdout is gone, mute for good and send stdout to nowhere, else Python
        reports it again at exit.
        """
        if self._muted and not even_muted:
            return
        try:
            show()
        # a closed pipe or stream, a lost terminal, a letter that the stream cannot encode
        except (OSError, ValueError):
            self._mute()

    def _print(self, text: str) -> None:
        if not self._muted:
            self._muted = not say(text)

    def _mute(self) -> None:
        self._muted = True
        silence(sys.__stdout__ or sys.stdout)

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(force_terminal=True)
        # rich's own handler ends the program
        console.on_broken_pipe = self._mute  # type: ignore[method-assign]
        # no refresh thread: it would compete with the trainer
        self._live = Live(self._table(), console=console, auto_refresh=False)
        self._live.start(refresh=False)
        self._cleanup.enter_context(hidden_control_keys())

    # ---- what is shown ----

    def _show(self) -> None:
        self._has_news = False
        if self._notebook is not None:
            share = self._progress.share()
            text = " | ".join(filter(None, (self._progress_text(), self._activity)))
            self._notebook.show(self._title, text, share, self._cells())
        elif self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            cells = [f"{label} {text}" for label, text in self._cells().items()]
            self._print(" | ".join([self._progress_text(), *cells]))

    def _progress_text(self) -> str:
        """ "524k/1.00M steps, 52.4 %, ETA 0:00:07"; the share is of steps or of the time limit."""
        progress = self._progress
        steps = engineering(progress.step)
        if progress.total_steps:
            steps += f"/{engineering(progress.total_steps)}"
        share = progress.share()
        if share is None:
            return f"{steps} steps"
        return f"{steps} steps, {100 * share:.1f} %, ETA {self._time_left()}"

    def _time_left(self) -> str:
        left = self._progress.seconds_left(self._values.get("time/fps", 0.0))
        return "-" if left is None else clock(left)

    def _cells(self) -> dict[str, str]:
        """Label and text of all that is known so far."""
        # speed
        values = self._values
        cells = {}
        if "time/fps" in values:
            cells["env-steps/s"] = engineering(values["time/fps"])
        collect = values.get("time/collect_seconds", 0.0)
        update = values.get("time/update_seconds", 0.0)
        if collect + update > 0:
            percent = 100 * collect / (collect + update)
            cells["rollout / update"] = f"{percent:.0f} % / {100 - percent:.0f} %"
        # returns, losses and what else there is
        for label, tags in ROWS.items():
            tag = next((tag for tag in tags if tag in values), None)
            if tag is not None:
                cells[label] = f"{values[tag]:.4g}"
            if label == "eval return" and self._best_evaluation > values.get(tag or "", math.inf):
                cells[label] += f" (best {self._best_evaluation:.4g})"
        if "time/time_elapsed" in values:
            cells["elapsed"] = str(timedelta(seconds=int(values["time/time_elapsed"])))
        return cells

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
        # two columns of label and text, read downwards, or one in a narrow terminal
        num_columns = 2 if shutil.get_terminal_size().columns >= WIDTH else 1
        grid = Table.grid(padding=(0, 2), expand=True)
        for _ in range(2 * num_columns):
            grid.add_column(ratio=1, no_wrap=True)
        num_rows = -(-len(cells) // num_columns)
        cells += [(Text(), Text())] * (num_rows * num_columns - len(cells))
        for row in range(num_rows):
            grid.add_row(*itertools.chain(*cells[row::num_rows]))
        return Panel(
            Group(self._progress_bar(), Text(self._activity), grid),
            title=Text(self._title, style="bold"),
            box=box.ROUNDED,
            width=WIDTH,
        )

    def _progress_bar(self) -> "RenderableType":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        text = Text(self._progress_text())
        share = self._progress.share()
        if share is None:
            return text
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(ProgressBar(total=1.0, completed=share), text)
        return row


class SilentDisplay(Display):
    """Says nothing, warnings neither: those of the other processes of a run are the first one's."""

    def warn(self, text: str) -> None: ...
