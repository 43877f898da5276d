"""Stands for ManiSkill 3: a task of batched walks, its registration and its vector wrapper."""
