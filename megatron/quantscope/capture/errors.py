"""The errors of capture: each carries one line that says what is wrong, with the value, and what is allowed."""


class CaptureError(Exception):
    """A capture can not be written or read; the message is one line for the user."""


class CaptureUsageError(CaptureError, ValueError):
    """A value that the user gave is not allowed; programs answer it with exit code 2."""
