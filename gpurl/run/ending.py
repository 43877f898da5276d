"""What is done about a run that an error or a signal broke off: the rest is saved, and nothing
hides the error.
"""

from typing import TYPE_CHECKING

from gpurl.checkpoints.folders import list_checkpoints
from gpurl.errors import DivergedError, EnvError, NonFiniteError
from gpurl.guards.dump import write_dump
from gpurl.run.display import Display
from gpurl.run.evaluator import Stopped

if TYPE_CHECKING:
    from gpurl.run.trainer import Trainer


def leave(
    trainer: "Trainer", display: Display, error: BaseException, signal_number: int | None
) -> None:
    """In the handler of `error`: save the state and raise it, or return where a signal has broken
    what was done, which is no error.
    """
    is_fault = not (signal_number and isinstance(error, (Stopped, EnvError)))
    try:
        if trainer.buffer.size:
            # An iteration that broke off does not count: its rollout is not kept, and counters are
            # those of the last whole one. Where it broke off in `learn` the weights are some steps
            # further, and a replay holds the rollout: all of it true, and none of it twice.
            trainer.buffer.clear()
            trainer.algorithm.cut()  # the environments may be steps ahead of what is stored
        if is_fault and not isinstance(
            error, DivergedError
        ):  # LATEST stays a policy that one can go on from
            trainer.save(display)
    except Exception as another:
        trainer.warn(
            display, f"no checkpoint at step {trainer.steps}: {type(another).__name__}: {another}"
        )
    if not is_fault:
        return
    advice = _way_on(trainer) if isinstance(error, DivergedError) else ""
    if isinstance(error, NonFiniteError) and (
        dump := write_dump(trainer.folder, trainer.steps, error)
    ):
        advice += f". What led there: gpurl doctor {dump}"
    if advice:
        raise type(error)(f"{error}{advice}") from error
    raise error


def _way_on(trainer: "Trainer") -> str:
    """What can be done about a policy that diverged: there may be no checkpoint of it yet."""
    if not list_checkpoints(trainer.folder):
        return ". It left no checkpoint: begin anew with a lower learning_rate"
    return (
        ". To go on from the last checkpoint with smaller steps: gpurl train --resume RUN "
        "--learning-rate RATE"
    )
