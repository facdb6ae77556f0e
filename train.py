"""`python train.py ...` is `lede train ...`."""

import sys

from lede.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
