"""Importing it registers the tasks."""

import mjlab.tasks.registry  # noqa: F401
