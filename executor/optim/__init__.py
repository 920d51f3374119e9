"""Routing of parameters to optimizers, and the optimizers."""
