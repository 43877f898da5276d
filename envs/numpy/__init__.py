"""Numpy vector environments behind `gymnasium_cpu`: spaces, worker processes, EnvPool."""
