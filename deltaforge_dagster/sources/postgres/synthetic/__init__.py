"""Replication streams made without a server: to compile the kernels, to measure them, to test them."""
