"""Where the files of a model are: in a folder, or in the cache of the Hugging Face hub, which downloads fill."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.distribution import pip_install

_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
# Configurations, chat templates and tokenizers.
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# Folders within a repository have other formats of the weights, and some publishers add a second copy of them. Folders
# whose names begin with a digit have the configurations of modules of sentence-transformers.
_COPIES = ("[!0-9]*/*", "*/*.safetensors", "consolidated*")


def is_hub_name(model: str | Path) -> bool:
    """Whether a model is the name of a repository of the hub, owner/name, and no path whose folder is here."""
    text = str(model)
    return _NAME.fullmatch(text) is not None and not Path(text).exists() and not Path(text).parent.exists()


def model_name(model: str | Path) -> str:
    """What a model is called: its name on the hub, or that of its folder."""
    return str(model) if is_hub_name(model) else Path(model).resolve().name


def checkpoint_folder(model: str | Path, revision: str | None = None, code: bool = False) -> Path:
    """The folder that has the files of a model. Those of a name of the hub are downloaded to its cache, but for the
    weights, which `download_weights` adds.

    Args:
        model: a folder, or a name of the hub, such as "Qwen/Qwen3-0.6B".
        revision: of a name of the hub: a branch, a tag or a commit; None: its main branch.
        code: whether to download Python code, too.

    Raises:
        ConnectionError: the hub does not answer, or answers with an error, and the model is not in the cache.
        FileNotFoundError: there is no such folder, model or revision, or the hub must not be asked (HF_HUB_OFFLINE) and
            the model is not in the cache.
        ImportError: huggingface_hub is not installed.
        OSError: the download failed otherwise.
        PermissionError: the hub does not give the model to this user.
        ValueError: a folder has a revision.
    """
    folder = Path(model)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision = {revision!r}: {folder} is a folder, and only names of the hub have revisions")
        return folder
    if folder.is_file():
        raise FileNotFoundError(f"{folder} is a file: a model is a folder with config.json and *.safetensors")
    if not is_hub_name(model):
        raise FileNotFoundError(f"there is no model folder {folder}")
    return _download(str(model), revision, (*_SMALL_FILES, "*.py") if code else _SMALL_FILES)


def download_weights(model: str | Path, folder: Path) -> None:
    """Download the weights of a name of the hub, in the revision whose other files are in `folder`, which
    `checkpoint_folder` returned. A model that is a folder has its weights.

    Raises:
        ConnectionError, FileNotFoundError, OSError, PermissionError: as for `checkpoint_folder`.
    """
    if is_hub_name(model):
        # The cache has a folder for each commit, named after it.
        _download(str(model), folder.name, ["*.safetensors"])


def _download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Download the files of these patterns that the cache does not have; return the revision's folder in the cache."""
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise ImportError(f"{name} must be downloaded, which needs {pip_install('engine')} ({error})") from error

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_COPIES),
                tqdm_class=_progress_bar(),
            )
        )
    except errors.GatedRepoError as error:
        remedy = f"accept its terms at {constants.ENDPOINT}/{name}, and set HF_TOKEN to a token of your account"
        raise PermissionError(f"{name} is gated: {remedy}") from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"revision = {revision!r}: {name} has no such branch, tag or commit") from error
    except errors.RepositoryNotFoundError as error:
        what = f"there is no model folder {name}, and {constants.ENDPOINT} has no model of that name"
        raise FileNotFoundError(f"{what} (a private one needs a token in HF_TOKEN)") from error
    except errors.LocalEntryNotFoundError as error:
        raise _not_cached(name, revision, error) from error
    except errors.HFValidationError as error:
        raise ValueError(f"{name} is neither a folder nor a name of the hub: {error}") from error
    except Exception as error:
        # The library that speaks HTTP has exceptions of its own, which differ between versions of huggingface_hub.
        raise OSError(f"{name} could not be downloaded: {_first_line(error)}") from error


def _not_cached(name: str, revision: str | None, error: Exception) -> OSError:
    """The error for a model, or a part of it, that is not in the cache and can't be downloaded."""
    from huggingface_hub import constants

    of = f" in revision {revision}" if revision is not None else ""
    missing = f"{name} is not whole{of} in the cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        return FileNotFoundError(f"{missing}, and HF_HUB_OFFLINE forbids to download it")
    reason = error.__cause__ or error
    return ConnectionError(f"{missing}, and downloading it from {constants.ENDPOINT} fails: {_first_line(reason)}")


def _first_line(error: BaseException) -> str:
    """The type and the message of an exception, without the advice that huggingface_hub adds on further lines."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _progress_bar() -> Any:
    """The class of progress bars, which are shown on a terminal alone and removed in the end."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": options.get("disable") or None, "leave": False})

    return Bar
