"""What the command ``executor.gate`` checks, and the small plans that it checks with."""


class Lost(Exception):
    """A run was stopped, or a rank of it is gone. The message says how it ended."""
