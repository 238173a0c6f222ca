import warnings
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parquet_keytools.config.key_policy import ChosenKey, resolve_columns
from parquet_keytools.config.loader import parse_configuration
from parquet_keytools.errors import ConfigurationError

PLAINTEXT = ChosenKey("plaintext", None)
FOOTER = ChosenKey("footer_key", "footer")
PII = ChosenKey("column_key", "pii")
TIMES = ChosenKey("column_key", "times")


def configuration(column_keys, **table):
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": ["footer", "pii", "times"]},
        "tables": {"flights": {"footer_key": "footer", "column_keys": column_keys, **table}},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parse_configuration(document)


def resolve(column_keys, *leaf_paths, **table):
    paths = [path if isinstance(path, tuple) else (path,) for path in leaf_paths]
    return list(resolve_columns(configuration(column_keys, **table), "flights", paths).values())


def test_listed_columns_get_their_key_and_others_stay_plaintext():
    column_keys = {"pii": ["tailnum"], "times": ["dep_time"]}
    keys = resolve(column_keys, "year", "dep_time", "tailnum", unlisted_columns="plaintext")
    assert keys == [PLAINTEXT, TIMES, PII]


def test_unlisted_columns_may_get_the_footer_key():
    keys = resolve({"pii": ["tailnum"]}, "year", "tailnum", unlisted_columns="footer_key")
    assert keys == [FOOTER, PII]


def test_a_column_under_the_footer_keys_name_has_a_data_key_of_its_own():
    keys = resolve({"footer": ["tailnum"]}, "tailnum", "year", unlisted_columns="footer_key")
    assert keys == [ChosenKey("column_key", "footer"), FOOTER]


def test_the_order_is_that_of_the_schema():
    paths = [("c",), ("a", "x"), ("b",)]
    assert (
        list(resolve_columns(configuration({"pii": ["b"]}, unlisted_columns="plaintext"), "flights", paths))
        == paths
    )


NAME, AGE, TAGS = ("passenger", "name"), ("passenger", "age"), ("passenger", "tags", "list", "element")


@pytest.mark.parametrize(
    ("pattern", "covered"),
    [
        ("passenger", {NAME, AGE, TAGS}),
        ("passenger.name", {NAME}),
        ("passenger.tags", {TAGS}),
        ("passenger.tags.list", {TAGS}),
        ("passenger.*", {NAME, AGE, TAGS}),
        ("*.element", {TAGS}),
        ("passenger.???", {AGE}),
        ("passenger.?ag*", {TAGS}),
        # A glob that matches a parent covers its children, as the parent's name does.
        ("p*ssenger", {NAME, AGE, TAGS}),
        ("passenger.t?gs", {TAGS}),
        ("?ail", {("tail",)}),
    ],
)
def test_nested_columns(pattern, covered):
    paths = [NAME, AGE, TAGS, ("passengers",), ("tail",)]
    keys = resolve_columns(configuration({"pii": [pattern]}, unlisted_columns="plaintext"), "flights", paths)
    assert {path for path, key in keys.items() if key == PII} == covered


@pytest.mark.parametrize(
    "name",
    [
        "a.b",
        "a b",
        "a,b",
        "a:b",
        "a;b",
        "a[b]",
        "[ab]",
        "größe",
        "列",
        "a\nb",
        "a%b",
        "${x}",
        "a*b",
        "a?b",
        "!a",
    ],
)
def test_any_column_name_can_be_listed(name):
    others = ["a", "b", "axb", "aXXb"]
    keys = resolve({"pii": [name.replace("${", "$${")]}, name, *others, unlisted_columns="plaintext")
    assert keys == [PII, *[PLAINTEXT] * len(others)]


def test_a_literal_name_wins_over_its_meaning_as_a_glob():
    assert resolve({"pii": ["a*"]}, "a*", "ab", plaintext_columns=["ab"]) == [PII, PLAINTEXT]
    assert resolve({"pii": ["a*"]}, ("a*", "x"), "ab", plaintext_columns=["ab"]) == [PII, PLAINTEXT]
    assert resolve({"pii": ["a*"]}, "ac", "ab") == [PII, PII]


def test_a_name_with_a_dot_has_no_parent():
    assert resolve({"pii": ["a"]}, ("a", "b"), ("a.b",), unlisted_columns="plaintext") == [PII, PLAINTEXT]


def test_one_dotted_path_of_two_columns_covers_both():
    assert resolve({"pii": ["a.b"]}, ("a", "b"), ("a.b",)) == [PII, PII]


def test_brackets_are_no_character_class():
    assert resolve({"pii": ["[ab]*"]}, "a1", "[ab]1", plaintext_columns=["a1"]) == [PLAINTEXT, PII]


def test_upper_and_lower_case_differ():
    with pytest.raises(ConfigurationError, match=r"'TAILNUM' matches no column\. Did you mean 'tailnum'"):
        resolve({"pii": ["TAILNUM"]}, "tailnum")


def test_patterns_of_one_key_may_overlap():
    assert resolve({"pii": ["a", "a.b", "*b"]}, ("a", "b")) == [PII]


def test_more_columns_than_the_format_allows_are_fine_here():
    paths = [(f"c{number}",) for number in range(40_000)]
    assert set(resolve_columns(configuration({"pii": ["c*"]}), "flights", paths).values()) == {PII}


@pytest.mark.parametrize(
    ("column_keys", "yaml_path", "words"),
    [
        (
            {"pii": ["tailnum", "tailnumm"]},
            "[1]",
            ["'tailnumm' matches no column", "Did you mean 'tailnum'?"],
        ),
        ({"pii": ["passenger.nme"]}, "[0]", ["Did you mean 'passenger.name'?"]),
        ({"pii": ["passenger.name.first"]}, "[0]", ["matches no column"]),
        ({"pii": ["x*"]}, "[0]", ["'x*' matches no column"]),
        ({"pii": [" tailnum"]}, "[0]", ["' tailnum' matches no column"]),
    ],
)
def test_a_pattern_that_covers_nothing_is_a_mistake(column_keys, yaml_path, words):
    with pytest.raises(ConfigurationError) as caught:
        resolve(column_keys, "tailnum", ("passenger", "name"), "year")
    assert caught.value.yaml_path == f"tables.flights.column_keys.pii{yaml_path}"
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("first", "second"), [("*num", "tail*"), ("tailnum", "tail*"), ("passenger", "passenger.name")]
)
def test_two_keys_for_one_column_are_a_mistake(first, second):
    with pytest.raises(ConfigurationError) as caught:
        resolve({"pii": [first], "times": [second]}, "tailnum", ("passenger", "name"))
    assert caught.value.yaml_path == "tables.flights.column_keys.times[0]"
    assert "has two keys" in str(caught.value)
    assert all(repr(word) in str(caught.value) for word in ("pii", "times", first, second))


def test_mistakes_are_reported_together_with_their_lines():
    text = """\
version: 1
kms: {type: in_memory, keys: [footer, pii]}
tables:
  flights:
    footer_key: footer
    column_keys:
      pii:
        - tailnum
        - nothing
        - nowhere
"""
    made = parse_configuration(text, file="flights.yaml")
    with pytest.raises(ConfigurationError) as caught:
        resolve_columns(made, "flights", [("tailnum",)])
    assert (caught.value.file, caught.value.line) == ("flights.yaml", 9)
    assert "flights.yaml:10: tables.flights.column_keys.pii[2]: 'nowhere' matches no column." in str(caught.value)


def test_an_unknown_table_is_a_mistake():
    with pytest.raises(ConfigurationError, match=r"no table 'fligths'\. Did you mean 'flights'"):
        resolve_columns(configuration({}), "fligths", [])


# Small alphabets, so that patterns often match and often collide.
names = st.text("ab.*?[", min_size=1, max_size=3)
leaf_paths = st.lists(st.lists(names, min_size=1, max_size=3).map(tuple), min_size=1, max_size=6, unique=True)
patterns = st.lists(st.text("ab.*?[", min_size=1, max_size=5), min_size=1, max_size=3, unique=True)


def is_covered(pattern, leaf, leaves):
    """The rule again, written in another way."""

    def parents(path):
        return [".".join(path[:length]) for length in range(1, len(path) + 1)]

    if any(pattern in parents(other) for other in leaves):
        return pattern in parents(leaf)
    return any(fnmatchcase(parent, pattern.replace("[", "[[]")) for parent in parents(leaf))


@given(leaf_paths, st.dictionaries(st.sampled_from(["pii", "times"]), patterns), st.booleans())
def test_every_column_gets_the_one_key_that_lists_it(leaves, column_keys, with_footer_key):
    listed = [pattern for some in column_keys.values() for pattern in some]
    if len(set(listed)) < len(listed):
        return  # refused when the configuration is made
    unlisted = "footer_key" if with_footer_key else "plaintext"
    made = configuration(column_keys, unlisted_columns=unlisted)
    covering = {
        leaf: {key for key, some in column_keys.items() for pattern in some if is_covered(pattern, leaf, leaves)}
        for leaf in leaves
    }
    idle = any(not any(is_covered(pattern, leaf, leaves) for leaf in leaves) for pattern in listed)
    if idle or any(len(keys) > 1 for keys in covering.values()):
        with pytest.raises(ConfigurationError):
            resolve_columns(made, "flights", leaves)
        return
    keys = resolve_columns(made, "flights", leaves)
    assert list(keys) == leaves
    for leaf, key in keys.items():
        expected = {ChosenKey("column_key", name) for name in covering[leaf]}
        assert {key} == (expected or {FOOTER if with_footer_key else PLAINTEXT})


def test_a_column_that_is_listed_nowhere_is_an_error():
    for table in ({}, {"unlisted_columns": "error"}):
        with pytest.raises(ConfigurationError) as caught:
            resolve({"pii": ["tailnum"]}, "tailnum", "year", "new", ("at", "deep", "x"), **table)
        text = str(caught.value)
        assert "nothing is written: 'year', 'new', 'at.deep.x'." in text and "tailnum" not in text
        choices = (
            "under a key in column_keys",
            "plaintext_columns",
            "`unlisted_columns: plaintext`",
            "footer_key",
        )
        assert all(choice in text for choice in choices)


def test_many_undecided_columns_are_counted():
    with pytest.raises(ConfigurationError, match=r"'c19' and 81 more\."):
        resolve({"pii": ["tailnum"]}, "tailnum", *(f"c{i}" for i in range(101)))


def test_existing_files_are_read_with_undecided_columns():
    made = configuration({"pii": ["tailnum"]})
    keys = resolve_columns(made, "flights", [("tailnum",), ("iban",)], for_reading=True)
    assert list(keys.values()) == [PII, PLAINTEXT]


def test_columns_that_stay_plaintext_are_listed():
    listed = {"unlisted_columns": "error", "plaintext_columns": ["year", "at", "x_*", "not there"]}
    keys = resolve({"pii": ["tailnum"]}, "tailnum", "year", ("at", "deep", "x"), "x_1", **listed)
    assert [key.kind for key in keys] == ["column_key", "plaintext", "plaintext", "plaintext"]
    with pytest.raises(
        ConfigurationError, match="'tailnum' has a key under column_keys and is also listed as plaintext"
    ):
        resolve({"pii": ["tailnum"]}, "tailnum", **{**listed, "plaintext_columns": ["tail*"]})
    with pytest.raises(ConfigurationError, match="plaintext_columns needs `unlisted_columns: error`"):
        resolve({"pii": ["tailnum"]}, "tailnum", plaintext_columns=["year"], unlisted_columns="plaintext")
