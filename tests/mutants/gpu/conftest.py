"""The marker of tests that run only where there is a CUDA GPU: `pytest -m gpu`."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
