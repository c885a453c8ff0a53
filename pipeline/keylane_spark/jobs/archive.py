"""`spark-submit jobs/archive.py orders --to /data/archive`: the same as `keylane pipeline archive`."""

from keylane_spark.commandline.main import main

if __name__ == "__main__":
    main("archive")
