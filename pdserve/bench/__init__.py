"""Benchmarks of a running cluster from outside: load, and what metrics and clients saw.

Does not need torch: servers are known by their URLs.
"""
