"""Download official files with pooch, and check them.

Where no checksum is published, the first download is trusted and its SHA-256 recorded; later ones must match it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dfca.base.errors import ChecksumError, DataError
from dfca.base.files import sha256
from dfca.data.files.cache import recorded, writing_to
from dfca.data.registry import RemoteFile

TIMEOUT_S = 30
CHUNK_BYTES = 1 << 20
REMEDY = "try again, or get the file elsewhere and run `dfca data import FILE`"


def download(file: RemoteFile, folder: Path, trusted: Path, progress: bool) -> str:
    """Download one file into `folder` from the first mirror that has the right bytes; return its SHA-256.

    `trusted` records an earlier download, for files without a published checksum. Raises DataError, ChecksumError.
    """
    expected = file.sha256 or recorded(trusted)
    failures: list[DataError] = []
    for url in file.urls:
        try:
            digest = _retrieve(url, folder / file.name, progress)
            if expected in (None, digest):
                return digest
            doubt = "" if file.sha256 else f" (recorded in {trusted}; delete it to trust this one)"
            raise ChecksumError(
                f"{url} has SHA-256 {digest[:12]}... instead of {str(expected)[:12]}...{doubt}; {REMEDY}"
            )
        except _NextMirror as error:
            failures.append(DataError(f"download of {url} failed ({error}); {REMEDY}"))
        except ChecksumError as error:
            failures.append(error)
    raise next((error for error in failures if isinstance(error, ChecksumError)), failures[0])


class _NextMirror(Exception):
    """The download from this address failed."""


def _retrieve(url: str, path: Path, progress: bool) -> str:
    import pooch  # late, as in `cache`: only a download needs it
    from requests import RequestException

    path.unlink(missing_ok=True)
    downloader = pooch.HTTPDownloader(progressbar=progress, chunk_size=CHUNK_BYTES, timeout=TIMEOUT_S)
    with writing_to(path.parent), _quiet():
        try:
            pooch.retrieve(url, None, fname=path.name, path=path.parent, downloader=downloader)
        except RequestException as error:  # an OSError too, hence inside `writing_to`
            response = getattr(error, "response", None)
            reason = type(error).__name__ if response is None else f"HTTP {response.status_code}"
            raise _NextMirror(reason) from error
        return sha256(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep pooch from logging its own hints about hashes."""
    import pooch  # late, as in `cache`

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)
