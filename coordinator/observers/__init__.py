"""What is told of each call or request when it has ended.

`call_metrics` counts calls, by `attainment` also the promises that were kept; `call_watch` knows
the last minute's. `costs` says what their tokens have cost, and `recording` writes traces.
"""
