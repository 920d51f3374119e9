"""Probe a machine, decide, estimate, and write a sealed plan. Imports no torch."""
