"""What is done about a run that an error or a signal broke off: the rest is saved, and nothing hides the error."""

from typing import TYPE_CHECKING

from gpurl.display import Display
from gpurl.errors import DivergedError, EnvError, NonFiniteError
from gpurl.evaluator import Stopped
from gpurl.nan_dump import write_dump

if TYPE_CHECKING:
    from gpurl.trainer import Trainer


def leave(trainer: "Trainer", display: Display, error: BaseException, signal_number: int | None) -> None:
    """In the handler of `error`: save the state and raise it, or return where a signal has broken what was done, which is no error."""
    is_fault = not (signal_number and isinstance(error, (Stopped, EnvError)))
    try:
        if trainer.buffer.size:  # a rollout that broke off is not kept; weights and counters are those of the last update
            trainer.buffer.clear()
            trainer.algorithm.cut()  # the environments are steps ahead of what is stored
        if is_fault and not isinstance(error, DivergedError):  # LATEST stays a policy that one can go on from
            trainer.save(display)
    except Exception as another:
        trainer.warn(display, f"no checkpoint at step {trainer.steps}: {type(another).__name__}: {another}")
    if not is_fault:
        return
    if isinstance(error, NonFiniteError) and (dump := write_dump(trainer.folder, trainer.steps, error)):
        raise type(error)(f"{error}. What led there: gpurl doctor {dump}") from error
    raise error
