"""A cluster of child processes on this machine: planned, started, watched, asked and stopped.

`pdserve up` and `pdserve demo` run one; benchmarks and tests start theirs with the same parts.
"""
