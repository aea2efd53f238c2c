"""What `quire serve` takes besides the engine's configuration: names, keys, TLS and logs.

The command line derives its flags from it before anything is loaded, so it imports neither FastAPI nor torch.
"""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quire.server.chat_output.formats import REASONING_FORMAT_NAMES, TOOL_FORMAT_NAMES

# Names of adapters, which stand in URLs, in labels of metrics and in log lines as they are.
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
# Each process looks at all others when it accepts a connection or a request.
_MAX_PROCESSES = 64
# The device by which programs reach NVIDIA's driver.
_DRIVER = Path("/dev/nvidiactl")


def option(default: Any, help: str, **flag: Any) -> Any:
    """A field with the help of its flag, and the arguments of `add_argument` that its default does not imply."""
    return field(default=default, metadata={"help": help, **flag})


def _several(metavar: str, help: str) -> Any:
    return option((), f"{help} (may be given again)", action="append", metavar=metavar)


def check_adapter_name(name: str) -> None:
    """Raise a ValueError for a name that an adapter of a server must not have."""
    if not _ADAPTER_NAME.fullmatch(name):
        shown = name if len(name) <= 128 else f"{name[:40]}..."
        what = "a name of 1 to 128 letters, digits and . _ : / @ + -, with a letter or a digit first, is expected"
        raise ValueError(f"adapter {shown!r}: {what}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Where and as what a server is reached.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        api_processes: the number of processes that speak HTTP for the one engine; None: as `processes` says.
        served_model_name: names of the model, of which answers have the first; by default that of the hub, or of the
            folder.
        api_key: keys of which requests must have one.
        api_key_file: a file of further keys, one per line; lines that are empty or begin with # are skipped.
        chat_template: a file with a Jinja template, or its text, which has a brace: chats are rendered by it instead of
            the checkpoint's; None: by the checkpoint's.
        tool_format: how the model writes calls of tools, one of TOOL_FORMAT_NAMES; None: as its chat template says.
        reasoning_format: how it writes reasoning, one of REASONING_FORMAT_NAMES, where "none" leaves reasoning in the
            content; None: as its chat template says.
        adapter: adapters that are loaded with the model, each as NAME=FOLDER.
        adapter_root: a folder; requests may load adapters that are in it. None: they may not.
        allowed_origin: of web pages whose scripts may use the server (CORS); "*" for all.
        metrics_prefix: of the metrics' names.
        log_level: of uvicorn: "info" logs each request as text.
        access_log: how each request is logged: "text" or "json"; None: as `log_level` says.
        ssl_certfile: a file with the certificate chain, in PEM, with which the server speaks TLS.
        ssl_keyfile: a file with the private key of the certificate; by default it is in `ssl_certfile`.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: a file is not what it should be; the message has the field's name.
    """

    host: str = option("127.0.0.1", "where to listen; 0.0.0.0: on all interfaces")
    port: int = option(8000, "0: a free one")
    api_processes: int | None = option(
        None, "that speak HTTP, for the one engine; default: 2 with a GPU, else 1", type=int, metavar="N"
    )
    served_model_name: tuple[str, ...] = _several("NAME", "default: that of the hub, or the folder's")
    api_key: tuple[str, ...] = _several("KEY", "that requests must have; default: QUIRE_API_KEY, if it is set")
    api_key_file: Path | None = option(None, "further keys, one per line", type=Path, metavar="FILE")
    chat_template: str | None = option(None, "Jinja, instead of the checkpoint's", type=str, metavar="FILE|TEXT")
    tool_format: str | None = option(
        None, "of the model's calls; default: by its chat template", type=str, choices=TOOL_FORMAT_NAMES
    )
    reasoning_format: str | None = option(
        None, "of its reasoning; default: by its chat template", type=str, choices=REASONING_FORMAT_NAMES
    )
    adapter: tuple[str, ...] = _several("NAME=FOLDER", "an adapter (LoRA), which requests name as their model")
    adapter_root: Path | None = option(None, "requests may load adapters within it", type=Path, metavar="FOLDER")
    allowed_origin: tuple[str, ...] = _several("URL", "of web pages that may use it")
    metrics_prefix: str = option("quire", 'of the names in /metrics; "vllm" for dashboards of vLLM')
    log_level: Literal["error", "warning", "info"] = option(
        "warning", "info: each request", choices=("error", "warning", "info")
    )
    access_log: Literal["text", "json"] | None = option(
        None, "each request, in lines of this form", type=str, choices=("text", "json")
    )
    ssl_certfile: Path | None = option(None, "certificates in PEM: serve https", type=Path, metavar="FILE")
    ssl_keyfile: Path | None = option(None, "their private key, if it is not there", type=Path, metavar="FILE")

    def __post_init__(self) -> None:
        if self.api_processes is not None and not 1 <= self.api_processes <= _MAX_PROCESSES:
            raise ValueError(f"api_processes = {self.api_processes!r}: it must be from 1 to {_MAX_PROCESSES}")
        self.adapters()
        if self.adapter_root is not None and not self.adapter_root.is_dir():
            raise ValueError(f"adapter_root = {str(self.adapter_root)!r}: there is no such folder")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError(f"ssl_keyfile = {str(self.ssl_keyfile)!r}: it needs ssl_certfile, the certificate's file")
        if self.ssl_certfile is not None:
            # A wrong file is an error before the model is loaded.
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            except ssl.SSLError as error:
                files = f"ssl_certfile = {str(self.ssl_certfile)!r}, ssl_keyfile = {str(self.ssl_keyfile or '')!r}"
                raise ValueError(f"{files}: they are not a certificate and its key in PEM ({error})") from None
            except OSError as error:
                raise _unreadable("ssl_certfile or ssl_keyfile", error.filename, error) from None

    def processes(self, device: str) -> int:
        """The number of processes that speak HTTP for an engine on a device: `api_processes`, or else two on a GPU,
        since one does not keep up with a small model there, and one on the CPU.

        torch, which knows whether there is a GPU, is not imported by a process that speaks HTTP. So "auto" is taken for
        one if there is an NVIDIA driver that CUDA_VISIBLE_DEVICES does not hide.
        """
        if self.api_processes is not None:
            return self.api_processes
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        on_gpu = _DRIVER.exists() and not hidden if device == "auto" else device.startswith("cuda")
        return 2 if on_gpu else 1

    def adapters(self) -> dict[str, str]:
        """The folders of `adapter`, by their names."""
        folders: dict[str, str] = {}
        for each in self.adapter:
            name, separator, folder = each.partition("=")
            if not separator or not folder:
                raise ValueError(f"adapter = {each!r}: it must be NAME=FOLDER")
            check_adapter_name(name)
            if name in folders:
                raise ValueError(f"adapter = {each!r}: {folders[name]} has this name, too")
            folders[name] = folder
        return folders

    def keys(self) -> list[str]:
        """The keys of `api_key` and of `api_key_file`; empty if neither is given.

        Raises:
            OSError: the file cannot be read.
            ValueError: it has no keys, or is not text in UTF-8.
        """
        keys = list(self.api_key)
        if self.api_key_file is not None:
            try:
                lines = [line.strip() for line in self.api_key_file.read_text(encoding="utf-8-sig").split("\n")]
            except OSError as error:
                raise _unreadable("api_key_file", self.api_key_file, error) from None
            except UnicodeDecodeError as error:
                what = f"it is not text in UTF-8 ({error})"
                raise ValueError(f"api_key_file = {str(self.api_key_file)!r}: {what}") from None
            listed = [line for line in lines if line and not line.startswith("#")]
            if not listed:
                raise ValueError(f"api_key_file = {str(self.api_key_file)!r}: it has no keys, which belong into lines")
            keys += listed
        return keys

    def template(self) -> str | None:
        """The text of `chat_template`; None if it is not given.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not text in UTF-8.
        """
        if self.chat_template is None or "{" in self.chat_template:
            return self.chat_template
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise _unreadable("chat_template", self.chat_template, error) from None
        except UnicodeDecodeError as error:
            raise ValueError(f"chat_template = {self.chat_template!r}: it is not text in UTF-8 ({error})") from None


def _unreadable(name: str, file: Any, error: OSError) -> OSError:
    where = "" if file is None else f" = {str(file)!r}"
    return type(error)(f"{name}{where}: it can't be read: {error.strerror or error}")
