"""gpurl against other trainers on the same environments and hyper-parameters:
`python -m benchmarks.peers`. One trainer a file.
"""
