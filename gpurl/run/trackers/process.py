"""The training's side of the trackers: sends log entries to their processes and never waits for
one, except a limited time at the end."""

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from gpurl.checkpoints.plain_files import (
    Json,
    append_regular,
    make_folder,
    read_at_most,
    write_regular,
)
from gpurl.errors import visible
from gpurl.run.trackers.tracker import RunCard

log = logging.getLogger("gpurl")

FINISH_SECONDS = 30.0  # for all trackers together, at the end of a training
QUEUE_LENGTH = 4096  # log entries, about an hour
IDS_FILE = "trackers.json"
OUTPUT_FOLDER = "tracking"
MAX_IDS_BYTES = 1 << 14
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from gpurl.run.trackers.worker import main; sys.exit(main(sys.argv[1]))"
)


class TrackerProcess:
    """One tracker in its process."""

    def __init__(self, name: str, card: RunCard, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.has_warned = False
        self.rescue = ""  # the command that sends what did not arrive
        self.is_done = False
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUE_LENGTH)
        make_folder(folder / OUTPUT_FOLDER)
        with append_regular(folder / OUTPUT_FOLDER / f"{name}.log") as output:
            # the modules come from where this process has them, from the working directory last
            paths = [path for path in sys.path if path] + [os.getcwd()] * ("" in sys.path)
            # a session of its own: Ctrl-C is for the training, which then says how it ended
            self._process = subprocess.Popen(  # noqa: S603 - this Python
                [sys.executable, "-c", START, name, json.dumps(paths)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        self._threads = [
            threading.Thread(target=target, name=f"gpurl-{name}", daemon=True)
            for target in (self._send_all, self._receive_all)
        ]
        for thread in self._threads:
            thread.start()
        self.send(asdict(card))

    def send(self, message: Mapping[str, object]) -> None:
        """Queue a message; if the tracker hangs, so that the queue is full, it is lost."""
        try:
            self._queue.put_nowait(json.dumps(message).encode() + b"\n")
        except queue.Full:
            self.warn("does not answer; entries are lost")

    def warn(self, text: str) -> None:
        """One line for all that goes wrong."""
        if not self.has_warned:
            output = self.folder / OUTPUT_FOLDER / f"{self.name}.log"
            later = f"; later: {visible(self.rescue)}" if self.rescue else ""
            text = f"{visible(text)}; the training goes on ({output}){later}"
            log.warning("tracker %s: %s", self.name, text)
        self.has_warned = True

    def _send_all(self) -> None:
        """The thread that writes, and waits for a tracker that is slow."""
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(OSError):  # its process is gone, which the other thread sees
            while (line := self._queue.get()) is not None:
                pipe.write(line)
                pipe.flush()
        with suppress(OSError):
            pipe.close()

    def _receive_all(self) -> None:
        """The thread that reads the tracker's answers until its process ends."""
        pipe = self._process.stdout
        assert pipe is not None
        for line in pipe:
            with suppress(ValueError):
                message = json.loads(line)
                if "id" in message:
                    note_id(self.folder, self.name, str(message["id"]))
                    self.rescue = str(message.get("rescue", ""))
                if "error" in message:
                    self.warn(str(message["error"]))
                self.is_done = self.is_done or "done" in message
        if not self.is_done:
            self.warn("its process has ended")

    def finish(self, deadline: float) -> None:
        """Wait for the process until `deadline` (time.monotonic), then end it."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=max(deadline - time.monotonic(), 0.0))
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.warn("did not finish in time and was ended")
        # the whole session, since trackers start processes too
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for thread in self._threads:
            thread.join(1.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class Trackers:
    """All trackers of a run."""

    def __init__(self, names: Sequence[str], card: RunCard, folder: Path, resumes: bool) -> None:
        """card: without id; that of a resumed run is in its folder."""
        known = read_ids(folder) if resumes else {}
        self.processes = []
        for name in names:
            try:
                own_card = replace(card, id=known.get(name))
                self.processes.append(TrackerProcess(name, own_card, folder))
            except OSError as error:
                log.warning("tracker %s: %s; the training goes on", name, error)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite numbers at an env step."""
        for process in self.processes:
            process.send({"step": step, "values": values})

    def close(self, summary: Mapping[str, Json]) -> None:
        """Send the summary, and wait at most FINISH_SECONDS."""
        deadline = time.monotonic() + FINISH_SECONDS
        for process in self.processes:
            process.send({"summary": dict(summary)})
        for process in self.processes:
            process.finish(deadline)
        self.processes = []


def read_ids(folder: Path) -> dict[str, str]:
    """The id of each tracker's run; {} if there is none, or the file is damaged."""
    try:
        ids = json.loads(read_at_most(folder / IDS_FILE, MAX_IDS_BYTES))
        return {str(name): str(each) for name, each in ids.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


_IDS_LOCK = threading.Lock()


def note_id(folder: Path, name: str, run_id: str) -> None:
    """Keep the id for a resume; a failure, for example a full disk, is a warning."""
    with _IDS_LOCK:
        content = json.dumps(read_ids(folder) | {name: run_id}, indent=1).encode()
        try:
            write_regular(folder / IDS_FILE, content)
        except OSError as error:
            log.warning("%s of %s is not updated: %s", IDS_FILE, folder, error)
