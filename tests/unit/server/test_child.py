"""What the server's processes find in their environment."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from triton_vision.server.child import surroundings


def test_a_user_without_a_home_gets_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "HOME" not in surroundings(tmp_path)

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    assert surroundings(tmp_path)["HOME"] == str(tmp_path)
