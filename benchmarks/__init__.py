"""Scripts that measure gpurl, run from the root of the source tree:
`python -m benchmarks.throughput`; README.md says how they measure.
"""
