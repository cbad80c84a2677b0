"""The package index that pip is configured to use: which files a release has, and reading them, whole or in ranges.

pip itself is asked for its settings (``pip config list``: files and environment), so that mirrors, extra indexes, local folders,
certificates and proxies hold here too. Listing follows the simple repository API (PEP 503 and PEP 691). Nothing here runs code
from a package. Addresses are shown without user names and passwords.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import html.parser
import http.client
import json
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from packaging.utils import BuildTag, InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from ..errors import DownloadError

__all__ = ["Candidate", "Connection", "IndexSettings", "choose_wheel", "list_wheels", "pip_settings", "shown"]

DEFAULT_INDEX = "https://pypi.org/simple"
MAX_INDEX_BYTES = 32 << 20
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """pip's settings as far as they say where files come from."""

    indexes: tuple[str, ...] = (DEFAULT_INDEX,)
    find_links: tuple[str, ...] = ()
    cert: str | None = None
    proxy: str | None = None
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A wheel that an index offers. ``sha256`` and ``size`` as the index says, None where it does not."""

    filename: str
    url: str
    version: Version
    build: BuildTag
    platforms: tuple[str, ...]
    sha256: str | None
    size: int | None
    yanked: bool


def shown(url: str) -> str:
    """The address without credentials and query."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    if parts.port:
        host += f":{parts.port}"
    return urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))


def pip_settings(environ: Mapping[str, str] | None = None, listing: str | None = None) -> IndexSettings:
    """What pip would use. ``listing``: the text of ``pip config list``; None asks pip (without pip, the environment decides)."""
    environ = os.environ if environ is None else environ
    if listing is None:
        listing = _ask_pip()
    ranked: list[tuple[int, str, str]] = []
    for line in listing.splitlines():
        match = re.fullmatch(r"(global|download|install|:env:)\.([a-z-]+)=(.*)", line.strip())
        if match is None:
            continue
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(match[3])
            if isinstance(value, str):
                ranked.append(({"global": 0, "install": 1, "download": 2, ":env:": 3}[match[1]], match[2], value))
    values = {key: value for _, key, value in sorted(ranked, key=lambda item: item[0])}
    for key in ("index-url", "extra-index-url", "find-links", "no-index", "cert", "proxy", "timeout"):
        given = environ.get("PIP_" + key.upper().replace("-", "_"))
        if given:
            values[key] = given
    indexes = [values.get("index-url", DEFAULT_INDEX), *values.get("extra-index-url", "").split()]
    if values.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        indexes = []
    timeout = 30.0
    with contextlib.suppress(ValueError):
        timeout = min(max(float(values.get("timeout") or values.get("default-timeout") or 30.0), 1.0), 120.0)
    return IndexSettings(
        indexes=tuple(dict.fromkeys(index.rstrip("/") for index in indexes if index)),
        find_links=tuple(values.get("find-links", "").split()),
        cert=values.get("cert") or None,
        proxy=values.get("proxy") or None,
        timeout_s=timeout,
    )


def _ask_pip() -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


class Connection:
    """HTTP(S) with pip's certificate and proxy. Every failure is a DownloadError that names the address."""

    def __init__(self, settings: IndexSettings) -> None:
        self._timeout = settings.timeout_s
        try:
            context = ssl.create_default_context(cafile=settings.cert)
        except (OSError, ssl.SSLError) as error:
            raise DownloadError(f"pip's certificate file {settings.cert} cannot be used: {error}") from None
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
        if settings.proxy:
            handlers.append(urllib.request.ProxyHandler({"http": settings.proxy, "https": settings.proxy}))
        self._opener = urllib.request.build_opener(*handlers)

    @contextlib.contextmanager
    def open(self, url: str, headers: Mapping[str, str] | None = None) -> Iterator[http.client.HTTPResponse]:
        """The response, whose ``read`` may also raise DownloadError through ``reading``."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise DownloadError(f"{shown(url)}: not an address that can be read here ({parts.scheme or 'no scheme'})")
        bare = urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))
        request = urllib.request.Request(
            bare, headers={"User-Agent": "dsv4-repro", "Accept-Encoding": "identity", **(headers or {})}
        )
        if parts.username:
            pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            request.add_unredirected_header("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())
        with reading(url):
            response = self._opener.open(request, timeout=self._timeout)
        with response:
            yield response


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Turns what can go wrong while a response is opened or read into a DownloadError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        raise DownloadError(f"{shown(url)}: HTTP {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise DownloadError(f"{shown(url)}: {str(reason) or type(error).__name__}") from None


def list_wheels(package: str, settings: IndexSettings, connection: Connection | None = None) -> tuple[Candidate, ...]:
    """Every wheel of a package on all configured indexes and in all local folders.

    DownloadError only if no source could be read at all; a source that has no such package is no error.
    """
    package = canonicalize_name(package)
    found: list[Candidate] = []
    failures: list[str] = []
    readable = 0
    for index in settings.indexes:
        url = f"{index}/{package}/"
        try:
            found.extend(
                _from_folder_index(url) if url.startswith("file:") else _from_http(url, connection or Connection(settings))
            )
            readable += 1
        except DownloadError as error:
            if "HTTP 404" in str(error):
                readable += 1
            else:
                failures.append(str(error))
    for link in settings.find_links:
        folder = _local_path(link)
        if folder is None or not folder.is_dir():
            continue
        readable += 1
        for file in sorted(folder.glob(f"{package.replace('-', '_')}-*.whl")):
            candidate = _candidate(file.name, file.resolve().as_uri(), None, file.stat().st_size, False)
            if candidate is not None:
                found.append(candidate)
    remote = [index for index in settings.indexes if not index.startswith("file:")]
    if not found and (failures or not readable):
        raise DownloadError("; ".join(failures) or "pip is configured with no index and no folder")
    if failures and len(failures) == len(remote) and not found:
        raise DownloadError("; ".join(failures))
    return tuple(found)


def _local_path(link: str) -> Path | None:
    if link.startswith("file:"):
        return Path(urllib.request.url2pathname(urllib.parse.urlsplit(link).path))
    return None if "://" in link else Path(link).expanduser()


def _from_folder_index(url: str) -> list[Candidate]:
    folder = _local_path(url)
    if folder is None or not folder.is_dir():
        return []
    page = folder / "index.html"
    try:
        with page.open("rb") as stream:
            text = stream.read(MAX_INDEX_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    return _from_html(text, url)


def _from_http(url: str, connection: Connection) -> list[Candidate]:
    with connection.open(url, {"Accept": _ACCEPT}) as response:
        with reading(url):
            raw = response.read(MAX_INDEX_BYTES + 1)
        kind = response.headers.get_content_type()
        final = response.geturl()
    if len(raw) > MAX_INDEX_BYTES:
        raise DownloadError(f"{shown(url)}: an index page of more than {MAX_INDEX_BYTES >> 20} MiB")
    if kind == "application/vnd.pypi.simple.v1+json":
        try:
            return _from_json(json.loads(raw), final)
        except (ValueError, RecursionError, AttributeError, TypeError):
            raise DownloadError(f"{shown(url)}: not the JSON of a simple index") from None
    return _from_html(raw.decode("utf-8", "replace"), final)


def _from_json(document: Any, base: str) -> list[Candidate]:
    found = []
    for file in document["files"] if isinstance(document, dict) and isinstance(document.get("files"), list) else ():
        hashes = file.get("hashes") or {}
        size = file.get("size")
        candidate = _candidate(
            str(file.get("filename", "")),
            urllib.parse.urljoin(base, str(file.get("url", ""))),
            hashes.get("sha256") if isinstance(hashes, dict) else None,
            size if isinstance(size, int) and size >= 0 else None,
            bool(file.get("yanked")),
        )
        if candidate is not None:
            found.append(candidate)
    return found


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a" and values.get("href"):
            self.links.append((str(values["href"]), "data-yanked" in values))


def _from_html(text: str, base: str) -> list[Candidate]:
    parser = _Links()
    parser.feed(text)
    found = []
    for link, yanked in parser.links:
        whole, _, fragment = urllib.parse.urljoin(base, link).partition("#")
        match = re.search(r"(?:^|&)sha256=([0-9a-f]{64})", fragment)
        name = urllib.parse.unquote(urllib.parse.urlsplit(whole).path.rpartition("/")[2])
        candidate = _candidate(name, whole, match[1] if match else None, None, yanked)
        if candidate is not None:
            found.append(candidate)
    return found


def _candidate(filename: str, url: str, sha256: str | None, size: int | None, yanked: bool) -> Candidate | None:
    try:
        _, version, build, tags = parse_wheel_filename(filename)
    except (InvalidWheelFilename, ValueError):
        return None
    if sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", str(sha256)):
        sha256 = None
    return Candidate(filename, url, version, build, tuple(sorted({tag.platform for tag in tags})), sha256, size, yanked)


def choose_wheel(candidates: tuple[Candidate, ...], version: Version, machine: str) -> Candidate | None:
    """The wheel of that release for that machine (``x86_64``, ``aarch64``), of the highest build number; None if there is none."""
    fitting = [
        candidate
        for candidate in candidates
        if candidate.version == version
        and any(name.startswith("manylinux") and name.endswith(machine) for name in candidate.platforms)
    ]
    return max(fitting, key=lambda candidate: (candidate.build, not candidate.yanked), default=None)


def copy_limited(source: http.client.HTTPResponse | IO[bytes], url: str, limit: int) -> Iterator[bytes]:
    """The body in pieces; DownloadError past ``limit`` bytes."""
    done = 0
    while True:
        with reading(url):
            piece = source.read(1 << 20)
        if not piece:
            return
        done += len(piece)
        if done > limit:
            raise DownloadError(f"{shown(url)}: more than the {limit} bytes that were announced")
        yield piece
