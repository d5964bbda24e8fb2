from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persistkv.config import (
    GroupLayout,
    OffloadingConfig,
    Registry,
    RowLayout,
    StoreUrl,
    convert_options,
    exact_duration,
    exact_size,
    parse_duration,
    parse_size,
)
from persistkv.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        (" 4096 ", 4096),
        ("1B", 1),
        ("1KiB", 1024),
        ("512 MiB", 512 << 20),
        ("100GiB", 100 << 30),
        ("2TiB", 2 << 40),
        ("1PiB", 1 << 50),
        ("1kB".replace("k", "K"), 1000),
        ("3GB", 3_000_000_000),
        ("5G", 5 << 30),
        ("5Gi", 5 << 30),
        ("64K", 64 << 10),
        ("1.5GiB", 3 << 29),
        ("0.5KiB", 512),
        ("9007199254740993", 9007199254740993),
        (7, 7),
    ],
)
def test_parse_size_valid_value_returns_bytes(text: str, size: int) -> None:
    assert parse_size(text, name="n") == size


@pytest.mark.parametrize(
    "value",
    ["", " ", "0", "0GiB", "-1", "-5GiB", "GiB", "1 000", "1e9", "1,5GiB", "1gib", "1g", "1i", "1iB", "1XiB", "nan", "inf", "0x10",
     "٣", "0.1", 0, -1, True, False],
)  # fmt: skip
def test_parse_size_invalid_value_raises_and_names_field(value: str) -> None:
    with pytest.raises(ConfigurationError, match="capacity") as caught:
        parse_size(value, name="capacity")
    assert caught.value.field == "capacity"
    assert caught.value.value is value


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("1.5m", 90), (" 12 h ", 43_200), ("7d", 604_800), ("0.001s", 0.001)],
)
def test_parse_duration_valid_text_returns_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text, name="n") == seconds


@pytest.mark.parametrize(
    "value",
    ["", "7", "d", "0d", "-1s", "1 week", "1e3s", "٣s", "nans", "infs", "1D", "1h30m"],
)
def test_parse_duration_invalid_text_raises_and_names_field(value: str) -> None:
    with pytest.raises(ConfigurationError, match="ttl") as caught:
        parse_duration(value, name="ttl")
    assert caught.value.value == value


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (5 << 30, "5GiB"),
        (3 << 29, "1536MiB"),
        (1 << 40, "1TiB"),
        (4096, "4KiB"),
        (1000, "1000B"),
    ],
)
def test_exact_size_is_largest_unit_without_rounding(num_bytes: int, text: str) -> None:
    assert exact_size(num_bytes) == text
    assert parse_size(text, name="capacity") == num_bytes


@pytest.mark.parametrize("text", ["7d", "36h", "90m", "90s", "0.5s"])
def test_exact_duration_returns_what_was_parsed(text: str) -> None:
    assert exact_duration(parse_duration(text, name="ttl")) == text


@given(
    st.integers(1, 1 << 60), st.sampled_from(["", "B", "KiB", "MB", "GiB", "TB", "PiB"])
)
def test_parse_size_whole_number_with_unit_is_exact(count: int, unit: str) -> None:
    factor = {
        "": 1,
        "B": 1,
        "KiB": 1 << 10,
        "MB": 10**6,
        "GiB": 1 << 30,
        "TB": 10**12,
        "PiB": 1 << 50,
    }[unit]
    assert parse_size(f"{count}{unit}", name="n") == int(Decimal(count) * factor)


@given(st.text(max_size=20))
def test_parse_size_any_text_is_positive_or_raises(text: str) -> None:
    with suppress(ConfigurationError):
        assert parse_size(text, name="n") > 0


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("lmdb:///var/kv", StoreUrl("lmdb", "/var/kv")),
        ("lmdb://rel/path", StoreUrl("lmdb", "rel/path")),
        (
            "lmdb:///var/kv?capacity=100GiB",
            StoreUrl("lmdb", "/var/kv", {"capacity": "100GiB"}),
        ),
        (
            "s3://Bucket/pre/fix?a=1&b=",
            StoreUrl("s3", "Bucket/pre/fix", {"a": "1", "b": ""}),
        ),
        ("lmdb:///a%20b%23c%3Fd?x=%26", StoreUrl("lmdb", "/a b#c?d", {"x": "&"})),
        ("lmdb:///größe", StoreUrl("lmdb", "/größe")),
        ("lmdb:///a@b", StoreUrl("lmdb", "/a@b")),
        ("LMDB:///var", StoreUrl("lmdb", "/var")),
        (
            "/var/a b#c%20?capacity=1GiB",
            StoreUrl("lmdb", "/var/a b#c%20", {"capacity": "1GiB"}),
        ),
        ("~/kv", StoreUrl("lmdb", os.path.expanduser("~/kv"))),
        ("lmdb://~/kv", StoreUrl("lmdb", os.path.expanduser("~/kv"))),
    ],
)
def test_store_url_parse_valid_text_returns_parts(url: str, expected: StoreUrl) -> None:
    assert StoreUrl.parse(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "lmdb",
        "lmdb:",
        "lmdb:/var/kv",
        "lmdb://",
        "lmdb://?a=1",
        "://x",
        "lmdb:///a#b",
        "lmdb:///a#",
        "lmdb://[x",
    ],
)
def test_store_url_parse_invalid_text_raises(url: str) -> None:
    with pytest.raises(ConfigurationError, match="url"):
        StoreUrl.parse(url)


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/x", "s3://key:secret@[bucket/x"]
)
def test_store_url_parse_credentials_raise_without_secret_in_message(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        StoreUrl.parse(url)
    assert "secret" not in str(caught.value)


def test_store_url_parse_relative_path_raises_with_absolute_path(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("./store", "store", "../x/store"):
        with pytest.raises(ConfigurationError) as error:
            StoreUrl.parse(path)
        assert error.value.expected.endswith(
            f"as a path: {(tmp_path / path).resolve()}"
        )


def test_store_url_parse_repeated_option_raises() -> None:
    with pytest.raises(ConfigurationError, match="url option a"):
        StoreUrl.parse("lmdb:///x?a=1&a=2")


@pytest.mark.parametrize("url", ["~\0", "/x\0", "lmdb://~%00", "lmdb:///x?a=\0"])
def test_store_url_parse_null_byte_raises(url: str) -> None:
    with pytest.raises(ConfigurationError, match="no null byte"):
        StoreUrl.parse(url)


@given(st.text(max_size=30))
def test_store_url_parse_any_text_is_complete_or_raises(text: str) -> None:
    with suppress(ConfigurationError):
        parsed = StoreUrl.parse(text)
        assert parsed.scheme
        assert parsed.location


class Options(msgspec.Struct, frozen=True):
    count: int = 1
    ratio: float = 0.5
    fast: bool = False
    name: str | None = None
    size: str | None = None

    def __post_init__(self) -> None:
        if self.size is not None:
            parse_size(self.size, name="test option size")


def test_convert_options_text_values_are_converted_to_field_types() -> None:
    given_options = {
        "count": "3",
        "ratio": "0.25",
        "fast": "yes",
        "name": "x",
        "size": "1MiB",
    }
    assert convert_options(Options, given_options, where="test") == Options(
        3, 0.25, True, "x", "1MiB"
    )
    assert convert_options(
        Options, {"fast": "off", "count": 4}, where="test"
    ) == Options(4)
    assert convert_options(Options, {}, where="test") == Options()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"nope": "1"},
            r"test option nope: '1' is not valid; expected one of count, fast, name, ratio, size",
        ),
        ({"cuont": "1"}, r"one of count, .*size; did you mean count\?$"),
        ({"count": "many"}, r"test option count: 'many' is not valid"),
        ({"ratio": "x"}, r"test option ratio: 'x'"),
        ({"fast": "perhaps"}, r"test option fast: 'perhaps'"),
        (
            {"size": "-1"},
            r"^test option size: '-1' is not valid; expected a positive size",
        ),
    ],
)
def test_convert_options_invalid_option_raises_and_names_it(
    options: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        convert_options(Options, options, where="test")


class TypedOptions(msgspec.Struct):
    tiers: tuple[dict[str, str], ...] = ()
    mode: Literal["fast", "safe"] | None = None
    limit: int | str = 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": "lmdb"}, "test option tiers: 'lmdb' is not valid; expected a list"),
        (
            {"tiers": ["lmdb"]},
            "test option tiers: ['lmdb'] is not valid; expected a mapping at tiers[0]",
        ),
        (
            {"mode": "slow"},
            "test option mode: 'slow' is not valid; expected one of fast, safe",
        ),
        (
            {"limit": []},
            "test option limit: [] is not valid; expected an integer or text",
        ),
    ],
)
def test_convert_options_wrong_type_states_expected_type_once(
    options: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        convert_options(TypedOptions, options, where="test")
    assert str(caught.value) == message


@pytest.mark.parametrize("stride", [0, -4096, 100, 4097])
def test_row_layout_invalid_stride_raises(stride: int) -> None:
    with pytest.raises(ConfigurationError, match="row_stride"):
        RowLayout(stride, (GroupLayout(((0, 1),)),))


@pytest.mark.parametrize(
    "ranges",
    [
        (),
        ((0, 0),),
        ((-1, 5),),
        ((0, 4097),),
        ((10, 5), (14, 5)),
        ((10, 5), (0, 5)),
        ((0, 8192),),
    ],
)
def test_row_layout_invalid_group_ranges_raise_and_name_group(
    ranges: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(ConfigurationError, match=r"groups\[1\].ranges"):
        RowLayout(4096, (GroupLayout(((0, 1),)), GroupLayout(ranges)))


def test_row_layout_block_bytes_exclude_padding() -> None:
    layout = RowLayout(4096, (GroupLayout(((0, 100), (200, 50), (250, 6))),))
    assert layout.groups[0].block_bytes == 156
    with pytest.raises(ConfigurationError, match="groups"):
        RowLayout(4096, ())


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"num_blocks": -1}])
def test_offloading_config_invalid_count_raises_and_names_field(
    wrong: dict[str, int],
) -> None:
    def make(block_size: int = 16, num_blocks: int = 4) -> OffloadingConfig:
        layout = RowLayout(4096, (GroupLayout(((0, 1),)),))
        return OffloadingConfig({}, block_size, layout, num_blocks)

    make()
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        make(**wrong)


# Registry

Install = Callable[..., None]


class Animal:
    """Base class of the registered classes."""


class Cat(Animal):
    """The built-in class."""


ANIMALS = Registry[Animal]("test.animals", "animal", Animal, {"cat": Cat})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution ``zoo`` with entry points of group ``test.animals`` and a broken
    module."""

    def install(**points: str) -> None:
        info = tmp_path / "zoo-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: zoo\nVersion: 1.0\n"
        )
        lines = "\n".join(f"{name} = {value}" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[test.animals]\n{lines}\n")
        (tmp_path / "zoo_broken.py").write_text("1 / 0")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_registry_get_built_in_name_returns_its_class() -> None:
    assert ANIMALS.get("cat") is Cat


@pytest.mark.parametrize("name", ["fish", None, ["cat"]])
def test_registry_get_unknown_name_raises_and_lists_known_names(
    install: Install,
    name: object,
) -> None:
    install(dog="zoo:Dog")
    with pytest.raises(
        ConfigurationError, match=r"^animal: .* is not valid; expected one of cat, dog$"
    ):
        ANIMALS.get(name)


def test_registry_get_empty_registry_raises_and_names_group() -> None:
    with pytest.raises(
        ConfigurationError, match=r"expected a plug-in of test\.plants$"
    ):
        Registry[Animal]("test.plants", "plant", Animal).get("rose")


def test_registry_get_plug_in_returns_its_class(install: Install) -> None:
    install(ordered="collections:OrderedDict", plain="collections:Counter")
    mappings = Registry[dict[str, int]](
        "test.animals", "mapping", dict, {"plain": dict}
    )
    assert mappings.names() == ["ordered", "plain"]
    assert mappings.get("ordered") is OrderedDict
    assert mappings.get("plain") is dict, "a plug-in cannot replace a built-in class"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            "no_such_module:Dog",
            r"no_such_module:Dog of zoo raised ModuleNotFoundError: No module named 'no_such",
        ),
        (
            "persistkv.errors:Nothing",
            r"persistkv.errors:Nothing of zoo raised AttributeError",
        ),
        ("zoo_broken:Dog", r"zoo_broken:Dog of zoo raised ZeroDivisionError"),
        (
            "persistkv.errors:StoreError",
            r"persistkv.errors:StoreError of zoo is no Animal",
        ),
        ("os:getpid", r"os:getpid of zoo is no Animal"),
    ],
)
def test_registry_get_broken_plug_in_raises_and_names_distribution(
    install: Install,
    value: str,
    problem: str,
) -> None:
    install(dog=value)
    with pytest.raises(
        ConfigurationError,
        match=rf"^animal: 'dog' is not valid; expected a plug-in.*; {problem}",
    ):
        ANIMALS.get("dog")
