"""Isaac Gym's tasks: the adapter, and the process that simulates."""
