"""`spark-submit jobs/skew.py orders --archive /data/archive --out skew`: the same as `keylane pipeline skew`."""

from keylane_spark.commandline.main import main

if __name__ == "__main__":
    main("skew")
