"""Architectures that deviate from most."""
