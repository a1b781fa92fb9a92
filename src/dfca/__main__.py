"""Entry point of `python -m dfca` and `torchrun -m dfca`."""

from dfca.cli import main

if __name__ == "__main__":
    main()
