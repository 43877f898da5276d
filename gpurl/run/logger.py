"""Scalars of a run on disk: metrics.jsonl at once, TensorBoard event files from a thread; a full
disk never stops the training.
"""

import io
import json
import logging
import math
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gpurl.checkpoints.plain_files import MAX_LINE_BYTES, Json, append_regular, edit_regular
from gpurl.run.metric_help import METRIC_HELP
from gpurl.run.run_folder import EVENT_FILES
from gpurl.run.trackers.process import Trackers
from gpurl.run.trackers.tracker import flat

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

log = logging.getLogger("gpurl")  # not `warnings`: a filter that raises must not end a training

QUEUE_LENGTH = 4096
CLOSE_SECONDS = 10.0  # the end of a training waits no longer for a network disk that hangs
# what a line raises that the logger did not write
FOREIGN = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
NON_FINITE = "time/non_finite_scalars"
STAMP = re.compile(re.escape(EVENT_FILES) + r"(\d+(?:\.\d+)?)\.")  # seconds

# Names that dashboards of other frameworks use, by style and native (Stable-Baselines3) tag; "-":
# they log the negative
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
    """`values` under the names of `style`; tags without such a name stay native."""
    renamed = {}
    for tag, value in values.items():
        name = ALIASES[style].get(tag, tag)
        if tag.startswith("env/") and style in ("rsl_rl", "rl_games"):
            term = tag.removeprefix("env/")
            # rsl_rl shows "Episode_Reward/x" under this name
            name = term if style == "rsl_rl" and "/" in term else f"Episode/{term}"
        renamed[name.removeprefix("-")] = -value if name.startswith("-") else value
    return renamed


class _WarnOnce:
    """A `with` block that turns an error into a warning; no more warnings until a success."""

    def __init__(self, file_name: str) -> None:
        self._file_name = file_name
        self._failing = False

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception) and not self._failing:
            log.warning("cannot write %s, the training continues: %s", self._file_name, error)
        self._failing = error is not None
        return isinstance(error, Exception)


class _AppendFile:
    """Appends complete records: if a full disk takes only a part of one, that part is removed, so
    that a reader never meets half a record. Opened by the first write, since a folder that cannot
    be written now may be writable later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, record: bytes) -> None:
        if self._file is None:
            self._file = append_regular(self._path, buffering=0)
        # cut the file to this size if the record does not fit
        size = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(record)
            if written != len(record):
                raise OSError(
                    f"{self._path}: only {written} of {len(record)} bytes were written, the disk "
                    f"may be full"
                )
        except OSError:
            if os.fstat(self._file.fileno()).st_size > size:
                self._file.truncate(size)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _truncate_after(path: Path, step: int) -> dict[str, float]:
    """Remove from `path` what a killed run wrote after `step`, and what follows its last record;
    returns the newest finite value of each tag in what remains. Foreign lines between records stay.
    """
    newest: dict[str, float] = {}
    if not os.path.lexists(path):
        return newest
    with edit_regular(path) as file:
        kept_bytes = read_bytes = 0
        # the logger writes no line that is longer than the limit
        for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
            if not line.endswith(b"\n"):
                break
            read_bytes += len(line)
            with suppress(*FOREIGN):
                record = json.loads(line)
                if record["step"] > step:
                    break
                numbers = {tag: float(x) for tag, x in record.items() if isinstance(x, int | float)}
                newest.update({tag: x for tag, x in numbers.items() if math.isfinite(x)})
                kept_bytes = read_bytes
        file.truncate(kept_bytes)
    return newest


class _EventFile:
    """One TensorBoard event file. The first event imports `tensorboard`, which takes a quarter of a
    second.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        self._purge_step = purge_step
        self._has_header = False
        self._described: set[str] = set()  # tags
        # TensorBoard reads the files of a run in the order of their names: hence microseconds, and
        # no time before that of an earlier file, though a clock may have gone back
        earlier = (STAMP.match(path.name) for path in folder.glob(f"{EVENT_FILES}*"))
        stamps = [float(found[1]) + 1e-6 for found in earlier if found]
        stamp = max([time.time(), *stamps])
        name = f"{EVENT_FILES}{stamp:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = _AppendFile(folder / name)

    def write_scalars(self, step: int, wall_time: float, values: dict[str, float]) -> None:
        """All scalars in one event, which takes a tenth of the time of one event each."""
        from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary
        from tensorboard.plugins.scalar.metadata import create_summary_metadata

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        for scalar in scalars:  # TensorBoard reads the description in a tag's first event only
            if scalar.tag in METRIC_HELP and scalar.tag not in self._described:
                metadata = create_summary_metadata("", METRIC_HELP[scalar.tag])
                metadata.data_class = DATA_CLASS_SCALAR  # its fast reader drops others' metadata
                scalar.metadata.CopyFrom(metadata)
                self._described.add(scalar.tag)
        self._write(step, wall_time, Summary(value=scalars))

    def write_text(self, step: int, wall_time: float, tag: str, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._write(step, wall_time, text_pb(tag, text))

    def write_settings(self, step: int, wall_time: float, values: Mapping[str, Json]) -> None:
        """As TensorBoard's HPARAMS tab shows them, beside the last value of each scalar."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

        # tensorboard.plugins.hparams.summary would need TensorFlow
        info = SessionStartInfo(start_time_secs=wall_time)
        for name, value in values.items():
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, (int, float)) and math.isfinite(value):
                info.hparams[name].number_value = value
            elif value is not None:  # the tab has no place for what is not set
                info.hparams[name].string_value = str(value)
        content = metadata.create_summary_metadata(HParamsPluginData(session_start_info=info))
        tag = metadata.SESSION_START_INFO_TAG
        shown = Summary.Value(tag=tag, metadata=content, tensor=metadata.NULL_TENSOR)
        self._write(step, wall_time, Summary(value=[shown]))

    def _write(self, step: int, wall_time: float, summary: "Summary") -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        records = b"" if self._has_header else self._header(wall_time)
        self._file.write(records + _record(Event(step=step, wall_time=wall_time, summary=summary)))
        self._has_header = True

    def _header(self, wall_time: float) -> bytes:
        """A version, and a session start: it makes TensorBoard drop steps from `purge_step` on in
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


def _record(event: "Event") -> bytes:
    """A protobuf event in the record format (length, checksums) of an event file."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


class Logger:
    """Writes the scalars of one run; after a resume with `start_step` the files read as if the run
    had never been killed.
    """

    def __init__(
        self,
        folder: Path,
        tag_style: str = "sb3",
        start_step: int = 0,
        trackers: Trackers | None = None,
    ) -> None:
        """trackers: they get what metrics.jsonl gets, under its names."""
        self._trackers = trackers
        self._style = tag_style
        self._start_step = start_step
        # metrics.jsonl, continued
        self._lines = _AppendFile(folder / "metrics.jsonl")
        self._lines_alarm = _WarnOnce("metrics.jsonl")
        newest: dict[str, float] = {}
        with self._lines_alarm:
            newest = _truncate_after(folder / "metrics.jsonl", start_step)
        self._start_time = time.monotonic() - newest.get("time", 0.0)
        self._non_finite = int(newest.get(NON_FINITE) or 0)
        self._iteration = int(newest.get("time/iterations") or 0)
        # the event file, written by a thread
        purge_step = self._iteration + 1 if tag_style == "rsl_rl" else start_step + 1
        self._events = _EventFile(folder, purge_step)
        self._events_alarm = _WarnOnce("TensorBoard's event file")
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._drain, name="gpurl-logger", daemon=True)
        self._thread.start()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log host numbers by native tag at an env step. NaN and infinity are null in metrics.jsonl
        and are counted.
        """
        # count NaN and infinity
        values = {tag: float(value) for tag, value in values.items()}
        non_finite = [tag for tag, value in values.items() if not math.isfinite(value)]
        self._non_finite += len(non_finite)
        if self._non_finite:
            values[NON_FINITE] = float(self._non_finite)
        # metrics.jsonl, in which they are null
        seconds = round(time.monotonic() - self._start_time, 3)
        line: dict[str, float | None] = {"step": step, "time": seconds, **values}
        line.update(dict.fromkeys(non_finite))
        with self._lines_alarm:
            self._lines.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._iteration = int(values.get("time/iterations", self._iteration))
        # trackers, by their processes
        if self._trackers is not None:
            self._trackers.log(step, {tag: x for tag, x in values.items() if math.isfinite(x)})
        # TensorBoard, by the thread
        x = self._event_step(step)
        now = time.time()
        self._send(lambda: self._events.write_scalars(x, now, in_style(values, self._style)))

    def hyper_parameters(self, config: Mapping[str, Json]) -> None:
        """Show the configuration in TensorBoard: in the text tab as a table, and in the HPARAMS tab
        beside the returns.
        """
        # characters that break a table's row are escaped
        rows = [
            f"|{name}|{str(value).replace('|', chr(92) + '|').replace(chr(10), ' ')}|"
            for name, value in flat(config)
        ]
        table = "\n".join(["|name|value|", "|-|-|", *rows])
        x = self._event_step(self._start_step)
        now = time.time()
        self._send(lambda: self._events.write_text(x, now, "hyper_parameters", table))
        settings = dict(flat(config))
        self._send(lambda: self._events.write_settings(x, now, settings))

    def _event_step(self, step: int) -> int:
        """TensorBoard's x-axis: env steps, or iterations in rsl_rl's style."""
        return self._iteration if self._style == "rsl_rl" else step

    def close(self) -> None:
        """Wait until everything is written; more calls do nothing."""
        if self._thread.is_alive():
            with self._events_alarm:
                self._queue.put(None, timeout=CLOSE_SECONDS)
                self._thread.join(CLOSE_SECONDS)
        with self._lines_alarm:
            self._lines.close()

    def _send(self, write: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait(write)
        except queue.Full:  # the disk hangs: the thread waits for it, the trainer must not
            with self._events_alarm:
                raise

    def _drain(self) -> None:
        """The thread: write what arrives until a None."""
        while (write := self._queue.get()) is not None:
            with self._events_alarm:
                write()
        with self._events_alarm:
            self._events.close()
