"""Reading and saying in batches: what is shared is read once, company changes nothing, and caches
are never written into.

The bits of a repeat, another order and a fresh engine are equal (an engine that has read other
things batches what is new in another way: runs that must repeat begin with a fresh one). Across
batch sizes the words are.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.counted import counted, picture, ragged
from tests.tiny import write_tiny_checkpoint
from umm_reflect import Bagel, prefill
from umm_reflect.cache import EMPTY, assemble
from umm_reflect.context import Context
from umm_reflect.generate import DrawRequest, DrawSettings, Engine, Said, Sure, draw, say
from umm_reflect.rng import stream


@pytest.fixture(scope="module")
def bagel(tmp_path_factory) -> Bagel:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)
    return Bagel.from_pretrained(folder, device="cpu", dtype="float32")


def kv(cache) -> Tensor:
    return torch.cat([link.chunk for link in cache.links()], dim=2)


# --- reading --------------------------------------------------------------------------------------


def test_shared_prefixes_and_equal_contexts_are_read_once(bagel):
    text, image = bagel.tokens.segment, picture(0)
    system, asked = text("Look."), text("a star")
    first, second = text("make it blue"), text("remove the ring, keep the rest")
    contexts = [
        Context.of(system, asked, image, first),
        Context.of(system, asked, image, second),
        Context.of(system, asked),
        Context.of(system, asked, image, first),
        Context.of(system, asked, text("a star")),
        Context.of(image, first),
    ]
    engine = Engine(bagel)
    with counted(bagel) as counts:
        caches = engine.caches(contexts)
    block = (2 * 3 + 2) + (2 * 3 + 2)  # latents and patches of the picture with their markers
    framed = [len(s.ids) + 2 for s in (system, asked, first, second, text("a star"))]
    assert counts.tokens == sum(framed) + block + block + framed[2]  # the last context is apart
    assert counts.vit == 1
    assert caches[0] is caches[3]
    assert caches[0].parent is caches[1].parent
    assert caches[2] is caches[0].parent.parent
    assert [c.length for c in caches[2].links()] == [framed[0], framed[0] + framed[1]]

    with counted(bagel) as counts:
        again = engine.caches(contexts)
        longer = engine.caches([contexts[0] + asked])
    assert all(one is other for one, other in zip(again, caches, strict=True))
    assert (counts.forwards, counts.tokens) == (1, framed[1])
    assert longer[0].parent is caches[0]


def test_siblings_on_a_shared_prefix_equal_separate_runs(bagel):
    text = bagel.tokens.segment
    prefix = Context.of(text("two circles"), picture(0))
    contexts = [prefix + text("add a ring"), prefix + text("done"), prefix + picture(1)]
    together = Engine(bagel).caches(contexts)
    assert len({id(cache.parent) for cache in together}) == 1
    for context, cache in zip(contexts, together, strict=True):
        [alone] = Engine(bagel).caches([context])
        torch.testing.assert_close(kv(cache), kv(alone), atol=1e-5, rtol=1e-5)
        assert (cache.length, cache.position) == (alone.length, alone.position)


def test_a_cache_keeps_its_own_tokens_alive_and_not_the_batch_that_they_were_read_in(bagel):
    [cache, _] = Engine(bagel).caches(ragged(bagel)[:2])
    for link in cache.links():
        assert link.chunk.untyped_storage().nbytes() == link.chunk.nbytes


def test_many_new_tokens_are_read_in_several_forwards(bagel, monkeypatch):
    contexts = [Context.of(bagel.tokens.segment("a star " * k)) for k in range(1, 6)]
    whole = Engine(bagel).caches(contexts)
    monkeypatch.setattr(prefill, "MAX_NEW_TOKENS", 12)
    with counted(bagel) as counts:
        parts = Engine(bagel).caches(contexts)
    assert counts.forwards > 2
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(kv(one), kv(other), atol=1e-5, rtol=1e-5)


def test_the_empty_context_needs_no_forward(bagel):
    with counted(bagel) as counts:
        assert Engine(bagel).caches([Context(), Context()]) == [EMPTY, EMPTY]
    assert counts.forwards == 0


def test_the_store_forgets_what_was_used_longest_ago_and_everything_on_demand(bagel):
    contexts = [Context.of(bagel.tokens.segment(word)) for word in ("red", "blue", "green")]
    [one] = Engine(bagel).caches(contexts[:1])
    engine = Engine(bagel, keep_bytes=int(2.6 * one.chunk.nbytes))
    for context in contexts[:2] + contexts[:1] + contexts[2:]:
        engine.caches([context])
    with counted(bagel) as counts:
        engine.caches([contexts[0]])
        engine.caches([contexts[2]])
        assert counts.forwards == 0
        engine.caches([contexts[1]])
    assert counts.forwards == 1
    engine.forget()
    with counted(bagel) as counts:
        engine.caches([contexts[1]])
    assert counts.forwards == 1


# --- caches ---------------------------------------------------------------------------------------


def chunk(tokens: int, value: float) -> Tensor:
    return torch.full((2, 2, tokens, 2, 8), value)


def test_a_fork_leaves_its_parent_alone():
    parent = EMPTY.append(chunk(3, 1.0), 3).append(chunk(2, 2.0), 4)
    before = kv(parent).clone()
    one, other = parent.append(chunk(4, 3.0), 8), parent.append(chunk(1, 4.0), 5)
    assert (parent.length, one.length, other.length) == (5, 9, 6)
    assert (parent.position, one.position, other.position) == (4, 8, 5)
    assert torch.equal(kv(parent), before)
    assert one.parent is other.parent is parent
    assert one.links()[:2] == other.links()[:2] == parent.links()  # held twice, stored once
    assert EMPTY.links() == []


def test_truncation_goes_back_to_the_end_of_a_segment_and_only_there():
    parent = EMPTY.append(chunk(3, 1.0), 3)
    cache = parent.append(chunk(2, 2.0), 4).append(chunk(4, 3.0), 8)
    assert cache.truncate(9) is cache
    assert cache.truncate(3) is parent
    assert cache.truncate(0) is EMPTY
    for length in (4, 10):
        message = rf"cut a cache of 9 tokens at {length}: segments end at \[3, 5, 9\]"
        with pytest.raises(ValueError, match=message):
            cache.truncate(length)


def test_a_workspace_holds_every_row_whoever_shares_its_links(bagel):
    shared, other = EMPTY.append(chunk(3, 1.0), 3), EMPTY.append(chunk(1, 2.0), 1)
    caches = [shared.append(chunk(2, 3.0), 5), shared, other, EMPTY, shared, shared]
    kv_of = assemble(caches, 1, bagel.config.llm, device="cpu", dtype=torch.float32).kv
    assert kv_of.shape == (2, 2, 6, 6, 2, 8)
    rows = kv_of[1, 0, :, :, 1, 7].tolist()
    start = [1.0] * 3 + [0.0] * 3
    assert rows == [
        [1.0] * 3 + [3.0] * 2 + [0.0],
        start,
        [2.0] + [0.0] * 5,
        [0.0] * 6,
        start,
        start,
    ]


def test_saying_and_drawing_write_nothing_into_the_caches_that_they_start_from(bagel):
    engine = Engine(bagel)
    context = Context.of(bagel.tokens.segment("a star"), picture(0))
    [cache] = engine.caches([context])
    before = [link.chunk.clone() for link in cache.links()]
    speak(bagel, [context], engine=engine)
    request = DrawRequest(context, Context(), None, (32, 32), stream(0, 0, 0, "draw"))
    draw(engine, [request], DrawSettings(points=3))
    [after] = engine.caches([context + bagel.tokens.segment("and a ring")])
    assert after.parent is cache
    for link, chunk_before in zip(cache.links(), before, strict=True):
        assert torch.equal(link.chunk, chunk_before)


# --- saying ---------------------------------------------------------------------------------------


def speak(bagel, contexts, *, names=None, engine=None, **options) -> list[Said]:
    """Short turns at temperature 1; `names` are those of the random streams."""
    names = range(len(contexts)) if names is None else names
    settings = {"temperature": 1.0, "max_tokens": 16, **options}
    return say(
        bagel,
        (engine or Engine(bagel)).caches(contexts),
        forced=[tuple(bagel.tokens.encode("<think>\n"))] * len(contexts),
        generators=[stream(7, name, 0, "say") for name in names],
        **settings,
    )


def test_a_repeat_another_order_and_a_fresh_engine_say_the_same_bits(bagel):
    contexts, engine = ragged(bagel), Engine(bagel)
    once = speak(bagel, contexts, engine=engine)
    assert len({said.sampled_ids for said in once}) == len(contexts)
    assert speak(bagel, contexts, engine=engine) == once
    assert speak(bagel, contexts) == once
    for order in ([3, 2, 1, 0], [2, 0, 3, 1]):
        other = speak(bagel, [contexts[i] for i in order], names=order)
        assert other == [once[i] for i in order]


def test_another_batch_size_says_the_same_words(bagel):
    contexts = ragged(bagel)
    together = speak(bagel, contexts)
    for i, context in enumerate(contexts):
        [alone] = speak(bagel, [context], names=[i])
        assert alone.sampled_ids == together[i].sampled_ids
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=1e-4)


def test_forwards_a_token_do_not_grow_with_the_batch_and_a_finished_row_leaves_it(bagel):
    contexts = ragged(bagel)
    lengths = [6, 2, 6, 4]
    force = [[5] * n for n in lengths]
    caches = Engine(bagel).caches(contexts)
    options = {"temperature": 1.0, "max_tokens": 9}
    for rows in ([0], [0, 1, 2, 3], [0, 1, 2, 3] * 4):
        with counted(bagel) as counts:
            said = say(
                bagel,
                [caches[r] for r in rows],
                forced=[()] * len(rows),
                generators=[stream(0, i, 0, "say") for i in range(len(rows))],
                force=[force[r] for r in rows],
                **options,
            )
        assert [len(s.sampled_ids) for s in said] == [lengths[r] for r in rows]
        # the start token, then one forward for each further token of the longest
        assert counts.forwards == 1 + 5
        assert counts.und == [sum(lengths[r] > step for r in rows) for step in range(6)]
        assert sum(counts.gen) == 0


def test_a_constrained_field_follows_its_trie_and_is_renormalised_over_what_is_legal(bagel):
    trie = {10: {20: {}, 21: {}}, 11: {22: {}}, 12: {}}
    seen: list[Tensor] = []
    said = speak(
        bagel,
        ragged(bagel) * 8,
        choices=trie,
        temperature=8.0,
        max_tokens=3,
        on_logits=lambda logits: seen.append(logits.clone()),
    )
    starts = {s.sampled_ids[: 1 if s.sampled_ids[0] == 12 else 2] for s in said}
    assert starts <= {(10, 20), (10, 21), (11, 22), (12,)}
    assert len(starts) == 4
    for row, s in enumerate(said):
        assert s.allowed[0] == (10, 11, 12)
        scores = seen[0][row, [10, 11, 12]] / 8.0
        expected = scores.log_softmax(-1)[s.sampled_ids[0] - 10].item()
        assert s.logprobs[0] == pytest.approx(expected, abs=1e-5)
        if s.sampled_ids[0] == 11:
            assert (s.allowed[1], s.chosen[1], s.logprobs[1]) == ((22,), False, 0.0)
        elif s.sampled_ids[0] == 12 and len(s.allowed) > 1:
            assert (s.allowed[1], s.chosen[1]) == (None, True)


def test_a_first_choice_that_takes_certainty_is_withdrawn_from_the_rows_that_are_less_sure(bagel):
    trie = {10: {20: {}}, 11: {22: {}}, 12: {}}
    seen: list[Tensor] = []
    options = {"choices": trie, "temperature": 0.5, "max_tokens": 1}
    contexts = ragged(bagel)
    plain = speak(bagel, contexts, on_logits=lambda x: seen.append(x.clone()), **options)
    shares = seen[0][:, [10, 11, 12]].softmax(-1)[:, 0]  # at temperature 1
    least = float(shares.sort().values[1:3].mean())  # two rows are sure enough
    said = speak(bagel, contexts, sure=Sure(10, [least] * len(contexts)), **options)
    for row, (one, before, share) in enumerate(zip(said, plain, shares.tolist(), strict=True)):
        if share >= least:
            assert one == before
            continue
        assert one.allowed[0] == (11, 12)
        scores = seen[0][row, [11, 12]] / 0.5
        expected = scores.log_softmax(-1)[one.sampled_ids[0] - 11].item()
        assert one.logprobs[0] == pytest.approx(expected, abs=1e-5)
    assert sum(one.allowed[0] == (11, 12) for one in said) == 2
    assert speak(bagel, contexts, sure=Sure(10, [0.0] * len(contexts)), **options) == plain
    assert trie == {10: {20: {}}, 11: {22: {}}, 12: {}}


def test_sampling_follows_the_probabilities(bagel):
    context = ragged(bagel)[0]
    seen: list[Tensor] = []
    many = speak(
        bagel,
        [context] * 2000,
        choices={10: {}, 11: {}, 12: {}},
        max_tokens=1,
        temperature=4.0,
        on_logits=lambda logits: seen.append(logits[0].clone()),
    )
    expected = (seen[0][[10, 11, 12]] / 4.0).softmax(-1)
    counts = torch.tensor([s.sampled_ids[0] - 10 for s in many]).bincount(minlength=3) / 2000
    torch.testing.assert_close(counts, expected, atol=0.04, rtol=0)
    assert expected.min() > 0.02


def test_ids_without_a_symbol_are_never_said(bagel):
    assert bagel.tokens.size < bagel.config.llm.vocab_size
    head = bagel.language_model.lm_head.weight
    before = head.detach().clone()
    try:
        with torch.no_grad():
            head[bagel.tokens.size :] = 50 * head[:1]
        said = speak(bagel, ragged(bagel) * 4, temperature=3.0)
    finally:
        with torch.no_grad():
            head.copy_(before)
    assert max(i for s in said for i in s.sampled_ids) < bagel.tokens.size


def test_greedy_takes_the_most_likely_token(bagel):
    seen: list[Tensor] = []
    [said] = speak(
        bagel,
        ragged(bagel)[:1],
        greedy=True,
        temperature=0.0,
        max_tokens=5,
        on_logits=lambda logits: seen.append(logits[0, : bagel.tokens.size].clone()),
    )
    assert list(said.sampled_ids) == [logits.argmax().item() for logits in seen]


def test_what_ends_a_turn(bagel):
    [context] = ragged(bagel)[:1]
    end = bagel.frame.end

    def one(**options) -> tuple[tuple[int, ...], bool]:
        [said] = speak(bagel, [context], **options)
        return said.sampled_ids, said.truncated

    whole, truncated = one(max_tokens=6, support=end)  # the end token cannot be chosen
    assert truncated
    assert len(whole) == 6
    assert len(set(whole)) > 3
    stop = whole.index(whole[2])
    assert one(support=end, stop_ids=[whole[2]]) == (whole[: stop + 1], False)
    assert one(support=end, stop_after=lambda ids: len(ids) == 4) == (whole[:4], False)
    assert one(force=[[9, 8, end]]) == ((9, 8, end), False)
    assert one(force=[[9, end, 8]]) == ((9, end), False)  # nothing follows the end token
    assert one(force=[[9, 8, 7]], max_tokens=2) == ((9, 8), True)


def test_tokens_stream_row_by_row_as_they_are_sampled(bagel):
    heard: list[tuple[int, int]] = []
    said = speak(bagel, ragged(bagel), max_tokens=5, on_token=lambda *t: heard.append(t))
    for row, s in enumerate(said):
        assert tuple(token for r, token in heard if r == row) == s.sampled_ids
    assert [row for row, _ in heard[:4]] == [0, 1, 2, 3]


def test_bad_arguments_of_say_are_refused(bagel):
    contexts = ragged(bagel)[:2]
    with pytest.raises(ValueError, match=r"temperature 0\.0 must be positive"):
        speak(bagel, contexts, temperature=0.0)
    with pytest.raises(ValueError, match="2 contexts but 1 force"):
        speak(bagel, contexts, force=[[3]])
    with pytest.raises(ValueError, match="2 contexts but 3 generators"):
        speak(bagel, contexts, names=[0, 1, 2])
    assert speak(bagel, []) == []
