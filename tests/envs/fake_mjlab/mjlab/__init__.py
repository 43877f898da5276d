"""Stands in for mjlab in tests: its interface around walks on a line, nothing of its code."""
