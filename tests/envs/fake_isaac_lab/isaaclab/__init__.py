"""Stands in for Isaac Lab in tests: its interface and its traps around walks on a line, nothing of
its code.
"""
