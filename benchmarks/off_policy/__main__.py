"""`python -m benchmarks.off_policy`."""

import sys

from benchmarks.off_policy.compare import main

sys.exit(main())
