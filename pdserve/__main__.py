"""`pdserve`, and `python -m pdserve`: how the supervisor starts the processes of a cluster."""

import signal
import sys


def run() -> int:
    """Run one command; the exit code, also for Ctrl-C while its modules are loaded."""
    try:
        from pdserve.commands.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(run())
