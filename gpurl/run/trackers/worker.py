"""The process of one tracker: reads messages from its standard input, one line of JSON each, and
answers with its run's id, what went wrong, and that it is done.

A tracker may hang, print, start threads or ask for a key; here it does so beside the training.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from gpurl.errors import first_line
from gpurl.run.trackers.tracker import RunCard, make_tracker

FAILED = "the training's process ended"


def main(name: str) -> int:
    """Serve until the training says that it is finished, or its process is gone."""
    # what the tracker prints goes to stderr, a file in the run folder; it cannot ask for anything
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    messages = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    tracker = make_tracker(name)
    try:
        card = RunCard(**json.loads(messages.readline()))
        Path(card.root).mkdir(parents=True, exist_ok=True)
        run_id = tracker.begin(card)
        answer(answers, id=run_id, rescue=tracker.rescue)
        if tracker.note:
            answer(answers, error=tracker.note)
    except BaseException as error:  # SystemExit too
        answer(answers, error=_text(error))
        raise
    has_failed = False
    summary: dict[str, object] | None = None
    for line in messages:
        message = json.loads(line)
        if "summary" in message:
            summary = message["summary"]
            break
        try:
            tracker.log(message["step"], message["values"])
        except Exception as error:
            if not has_failed:
                answer(answers, error=_text(error))
            has_failed = True
    # a training that was killed says nothing
    failed = summary is None or str(summary.get("ended_by", "")).startswith("error")
    try:
        tracker.finish(summary if summary is not None else {"ended_by": FAILED}, failed)  # type: ignore[arg-type]
        answer(answers, done=True)
    except Exception as error:
        answer(answers, error=_text(error))
    return 0


def answer(stream: TextIO, **message: object) -> None:
    """One line to the training, which may be gone."""
    with suppress(OSError):
        stream.write(json.dumps(message) + "\n")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:500]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
