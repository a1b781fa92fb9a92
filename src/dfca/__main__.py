"""Let `python -m dfca` and `torchrun -m dfca` do what `dfca` does."""

from dfca.cli import main

if __name__ == "__main__":
    main()
