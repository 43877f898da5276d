"""The life of a run: settings, folder, log, evaluation, checkpoints, signals."""
