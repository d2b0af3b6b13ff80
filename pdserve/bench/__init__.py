"""Benchmarks of a running cluster from outside: load, and what metrics and clients saw.

    compare/    goodput of the three modes on the same requests
    serve/      any servers, in turns under the same load
    gateway/    what a coordinator costs, with simulated nodes behind it
    step/       engine steps against what memory and arithmetic allow
    transfer/   KV between two processes, against memcpy

The files beside them are benchmarks of one file, and what several have in common: workloads, load,
clients and scores. Nothing here needs torch: servers are known by their URLs. `pdserve.cli.bench`
starts what is measured, and prints the results.
"""
