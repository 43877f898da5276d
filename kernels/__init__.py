"""Kernels: each file holds a formula with its source, `x` (dispatch), `x_reference` (torch) and
`x_triton`.
"""

if __name__ != "gpurl.kernels":
    raise ImportError(
        "import gpurl.kernels, not kernels: under two names every module would exist twice"
    )
