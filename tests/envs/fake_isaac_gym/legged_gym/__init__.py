"""Stands for legged_gym."""
