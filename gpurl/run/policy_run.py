"""A run folder for a policy that no training of this folder made: a checkpoint at step 0, which is
evaluated, exported and trained on as any other.
"""

from collections.abc import Sequence
from pathlib import Path

from gpurl.errors import CheckpointError
from gpurl.run.display import Display
from gpurl.run.listing import note_end
from gpurl.run.run_folder import create_run_folder, lock_run, write_run_info
from gpurl.run.trainer import Trainer


def write_policy_run(trainer: Trainer, command: Sequence[str]) -> None:
    """Make the folder of `trainer` and save its algorithm there. CheckpointError for weights that
    are not finite, and for a folder that cannot be written.
    """
    trainer.start()
    if bad := trainer.engine.guards.bad_weights():  # before there is a folder
        raise CheckpointError(f"it is no policy to go on with, not finite in gpurl: {bad}")
    settings = trainer.settings
    train = settings.train
    trainer.folder = create_run_folder(
        Path(train.root), settings.env, settings.algorithm, train.seed, train.run_dir
    )
    with lock_run(trainer.folder):
        kinds = (type(trainer.env), type(trainer.algorithm))
        write_run_info(trainer.folder, settings.to_dict(), command, kinds)
        if unsaved := trainer.save(Display("", 0, quiet=True)):
            raise CheckpointError(unsaved)
        note_end(trainer.folder, "written without a training", trainer.steps)
