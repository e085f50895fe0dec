"""Paths can be written and read back, whatever the names in them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcap.paths import Path, Shortened, Step, attr, is_literal, item, parse, shorten, word

digests = st.text("0123456789abcdef", min_size=8, max_size=8)
texts = st.text(st.characters(codec=None), max_size=20)
shortened = st.builds(Shortened, st.one_of(texts, st.binary(max_size=20)), digests)
names = st.one_of(st.sampled_from(["self", "x", "None", "inf", "lambda", "naïve", ""]), texts,
                  st.builds(Shortened, texts, digests))
atoms = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, st.binary(max_size=20), shortened)
values = st.recursive(atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
words = st.sampled_from(["closure", "global", "default", "self", "arg", "key", "value", "pickle", "more"])
steps = st.one_of(
    st.builds(lambda name: Step("attr", name), names),
    st.builds(item, values),
    st.builds(Step, words),
    st.builds(Step, words, st.one_of(names, values)),
)
paths = st.builds(Path, st.one_of(st.just("<lambda>"), names), st.lists(steps, max_size=5).map(tuple))


@given(paths)
def test_parse_inverts_str(path):
    # by repr: nan is not equal to itself, while 1, 1.0 and True are equal to each other
    assert repr(parse(str(path))) == repr(path)


@given(paths)
def test_no_character_of_a_path_moves_the_cursor(path):
    assert str(path).isprintable()


@pytest.mark.parametrize("text", [
    "train_func<closure self>.data",
    "train<global lookup><global EMBED>",
    "cfg['opt'][3]",
    "Model<base 0>.step<default x>",
    "<lambda><closure f><arg 0><keyword verbose>",
    "obj[(1, ('a',), b'x')][None][-1.5e-07][inf]<key 3>",
    "obj.'learning rate'['aaaa'…0123abcd]<global 'None'>",
])
def test_texts_that_stay_as_they_are(text):
    assert str(parse(text)) == text


@pytest.mark.parametrize("text", [
    "", ".x", "obj.", "obj[", "obj[]", "obj['a]", "obj[1", "obj<", "obj<closure", "obj<closure >", "obj<Closure x>",
    "obj<attr x>", "obj x", "obj[1][x]", "1", "obj['a'…xyz]", "obj[(1, 2]", "obj[" + "(" * 50, "obj['\\x']", "obj[1 2]",
])
def test_what_is_no_path(text):
    with pytest.raises(ValueError, match="not a path"):
        parse(text)


def test_long_names_stay_distinct():
    first, second = attr("x" * 1000 + "a"), attr("x" * 1000 + "b")
    assert str(first) != str(second)
    assert len(str(first)) < 80
    assert str(word("global", "y" * 10_000_000)).startswith("<global 'yyyy")
    assert shorten("x" * 60) == "x" * 60
    assert shorten("same", salt=b"1") != shorten("same", salt=b"2")


@pytest.mark.parametrize(("value", "expected"), [
    (1, True), (1 << 600, False), ((1, "a"), True), (((((1,),),),), False), (tuple(range(9)), False), (math.nan, True),
    ([1], False), (object(), False), (None, True),
])
def test_is_literal(value, expected):
    assert is_literal(value) is expected
