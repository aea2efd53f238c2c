from __future__ import annotations

import pytest

from quire.definition import versions


def test_untested_versions_outside_of_the_range_names_package_and_range():
    assert versions.untested({"torch": "2.11.0+cu130", "triton": "3.6.0"}) == []
    assert versions.untested({"torch": "2.13.1+cpu"}) == []
    found = versions.untested({"torch": "2.14.0.dev20270101", "triton": "3.5.1"})
    assert found == ["torch 2.14.0.dev20270101 (tested: 2.11 to 2.13)", "triton 3.5.1 (tested: 3.6 to 3.7)"]


def test_warn_of_untested_other_versions_warns_once_of_all(monkeypatch):
    monkeypatch.setattr(versions, "installed_versions", lambda: {"torch": "3.0", "triton": "4.0"})
    with pytest.warns(UserWarning, match=r"torch 3.0 .* triton 4.0") as caught:
        versions.warn_of_untested()
    assert len(caught) == 1


def test_warn_of_untested_tested_versions_is_silent(recwarn):
    versions.warn_of_untested()
    assert not recwarn.list
