"""``python -m surogate``: the command line."""

import sys

from surogate.cli import main

sys.exit(main())
