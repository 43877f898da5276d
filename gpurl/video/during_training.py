"""Videos of the greedy policy while it trains, in environments of their own."""

import logging
from collections.abc import Callable
from functools import partial

from gpurl.algorithms.base import Metrics
from gpurl.checkpoints.plain_files import make_folder
from gpurl.errors import GpurlError, first_line
from gpurl.run.callbacks import Callback, RunView
from gpurl.run.evaluator import EVAL_SEED, Stopped, greedy_player
from gpurl.run.run_folder import VIDEOS
from gpurl.run.settings import Settings
from gpurl.video.files import check_video_path, write_video
from gpurl.video.film import Film, greedy_film

log = logging.getLogger("gpurl")


class Videos(Callback):
    """Writes RUN/videos/step_XXXXXXXXXXXX.mp4 every `video_every` env steps, and after the last.

    The policy acts without exploration in environments of their own, so no random stream of the
    training moves; all videos play the same episodes. The first failure gives a warning and ends
    the videos; the training goes on.
    """

    def __init__(self, settings: Settings, every: int) -> None:
        self.settings = settings
        self.every = every  # env steps
        self.next_at = every
        self.last_at = -1
        self.has_failed = False

    def on_start(self, run: RunView) -> None:
        self.next_at = (run.steps // self.every + 1) * self.every
        # what is missing is said now, not after an hour
        self._try(run, self._check)

    def after_iteration(self, run: RunView, metrics: Metrics) -> None:
        if run.steps >= self.next_at:
            self.next_at = (run.steps // self.every + 1) * self.every
            self._try(run, self._write)

    def on_end(self, run: RunView) -> None:
        if run.steps != self.last_at:
            self._try(run, self._write)

    def _try(self, run: RunView, function: Callable[[RunView], None]) -> None:
        """Call it; whatever it raises ends the videos, not the training."""
        if self.has_failed or run.should_stop():
            return
        try:
            function(run)
        except Stopped:
            pass
        except Exception as error:
            self.has_failed = True
            kind = "" if isinstance(error, GpurlError) else f"{type(error).__name__}: "
            log.warning("no videos from step %d on: %s%s", run.steps, kind, first_line(error))

    def _check(self, run: RunView) -> None:
        """Make a film and look at its first picture."""
        path = run.folder / VIDEOS / "step_000000000000.mp4"
        make_folder(path.parent)
        check_video_path(path)
        film = self._film(run)
        try:
            next(iter(film))
        finally:
            film.env.close()

    def _write(self, run: RunView) -> None:
        path = run.folder / VIDEOS / f"step_{run.steps:012d}.mp4"
        film = self._film(run)
        try:
            write_video(path, film.watched(run.show_activity), film.fps)
        finally:
            film.env.close()
            run.show_activity("")
        self.last_at = run.steps

    def _film(self, run: RunView) -> Film:
        film = greedy_film(
            partial(greedy_player, run.algorithm),
            run.algorithm.device,
            self.settings.env,
            self.settings.env_options,
            seed=EVAL_SEED,
            should_stop=run.should_stop,
        )
        progress = min(run.steps / self.settings.train.total_steps, 1.0)
        film.env.training_progress.fill_(progress)
        return film
