"""Scalars of a run on disk: metrics.jsonl at once, TensorBoard event files from a thread; a full
disk never stops the training.
"""

import io
import json
import logging
import math
import os
import queue
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from gpurl.checkpoints.plain_files import MAX_LINE_BYTES, append_regular

log = logging.getLogger("gpurl")  # not `warnings`: a filter that raises must not end a training

QUEUE_LENGTH = 4096
CLOSE_SECONDS = 10.0  # a network disk that hangs does not hold the end of a training for longer
NON_FINITE = "time/non_finite_scalars"

# Names that other frameworks' dashboards look for, by style and native (Stable-Baselines3) tag;
# "-": they log the negative.
ALIASES: dict[str, dict[str, str]] = {
    "sb3": {},
    "cleanrl": {
        "rollout/ep_rew_mean": "charts/episodic_return",
        "rollout/ep_len_mean": "charts/episodic_length",
        "time/fps": "charts/SPS",
        "train/learning_rate": "charts/learning_rate",
        "train/value_loss": "losses/value_loss",
        "train/policy_gradient_loss": "losses/policy_loss",
        "train/entropy_loss": "-losses/entropy",
        "train/approx_kl": "losses/approx_kl",
        "train/clip_fraction": "losses/clipfrac",
        "train/explained_variance": "losses/explained_variance",
        "train/critic_loss": "losses/qf_loss",
        "train/actor_loss": "losses/actor_loss",
        "train/ent_coef": "losses/alpha",
        "train/ent_coef_loss": "losses/alpha_loss",
        "eval/mean_reward": "eval/episodic_return",
    },
    "rsl_rl": {
        "rollout/ep_rew_mean": "Train/mean_reward",
        "rollout/ep_len_mean": "Train/mean_episode_length",
        "time/fps": "Perf/total_fps",
        "time/collect_seconds": "Perf/collection_time",
        "time/update_seconds": "Perf/learning_time",
        "train/value_loss": "Loss/value",
        "train/policy_gradient_loss": "Loss/surrogate",
        "train/entropy_loss": "-Loss/entropy",
        "train/learning_rate": "Loss/learning_rate",
        "train/std": "Policy/mean_std",
    },
    "rl_games": {
        "rollout/ep_rew_mean": "rewards/step",
        "rollout/ep_len_mean": "episode_lengths/step",
        "time/fps": "performance/step_inference_rl_update_fps",
        "time/collect_seconds": "performance/step_inference_time",
        "time/update_seconds": "performance/rl_update_time",
        "time/iterations": "info/epochs",
        "train/policy_gradient_loss": "losses/a_loss",
        "train/value_loss": "losses/c_loss",
        "train/entropy_loss": "-losses/entropy",
        "train/learning_rate": "info/last_lr",
        "train/clip_range": "info/e_clip",
        "train/approx_kl": "info/kl",
    },
}


def in_style(values: dict[str, float], style: str) -> dict[str, float]:
    """`values` under the names that `style` uses; what it has no name for keeps the native one."""
    renamed = {}
    for tag, value in values.items():
        name = ALIASES[style].get(tag, tag)
        if tag.startswith("env/") and style in (
            "rsl_rl",
            "rl_games",
        ):  # rsl_rl takes "Episode_Reward/x" as it is
            term = tag.removeprefix("env/")
            name = term if style == "rsl_rl" and "/" in term else f"Episode/{term}"
        renamed[name.removeprefix("-")] = -value if name.startswith("-") else value
    return renamed


class _Unfailing:
    """A `with` block whose errors end there: the first of a row of failures gives one warning, a
    success ends the row.
    """

    def __init__(self, what: str) -> None:
        self._what, self._failing = what, False

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception) and not self._failing:
            log.warning("%s cannot be written, the training goes on without: %s", self._what, error)
        self._failing = error is not None
        return isinstance(error, Exception)


class _AppendFile:
    """Appends whole records: what a full disk took only in part is cut off again, so that a reader
    never meets half a record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, record: bytes) -> None:
        if (
            self._file is None
            # here, not in the constructor: a folder that could not be written may be writable by
            # now
        ):
            self._file = append_regular(self._path, buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(record)
            if written != len(record):
                raise OSError(
                    f"{self._path}: only {written} of {len(record)} bytes were taken, the disk may "
                    f"be full"
                )
        except OSError:
            if os.fstat(self._file.fileno()).st_size > size:
                self._file.truncate(size)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _cut_after(path: Path, step: int) -> dict[str, float]:
    """Cut off `path` what a killed run wrote after `step`, and a half line; the latest value of
    each tag in what is left.
    """
    latest: dict[str, float] = {}
    if not path.is_file() or path.is_symlink():
        return latest
    with open(path, "rb+") as file:
        kept = 0
        for line in iter(
            lambda: file.readline(MAX_LINE_BYTES), b""
        ):  # a longer one is none of ours
            try:
                record = json.loads(line)
                if not line.endswith(b"\n") or record["step"] > step:
                    break
            except (ValueError, TypeError, KeyError, RecursionError):
                break
            latest.update(record)
            kept += len(line)
        file.truncate(kept)
    return latest


class _EventFile:
    """One TensorBoard event file; `tensorboard` is imported by the first event, which takes a
    quarter of a second.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        self._purge_step, self._has_header = purge_step, False
        # the time has microseconds because TensorBoard reads the files of a run in the order of
        # their names
        self._file = _AppendFile(
            folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        )

    def write_scalars(self, step: int, wall_time: float, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        self._write(
            step, wall_time, summary
        )  # one event for all: a tenth of the time of one for each

    def write_text(self, step: int, wall_time: float, tag: str, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._write(step, wall_time, text_pb(tag, text))

    def _write(self, step: int, wall_time: float, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        records = b"" if self._has_header else self._header(wall_time)
        self._file.write(records + _record(Event(step=step, wall_time=wall_time, summary=summary)))
        self._has_header = True

    def _header(self, wall_time: float) -> bytes:
        """A version, and a session start: it makes TensorBoard forget steps from `purge_step` on in
        the files of earlier sessions.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = Event(
            step=self._purge_step,
            wall_time=wall_time,
            session_log=SessionLog(status=SessionLog.START),
        )
        return _record(Event(wall_time=wall_time, file_version="brain.Event:2")) + _record(start)

    def close(self) -> None:
        self._file.close()


def _record(event: Any) -> bytes:
    """A protobuf event in the record format (length, sums) of an event file."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


class Logger:
    """Writes the scalars of one run; after a resume with `start_step` the files read as if the run
    had never been killed.
    """

    def __init__(self, folder: Path, tag_style: str = "sb3", start_step: int = 0) -> None:
        self._style, self._start_step = tag_style, start_step
        self._lines, self._lines_alarm = (
            _AppendFile(folder / "metrics.jsonl"),
            _Unfailing("metrics.jsonl"),
        )
        latest: dict[str, float] = {}
        with self._lines_alarm:
            latest = _cut_after(folder / "metrics.jsonl", start_step)
        self._zero = time.monotonic() - latest.get("time", 0.0)
        self._non_finite = int(latest.get(NON_FINITE) or 0)
        self._iteration = int(latest.get("time/iterations") or 0)
        purge_step = self._iteration + 1 if tag_style == "rsl_rl" else start_step + 1
        self._queue: queue.Queue[tuple[Any, ...] | None] = queue.Queue(QUEUE_LENGTH)
        self._events_alarm = _Unfailing("TensorBoard's event file")
        self._thread = threading.Thread(
            target=self._drain,
            args=(_EventFile(folder, purge_step),),
            name="gpurl-logger",
            daemon=True,
        )
        self._thread.start()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log host numbers by native tag at an env step. NaN and infinity are null in metrics.jsonl
        and are counted.
        """
        values = {tag: float(value) for tag, value in values.items()}
        bad = [tag for tag, value in values.items() if not math.isfinite(value)]
        self._non_finite += len(bad)
        if self._non_finite:
            values[NON_FINITE] = float(self._non_finite)
        line: dict[str, float | None] = {
            "step": step,
            "time": round(time.monotonic() - self._zero, 3),
            **values,
        }
        line.update(dict.fromkeys(bad))
        with self._lines_alarm:
            self._lines.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._iteration = int(values.get("time/iterations", self._iteration))
        x = self._iteration if self._style == "rsl_rl" else step  # rsl_rl's x-axis is the iteration
        self._send("scalars", x, time.time(), values)

    def hyper_parameters(self, config: dict[str, Any]) -> None:
        """Show the configuration in TensorBoard's text tab, as a table."""
        rows = [f"|{name}|{value}|" for name, value in _flat(config)]
        x = self._iteration if self._style == "rsl_rl" else self._start_step
        self._send(
            "text", x, time.time(), "hyper_parameters", "\n".join(["|name|value|", "|-|-|", *rows])
        )

    def close(self) -> None:
        """Wait until all is written; more calls do nothing."""
        if self._thread.is_alive():
            with self._events_alarm:
                self._queue.put(None, timeout=CLOSE_SECONDS)
                self._thread.join(CLOSE_SECONDS)
        with self._lines_alarm:
            self._lines.close()

    def _send(self, *item: Any) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:  # the disk hangs: the thread waits in a write, the trainer must not
            with self._events_alarm:
                raise

    def _drain(self, events: _EventFile) -> None:
        """The thread: write what comes until a None."""
        while (item := self._queue.get()) is not None:
            kind, step, wall_time, *rest = item
            with self._events_alarm:
                if kind == "text":
                    events.write_text(step, wall_time, *rest)
                else:
                    events.write_scalars(step, wall_time, in_style(rest[0], self._style))
        with self._events_alarm:
            events.close()


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """`{"a": {"b": 1}}` as [("a.b", "1")], with what would break a table's row escaped."""
    rows = []
    for key, value in config.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", str(value).replace("|", "\\|").replace("\n", " ")))
    return rows
