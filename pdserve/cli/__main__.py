"""`python -m pdserve.cli`: how the supervisor starts the processes of a cluster."""

import sys

from pdserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
