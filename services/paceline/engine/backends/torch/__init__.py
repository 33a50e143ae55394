"""Torch operations, for CUDA and to check the compiled loops."""
