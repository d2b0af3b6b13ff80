"""A cluster of processes, here or by Ray: planned, started, watched, asked and stopped.

`pdserve up` and `pdserve demo` run one; benchmarks and tests start theirs with the same parts.
"""
