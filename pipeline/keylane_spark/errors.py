"""Errors of the pipeline's own, beside those of the broker in keylane.errors."""


class DataLoss(RuntimeError):
    """Messages that a query was to read are gone."""


class JobError(Exception):
    """A job found something wrong; its command exits with `status`."""

    code = "failed"
    retriable = False
    status = 1
