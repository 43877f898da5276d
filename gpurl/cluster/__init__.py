"""Populations whose members are trained by the processes of a cluster, with Ray."""
