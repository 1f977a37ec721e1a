"""``make demo``: train on real photographs without and with FastDataModule, and compare."""

import argparse

from demo.training import run_demo
from lightning_fastdata import FastDataError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--data", default="demo_data/photos", help="cut once, and used again")
    parser.add_argument("--logs", default="demo_logs", help="TensorBoard files and reports")
    parser.add_argument("--epochs", type=int, default=3, help="of each training")
    parser.add_argument("--crops", type=int, default=192, help="training crops of a photograph")
    try:
        run_demo(**vars(parser.parse_args()))
    except FastDataError as error:
        raise SystemExit(f"demo: {error}") from error
