"""Kernels: each a requirement with conditions and counted alternatives."""
