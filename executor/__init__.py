"""Honour a plan exactly or refuse it, run it, and record what was measured."""
