"""Everything that is refused: one ordered list, and the tests of its rules."""
