"""`python deploy.py ...` is `lede deploy ...`."""

import sys

from lede.cli import main

if __name__ == "__main__":
    sys.exit(main(["deploy", *sys.argv[1:]]))
