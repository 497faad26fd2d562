"""What ends an analysis."""


class AnalysisError(Exception):
    """An analysis can not go on; the message is one line for the user."""
