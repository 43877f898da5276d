"""Networks, distributions, normalisers and the optimiser."""
