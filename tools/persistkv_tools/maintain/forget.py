"""``persistkv forget``: destroy the content and the data keys of a tenant."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from persistkv.errors import (
    ConfigurationError,
    FileError,
    MissingOptionError,
    printable,
)
from persistkv.storage.forgetting import Receipt
from persistkv.storage.inspection.handle import open_store
from persistkv.tenants import check_tenant
from persistkv_tools import render
from persistkv_tools.command import (
    URL,
    Command,
    Positional,
    add_shared,
    confirm,
    ensure_consent,
)

_TENANT = Positional("tenant", "TENANT", "Name of the tenant.", is_needed=False)
_RECEIPT = "--receipt"
_VERIFY = "--verify-receipt"


def forget(
    url: str,
    *,
    tenant: str | None,
    receipt: str | None,
    verify_receipt: str | None,
    yes: bool,
    json: bool,
) -> None:
    """Destroy the packs, the requests and the data keys of a tenant. Engines may use the store
    meanwhile; they drop blocks of the tenant that they have accepted and not stored yet.

    If the store has a key, copies of the content can be read only with an old copy of the wrapped
    data keys. Prints a receipt, signed if the store has a key, which lists the copies that the
    command cannot delete. Can be repeated. Exit code 1: the receipt of --verify-receipt is not
    genuine.

    Example: persistkv forget "lmdb:///var/cache/kv?key_file=key" anna --receipt anna.json
    """
    if verify_receipt is not None:
        _verify(url, Path(verify_receipt), json=json)
        return
    if tenant is None:
        raise MissingOptionError("forget", f"TENANT, or {_VERIFY}")
    check_tenant("tenant", tenant)
    ensure_consent("forget", "--yes", yes=yes, json=json)
    # refuse an existing file before anything is destroyed
    receipt_path = None if receipt is None else _new_file(receipt)
    with open_store(url, read_only=False) as store:
        question = f"Destroy all content and keys of {printable(tenant)}?"
        if not yes and not confirm(question):
            return
        done = store.forget(tenant)
    if receipt_path is not None:
        _write(receipt_path, done)
    if json:
        render.print_json(done)
    else:
        _print(done, receipt_path)


def _new_file(path: str) -> Path:
    """Return the path of the receipt to write; raise ConfigurationError if the file exists."""
    target = Path(path)
    # an existing file may be an older receipt, which must not be lost
    if target.exists():
        raise ConfigurationError(_RECEIPT, path, "a file that does not exist")
    return target


def _write(target: Path, receipt: Receipt) -> None:
    try:
        target.write_bytes(receipt.encode() + b"\n")
    except OSError as error:
        raise FileError("write", target, error) from None


def _print(receipt: Receipt, path: Path | None) -> None:
    """Print the deleted content, and the copies that are out of reach of the store.

    :param path: file that the receipt was written to; None: it was not written.
    """
    requests = render.count(receipt.requests, "request")
    packs = render.count(receipt.packs, "pack")
    size = render.format_size(receipt.stored_bytes)
    render.say(f"deleted: {requests}, {packs}, {size}")
    keys = render.count(len(receipt.key_ids), "data key")
    render.say(f"destroyed: {keys}")
    if not receipt.signature:
        render.say("the store has no key: the receipt is not signed")
    if path is not None:
        render.say(f"receipt: {path}")
    render.say("out of reach:")
    for text in receipt.out_of_reach:
        render.say(f"- {text}")


def _verify(
    url: str,
    path: Path,
    *,
    json: bool,
) -> None:
    """Print whether the store has signed the receipt in a file; exit code 1: it has not."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError("read", path, error) from None
    with open_store(url) as store:
        is_genuine = store.is_genuine(data)
    if json:
        render.print_json({"url": url, "genuine": is_genuine})
    else:
        verdict = "is genuine" if is_genuine else "was not signed by this store"
        render.say(f"{path} {verdict}")
    if not is_genuine:
        raise SystemExit(1)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        _RECEIPT, metavar="PATH", help="Also write the receipt to this new file."
    )
    parser.add_argument(
        _VERIFY,
        metavar="PATH",
        help="Only check whether this store has signed the receipt in this file.",
    )
    add_shared(parser, "--yes")


COMMAND = Command(forget, (URL, _TENANT), _add_options)
