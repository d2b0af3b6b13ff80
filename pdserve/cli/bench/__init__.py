"""`pdserve bench`: one module per benchmark, with what they start, print and read as config.

What is measured, and how, is in `pdserve.bench`.
"""
