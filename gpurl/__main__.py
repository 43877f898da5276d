"""`python -m gpurl` is the command `gpurl`."""

import sys

from gpurl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
