"""Adapters to trainers, one module each; each needs its trainer installed and is imported by its full name."""
