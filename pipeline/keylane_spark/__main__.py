"""`python -m keylane_spark archive …`, where the `keylane` command is not on PATH."""

from keylane_spark.commandline.main import main

if __name__ == "__main__":
    main()
