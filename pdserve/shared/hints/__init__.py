"""What was meant, where something was asked for that is not there: one place for all commands.

Words, flags and paths that other servers have, and how an extra of pdserve is installed.
"""
