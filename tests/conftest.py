"""What holds for every test."""

from __future__ import annotations

from collections.abc import Generator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(autouse=True)
def no_compilation_cache_left_behind() -> Generator[None]:
    """A command run inside a test sets JAX's persistent cache for the whole process. Tests after it
    must not read from a folder of the user's, and TPU programs cannot be read back without a TPU.
    """
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    yield
    if jax.config.jax_compilation_cache_dir != before:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
