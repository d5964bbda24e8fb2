"""The driver of ``file://`` URLs: a shared store in a directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from persistkv.config import StoreUrl, convert_options
from persistkv.errors import ConfigurationError
from persistkv.storage.blobs import Blobs
from persistkv.storage.shared import SharedBackend
from persistkv.storage.shared.options import SHARED_NAMES
from persistkv_dir.blobs import DirBlobs


class DirOptions(msgspec.Struct, frozen=True):
    """Options of a directory, in addition to those of every shared store: none."""


class DirBackend(SharedBackend):
    """Shared store in a directory that several machines mount, such as
    ``file:///mnt/shared/kv``."""

    @classmethod
    def open_blobs(
        cls,
        url: StoreUrl,
        options: Mapping[str, str],
        *,
        read_only: bool,
    ) -> Blobs:
        cls.check_options(url, options)
        return DirBlobs(Path(url.location), read_only=read_only)

    @classmethod
    def check_options(
        cls,
        url: StoreUrl,
        options: Mapping[str, str],
    ) -> None:
        # the error about an unknown option also lists the options that all shared stores have
        convert_options(DirOptions, options, where="file", others=SHARED_NAMES)
        if not Path(url.location).is_absolute():
            raise ConfigurationError(
                "url", f"file://{url.location}", "an absolute path: file:///mnt/kv"
            )
