"""``python -m lightning_fastdata`` is the command ``fastdata``."""

from lightning_fastdata.cli import main

if __name__ == "__main__":
    main()
