"""`spark-submit jobs/audit.py orders --out /var/audits/orders`: the same as `keylane pipeline audit`."""

from keylane_spark.commandline.main import main

if __name__ == "__main__":
    main("audit")
