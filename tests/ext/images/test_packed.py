"""Packed strings read like the list they came from, and take two blocks of memory."""

from __future__ import annotations

import gc
import os
import pickle
import re
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples

from lightning_fastdata.data import PackedStrings

# Any str, also with the lone surrogates that stand for the bytes of a path that is not UTF-8.
text = st.text(st.characters(min_codepoint=0, max_codepoint=0x10FFFF, exclude_categories=()))
lists = st.lists(text, max_size=12)
bounds = st.none() | st.integers(-15, 15)
steps = st.none() | st.integers(-4, 4).filter(bool)


def image_paths(count):
    return [f"/data/train/n{i % 1000:08d}/n{i % 1000:08d}_{i}.JPEG" for i in range(count)]


@max_examples(150)
@given(strings=lists, start=bounds, stop=bounds, step=steps, asked=text)
def test_it_reads_like_a_list(strings, start, stop, step, asked):
    packed = PackedStrings(strings)
    assert packed == strings
    assert strings == packed
    assert list(packed) == strings
    assert [packed[i] for i in range(-len(strings), len(strings))] == 2 * strings
    assert packed[start:stop:step] == strings[start:stop:step]
    assert list(reversed(packed)) == strings[::-1]
    assert (asked in packed) == (asked in strings)
    assert packed != [*strings, asked]
    for index in (len(strings), -len(strings) - 1):
        with pytest.raises(IndexError, match=str(index)):
            packed[index]


@max_examples(80)
@given(strings=lists, start=bounds, stop=bounds, protocol=st.integers(2, 5))
def test_it_survives_pickling_whole_and_in_part(strings, start, stop, protocol):
    packed = PackedStrings(strings)
    for one, expected in ((packed, strings), (packed[start:stop], strings[start:stop])):
        assert pickle.loads(pickle.dumps(one, protocol)) == expected


def test_every_file_name_comes_back():
    names = [os.fsdecode(name) for name in (b"plain", b"caf\xc3\xa9", b"\xff\xfe", b"a\x80b")]
    assert [os.fsencode(name) for name in PackedStrings(names)] == [*map(os.fsencode, names)]


def test_a_million_paths_cost_their_bytes_and_their_lengths():
    strings = image_paths(1_281_167)
    payload = sum(map(len, strings))
    packed = PackedStrings(strings)
    assert packed.nbytes == payload + 8 * (len(strings) + 1)
    assert len(ForkingPickler.dumps(packed)) < payload + len(strings) + 1000
    assert len(pickle.dumps(packed[1000:2000])) < 1000 * (len(strings[0]) + 8) + 1000
    again = pickle.loads(ForkingPickler.dumps(packed))
    assert again[::99_991] == strings[::99_991]
    assert again[-1] == strings[-1]


def copied_kib(read):
    """What a forked process has copied of its parent's memory after reading, in KiB."""

    def private():
        rollup = Path("/proc/self/smaps_rollup").read_text()
        return int(re.search(r"Private_Dirty:\s+(\d+)", rollup)[1])

    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            gc.disable()
            before = private()
            read()
            os.write(sender, str(private() - before).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as answer:
        copied = int(answer.read())
    os.waitpid(child, 0)
    return copied


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_reader_copies_no_memory_as_it_does_of_a_list():
    def read_all(strings):
        return lambda: [None for string in strings if string == ""]

    strings = image_paths(200_000)
    packed = PackedStrings(strings)
    of_a_list = copied_kib(read_all(strings))
    assert of_a_list > 10_000
    # A process that holds much else copies some of that.
    assert copied_kib(read_all(packed)) < of_a_list / 3


@each("wrong", [[b"bytes"], [Path("a")], ["a", None], "photo.jpg"])
def test_only_lists_of_strings_are_packed(wrong):
    with pytest.raises(TypeError, match=r"not a str|is one str; give a list"):
        PackedStrings(wrong)


def test_it_has_no_hash_and_shows_its_beginning():
    packed = PackedStrings(["a", "bc", "d", "e"])
    with pytest.raises(TypeError):
        hash(packed)
    assert repr(packed) == "PackedStrings(['a', 'bc', 'd', ...], 4 in 45 bytes)"
