"""The jobs as files for spark-submit; `keylane pipeline` runs the same."""
