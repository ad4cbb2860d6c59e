"""``python -m kvpool`` is the command ``kvpool``."""

import sys

from kvpool.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
