"""The memory of what has been read keeps to its size: what it forgets is really let go."""

import gc
import weakref

import pytest

from tests.tiny import write_tiny_checkpoint
from umm_reflect import Bagel
from umm_reflect.context import Context
from umm_reflect.generate import Engine
from umm_reflect.prefill import _forks


@pytest.fixture(scope="module")
def bagel(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return Bagel.from_pretrained(folder, device="cpu", dtype="float32")


def conversation(bagel, first: str) -> Context:
    return Context.of(*(bagel.tokens.segment(word) for word in (first, "red", "blue", "green")))


def test_a_full_store_lets_chunks_go_from_the_end_of_the_oldest_chain(bagel):
    old, new = conversation(bagel, "star"), conversation(bagel, "moon")
    engine = Engine(bagel)
    chain = engine.caches([old])[0].links()
    chunks = [weakref.ref(link.chunk) for link in chain]
    sizes = [link.chunk.nbytes for link in chain]
    del chain
    # room for the new conversation and for the first two links of the old one
    room = sum(link.chunk.nbytes for link in Engine(bagel).caches([new])[0].links())
    engine.keep_bytes = room + sizes[0] + sizes[1]
    engine.caches([new])
    gc.collect()
    assert [chunk() is None for chunk in chunks] == [False, False, True, True]


def test_a_shared_beginning_outlives_the_oldest_of_those_that_share_it(bagel):
    start = conversation(bagel, "star").prefix(2)
    branches = [start + bagel.tokens.segment(word) for word in ("one", "two", "three")]
    engine = Engine(bagel)
    links = engine.caches(branches[:1])[0].links()
    first, root = weakref.ref(links[2].chunk), weakref.ref(links[0].chunk)
    engine.keep_bytes = sum(link.chunk.nbytes for link in links)
    del links
    for branch in branches[1:]:
        engine.caches([branch])
    gc.collect()
    assert first() is None
    assert root() is not None
    assert list(engine._prefixes)[-1] == start.segments[:1]


def test_contexts_fork_where_another_leaves_them_or_ends():
    assert _forks(["abcd", "abxy", "abc", "q"]) == {
        "abcd": [0, 2, 3],
        "abxy": [0, 2],
        "abc": [0, 2],
        "q": [0],
    }
    assert _forks(["abc"]) == {"abc": []}
