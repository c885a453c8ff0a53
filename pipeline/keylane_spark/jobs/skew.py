"""For spark-submit: what `keylane pipeline skew` does."""

from keylane_spark.commandline.main import main

if __name__ == "__main__":
    main("skew")
