"""New processes at a tenth of a new interpreter's price: one that has imported gpurl and trained
once forks another for each run.
"""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpurl.api
from gpurl.algorithms import algorithm_names, resolve_algorithm
from gpurl.cli.main import main
from gpurl.run.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = {
    "num_envs": 4,
    "horizon": 4,
    "total_steps": 16,
    "minibatches": 1,
    "eval_episodes": 0,
    "device": "cpu",
    "threads": 1,
    "quiet": True,
}


def play(
    words: list[str] | None = None,
    stop_after: int | None = None,
    stop_signal: int = signal.SIGTERM,
    environment: dict[str, str] | None = None,
    python_path: str | None = None,
    before: str | None = None,
    **settings: Any,
) -> int:
    """What `gpurl WORDS` ends with, or 0 after gpurl.train(**settings), gpurl.resume(**settings); a
    signal comes after so many iterations.

    Without words nothing is parsed, which takes as long as such a run. environment: variables that
    the process gets. python_path: a folder of modules. before: `module:function` to call first.
    """
    if python_path is not None:
        sys.path.insert(0, python_path)
    if before is not None:
        module, _, function = before.partition(":")
        getattr(importlib.import_module(module), function)()
    os.environ.update(environment or {})
    if stop_after is not None:
        iterate, left = Trainer.iterate, iter(range(stop_after - 1, -1, -1))

        def counted(trainer: Trainer) -> dict[str, torch.Tensor]:
            metrics = iterate(trainer)
            if next(left) == 0:
                os.kill(os.getpid(), stop_signal)
            return metrics

        Trainer.iterate = counted  # type: ignore[method-assign]
    # what a run takes from a generator of the process differs from one process to the next
    torch.seed()
    np.random.seed()  # noqa: NPY002
    random.seed()
    gpurl.api.plot_curve = lambda folder: folder  # type: ignore[attr-defined]  # longer to draw than these runs take
    if words is not None:
        return main(words)
    (gpurl.api.resume if "path" in settings else gpurl.api.train)(**settings)
    return 0


class Forks:
    """A context manager; `start` gives a process that does what `play` does, `wait` its exit code,
    -9 where it was killed. modules: imported before, beside what a training needs.
    """

    def __init__(self, *modules: str) -> None:
        self.modules = modules

    def __enter__(self) -> "Forks":
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.forked_runs", *self.modules]
        self._server = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()

    def start(self, output: Path, **arguments: Any) -> int:
        """The process's number; what it says goes behind what is in `output`. arguments: of `play`,
        as JSON has them.
        """
        return self._ask(output=str(output), **arguments)

    def wait(self, process: int) -> int:
        return self._ask(wait=process)

    def run(self, output: Path, **arguments: Any) -> int:
        return self.wait(self.start(output, **arguments))

    def _ask(self, **question: Any) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


def serve() -> None:
    """Answer the questions of `Forks` until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for name in algorithm_names():
        resolve_algorithm(name)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    importlib.import_module(
        "torch.fx.experimental.symbolic_shapes"
    )  # as autograd does at its first use, for more than a second
    with tempfile.TemporaryDirectory() as folder:
        play(algorithm="ppo", env="pendulum", run_dir=f"{folder}/run", **WARM_UP)
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            answer = os.waitstatus_to_exitcode(os.waitpid(question["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _be_child(**question)
        print(answer, file=answers, flush=True)


def _be_child(output: str, **arguments: Any) -> None:
    """In the forked process: run and end."""
    code = 99
    try:
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(target, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = play(**arguments)
        sys.stdout.flush()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)  # nothing of the process it was forked from runs on


if __name__ == "__main__":
    serve()
