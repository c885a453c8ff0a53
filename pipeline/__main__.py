"""`python -m pipeline archive …`, where the `keylane` command is not on PATH."""

from pipeline.commands import main

if __name__ == "__main__":
    main()
