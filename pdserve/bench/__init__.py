"""Measurements of a running cluster from outside: load, and what metrics and clients saw of it.

Needs no torch: it knows servers by their URLs.
"""
