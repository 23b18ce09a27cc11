"""`python -m unilab_fabric`."""

import sys

from unilab_fabric.cli import main

if __name__ == "__main__":
    sys.exit(main())
