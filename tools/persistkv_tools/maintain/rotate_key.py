"""``persistkv rotate-key``: replace the key of a store."""

from __future__ import annotations

from argparse import ArgumentParser
from contextlib import closing

from persistkv.config import StoreUrl, convert_options
from persistkv.errors import ConfigurationError
from persistkv.storage import open_backend
from persistkv.storage.format.keys import StoreKey
from persistkv.storage.key_options import KEY_OPTIONS, KeyOptions
from persistkv_tools import render
from persistkv_tools.command import URL, Command
from persistkv_tools.options import opened

_OPTIONS = (
    ("--new-key-file", "PATH", "File with the new key."),
    ("--new-key-env", "NAME", "Environment variable with the new key."),
    ("--new-key-command", "COMMAND", "Command that prints the new key."),
)


def rotate_key(
    url: str,
    *,
    new_key_file: str | None,
    new_key_env: str | None,
    new_key_command: str | None,
    json: bool,
) -> None:
    """Replace the key of a store: the URL names the present one. No content is written again, and
    engines may use the store meanwhile; they need the new key when they start again.

    The content stays readable with the old key and an old copy of the wrapped data keys.

    Example: persistkv rotate-key "lmdb:///var/cache/kv?key_file=old" --new-key-file new
    """
    values = {
        "key_file": new_key_file,
        "key_env": new_key_env,
        "key_command": new_key_command,
    }
    new_key = _new_key(values)
    old_options = convert_options(KeyOptions, _key_options(url), where="url")
    old_key = old_options.store_key()
    # Open the store for reading first, which raises an error if it is absent. Opening it for
    # writing would create it.
    with opened(url):
        pass
    with closing(open_backend(url)) as backend:
        backend.rotate_key(new_key)
    old_id = "" if old_key is None else old_key.id
    if json:
        render.print_json(
            {
                "url": url,
                "before": old_id,
                "after": new_key.id,
            }
        )
    else:
        render.say(f"the key {new_key.id} has replaced {old_id}")


def _new_key(values: dict[str, str | None]) -> StoreKey:
    """Return the key that one of the options names."""
    given = {name: value for name, value in values.items() if value is not None}
    key = convert_options(KeyOptions, given, where="new").store_key()
    if key is None:
        raise ConfigurationError("new key", "none", "--new-key-file or another option")
    return key


def _key_options(url: str) -> dict[str, str]:
    """Return the options of a URL that name the key of the store."""
    options = StoreUrl.parse(url).options
    return {name: options[name] for name in KEY_OPTIONS if name in options}


def _add_options(parser: ArgumentParser) -> None:
    for flag, value, text in _OPTIONS:
        parser.add_argument(flag, metavar=value, help=text)


COMMAND = Command(rotate_key, (URL,), _add_options)
