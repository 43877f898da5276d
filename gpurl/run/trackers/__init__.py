"""Experiment trackers beside the files of a run: one file each, each in a process of its own."""
