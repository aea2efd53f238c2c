"""Tiny checkpoints in float32, which tests read and do not write."""

from __future__ import annotations

from pathlib import Path

import pytest

_SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}


def _saved(name: str, folder: Path, **shape: int) -> Path:
    # The helper imports Transformers, which not every environment of the tests has.
    from helpers.checkpoints import save

    return save(name, folder, **_SHAPE | shape)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return _saved("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory):
    return _saved("mixtral", tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory):
    return _saved("gpt-oss", tmp_path_factory.mktemp("gpt-oss"), num_hidden_layers=4)
