"""A claims file says what `Says` says, and its mistakes name the key, the limit and the value."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import ringtrue as rt
from ringtrue.audit.subject import Says
from ringtrue.subjects.claims_file import FIELDS, WORDS, read
from ringtrue.subjects.function import NAMES

GOOD = """
dtypes = ["float32", "bfloat16"]
masks = ["bool", "key_bool"]
causal = "bottom_right"
gqa = true
head_dims = [128, 8]
ranks = ["ring"]
"""


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "claims.toml"
    path.write_text(text, "utf-8")
    return path


def test_read(tmp_path: Path) -> None:
    assert read(file(tmp_path, GOOD)) == Says(
        frozenset({"float32", "bfloat16"}),
        frozenset({"bool", "key_bool"}),
        "bottom_right",
        gqa=True,
        head_dims=(128, 8),
        ranks=frozenset({"ring"}),
    )


def test_an_empty_file_claims_what_says_does(tmp_path: Path) -> None:
    assert read(file(tmp_path, "")) == Says()


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_can_be_written(tmp_path: Path, name: str) -> None:
    """As text, the value of a right claim; so a new field of Says cannot be one that no file can say."""
    default = getattr(Says(), name)
    text = {bool: str(not default).lower(), tuple: "[64, 8]"}.get(type(default))
    if isinstance(default, str):
        text = f'"{next(word for word in WORDS[name] if word != default)}"'
    if text is None:
        text = str(list(WORDS[name])).replace("'", '"')
    claimed = read(file(tmp_path, f"{name} = {text}"))
    assert getattr(claimed, name) != default or name == "dtypes"
    assert {f.name for f in fields(Says) if getattr(claimed, f.name) != getattr(Says(), f.name)} <= {name}


@pytest.mark.parametrize(
    ("line", "key", "limit", "value"),
    [
        ("causual = true", "unknown claim 'causual'", "dtypes, masks, causal, window", "True"),
        ('causal = "left"', "causal", "one of any, top_left", "'left'"),
        ("causal = true", "causal", "one of any, top_left", "True"),
        ('gqa = "yes"', "gqa", "true or false", "'yes'"),
        ("gqa = 1", "gqa", "true or false", "1"),
        ('dtypes = "float32"', "dtypes", "a list of float32, bfloat16", "'float32'"),
        ('dtypes = ["fp8"]', "dtypes", "a list of float32, bfloat16", "['fp8']"),
        ('masks = ["causal"]', "masks", "a list of bool, float, key_bool", "['causal']"),
        ("masks = [[1]]", "masks", "a list of bool", "[[1]]"),
        ("head_dims = 128", "head_dims", "two integers of at least 1", "128"),
        ("head_dims = [128, 0]", "head_dims", "two integers of at least 1", "[128, 0]"),
        ("[ranks]", "ranks", "a list of ulysses", "{}"),
    ],
)
def test_mistakes_name_the_key_the_limit_and_the_value(
    tmp_path: Path, line: str, key: str, limit: str, value: str
) -> None:
    with pytest.raises(rt.ArgumentError) as caught:
        read(file(tmp_path, line))
    first, second, third = str(caught.value).splitlines()
    assert first == f"claims.toml: {key}"
    assert limit in second
    assert third == f"  value:  {value}"


def test_what_is_not_toml_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"claims.toml is not TOML: .*line 2"):
        read(file(tmp_path, "gqa = true\ncausal = any"))


def test_the_docs_name_every_claim_with_its_words_and_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit" / "claims.md").read_text("utf-8")
    page = page.partition("## Waivers")[0]
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert tuple(rows) == FIELDS
    for name, words in WORDS.items():
        assert all(f'"{word}"' in rows[name] for word in words)
    for name in set(FIELDS) - WORDS.keys() - {"head_dims"}:
        assert rows[name].rstrip(" |").endswith(str(getattr(Says(), name)).lower())


def test_the_page_names_what_a_signature_is_read_for() -> None:
    page = (Path(__file__).parents[2] / "docs/audit/claims.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (\w+) \| (`.*`) \|$", page, re.MULTILINE))
    assert {word: tuple(re.findall("`(.*?)`", rows.get(word, ""))) for word in NAMES} == NAMES
