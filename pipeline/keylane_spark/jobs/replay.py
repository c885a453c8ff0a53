"""`spark-submit jobs/replay.py /data/archive orders-again --rate 5000`: the same as `keylane pipeline replay`."""

from keylane_spark.commandline.main import main

if __name__ == "__main__":
    main("replay")
