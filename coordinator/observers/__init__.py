"""What is told of each call or request when it has ended.

`endings` says how a call ended, whether it met its promise, and how those of the last minute did,
and counts them. `costs` says what their tokens have cost, and `recording` writes traces.
"""
