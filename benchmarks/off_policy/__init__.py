"""Off-policy training against other libraries: replay buffers, SAC's update, REDQ's critics:
`python -m benchmarks.off_policy`.
"""
