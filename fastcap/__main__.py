"""``python -m fastcap``: the same as the command ``fastcap``."""

import sys

from fastcap.cli import main

if __name__ == "__main__":
    sys.exit(main())
