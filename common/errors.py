"""What is said to a person when a request can't be met?"""


class Refused(Exception):
    """A request that can't be met. Its text is one line: the value, the limit and the way out."""
