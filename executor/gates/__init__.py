"""What the command ``executor.gate`` checks, and the small plans that it checks with."""
