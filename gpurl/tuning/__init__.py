"""Hyper-parameter search by Optuna: trials are runs, in processes or as members of populations."""
