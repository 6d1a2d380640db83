"""What is said to a person when a request can't be met, or a run can't go on as it is?"""


class Refused(Exception):
    """A request that can't be met. Its text is one line: the value, the limit and the way out."""


class Again(Exception):
    """A run that can't go on as it is, but can from its last checkpoint when it is started again. Its text is one line."""
