"""How well gpurl learns: tasks x algorithms x seeds, resumable, one process a core, beside
published returns: `python -m benchmarks.learning`, `make learn`.
"""
