"""For spark-submit: what `keylane pipeline archive` does."""

from keylane_spark.commandline.main import main

if __name__ == "__main__":
    main("archive")
