"""What the command ``executor.gate`` checks, and the small plans that it checks with."""


class Lost(Exception):
    """A run ended without all ranks knowing it: one is gone, or was stopped. The message says how it ended."""
