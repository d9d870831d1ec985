"""Headrace: fine-tune, evaluate and serve unmodified PyTorch models through JAX/XLA."""
