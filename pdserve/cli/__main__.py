"""`python -m pdserve.cli`, which is how the processes of a cluster are started."""

import sys

from pdserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
