"""How an iteration is run: step by step, in CUDA graphs, by one kernel or by C."""
