"""The static decode step says what the eager one says; a graph that is not what it should be is
left, with one line, and changes no result. Graphs are played by a recorder that runs the step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tests.counted import counted, ragged
from tests.tiny import write_tiny_checkpoint
from umm_reflect import Bagel, adapters, decode, graphs
from umm_reflect.decode import Decoder, StaticDecoder, make_decoder
from umm_reflect.generate import Engine, Said, StopRule, say
from umm_reflect.graphs import NotCaptured
from umm_reflect.rng import stream

TRIE = {10: {20: {}, 21: {}}, 11: {22: {}}, 12: {}}


@pytest.fixture
def bagel(checkpoint) -> Bagel:
    return Bagel.from_pretrained(checkpoint, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)


def speak(bagel, *, copies: int = 2, **options) -> list[Said]:
    contexts = ragged(bagel) * copies
    settings = {"temperature": 1.0, "max_tokens": 24, **options}
    return say(
        bagel,
        Engine(bagel).caches(contexts),
        forced=[tuple(bagel.tokens.encode("<think>\n"))] * len(contexts),
        generators=[stream(7, row, 0, "say") for row in range(len(contexts))],
        **settings,
    )


def assert_same(said: list[Said], expected: list[Said]) -> None:
    for one, other in zip(said, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert dataclasses.replace(one, logprobs=other.logprobs) == other


@dataclasses.dataclass
class Recorder:
    """A graph, as far as the CPU can play it: `replay` runs the step into one and the same tensor.

    noise: what a replay adds to its logits. refuses: the capture fails; never_runs: the step before
    it fails too.
    """

    noise: float = 0.0
    refuses: bool = False
    never_runs: bool = False
    records: int = 0
    replays: int = 0
    closed: int = 0
    ready: bool = False

    def record(self, forward):
        self.records += 1
        error = RuntimeError("this waits\nfor the host")
        if self.refuses and self.never_runs:
            raise NotCaptured(error, None)
        result = forward()
        if self.refuses:
            raise NotCaptured(error, result)
        self.forward, self.output, self.ready = forward, torch.empty_like(result), True
        return result

    def replay(self):
        self.replays += 1
        return self.output.copy_(self.forward() + self.noise)

    def forget(self):
        self.ready = False

    def close(self):
        self.closed += 1


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    played = Recorder()
    monkeypatch.setattr(decode, "make_recorder", lambda device: played)
    return played


# --- the static step ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"choices": TRIE, "temperature": 3.0},
        {"greedy": True},
        {"force": [[5] * (2 + 3 * row) for row in range(8)]},
        {"force": [[5] * 30] * 8},
        {"stop_after": lambda ids: len(ids) > 3 and ids[-1] % 4 == 0, "stop_ids": [30, 31]},
        {"stop_after": StopRule(lambda ids: len(ids) > 9, range(0, 400, 3), every=8)},
        {"max_tokens": 1},
    ],
    ids=["free", "trie", "greedy", "forced", "truncated", "stops", "rule", "one token"],
)
def test_the_static_step_says_what_the_eager_one_says(bagel, options, monkeypatch):
    monkeypatch.setattr(decode, "KEYS_STEP", 8)  # several lengths
    eager = speak(bagel, capture=False, **options)
    assert speak(bagel, **options) == eager  # a CPU decodes eagerly
    assert_same(speak(bagel, capture=True, **options), eager)


def test_the_static_step_uses_an_adapter(bagel):
    plain = speak(bagel, greedy=True)
    adapters.attach_lora(bagel, rank=4, alpha=8, experts="und")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapters.adapter_parameters(bagel):
        if ".lora_B." in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    eager = speak(bagel, greedy=True)
    assert eager != plain
    assert_same(speak(bagel, greedy=True, capture=True), eager)


def test_finished_rows_stay_until_half_of_them_have_finished(bagel):
    force = [[5] * n for n in (2, 3, 9, 9, 9, 9, 4, 9)]
    with counted(bagel) as counts:
        said = speak(bagel, force=force, capture=True)
    assert [len(s.sampled_ids) for s in said] == [len(ids) for ids in force]
    assert counts.und[2:] == [8] * 8  # three of eight have finished at the end
    force = [[5] * n for n in (2, 3, 4, 9, 9, 9, 4, 5)]
    with counted(bagel) as counts:
        speak(bagel, force=force, capture=True)
    # the step after the fourth token was on its way when four rows had finished
    assert counts.und[2:] == [8] * 4 + [4] * 4


def test_logits_are_those_of_the_live_rows(bagel):
    force = [[5] * n for n in (2, 3, 9, 9, 9, 9, 4, 9)]
    seen: dict[bool, list] = {True: [], False: []}
    for capture, logits in seen.items():
        speak(bagel, force=force, capture=capture, on_logits=lambda x, to=logits: to.append(+x))
    for one, other in zip(seen[True], seen[False], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_default_captures_texts_that_may_be_long_on_a_gpu(bagel, monkeypatch):
    monkeypatch.setattr(decode, "Decoder", lambda *_: "eager")
    monkeypatch.setattr(decode, "StaticDecoder", lambda *_: "captured")
    gpu = SimpleNamespace(device=torch.device("cuda"), language_model=bagel.language_model)

    def kind(model, steps: int, capture=bagel.capture) -> str:
        return make_decoder(model, [], [], 400, steps=steps, capture=capture)

    assert [kind(gpu, 15), kind(gpu, 16), kind(bagel, 16)] == ["eager", "captured", "eager"]
    assert kind(gpu, 400, capture=False) == "eager"
    next(bagel.language_model.parameters()).ds_id = 0  # what ZeRO-3 writes on its weights
    assert kind(gpu, 400) == "eager"


def test_automatic_is_eager_on_the_cpu_and_the_models_attribute_counts(bagel):
    def kind(**options):
        [cache] = Engine(bagel).caches(ragged(bagel)[:1])
        return type(make_decoder(bagel, [cache], [(1,)], 20, steps=20, **options))

    assert kind(capture=None) is Decoder
    assert kind(capture=True) is StaticDecoder
    made = []
    original = decode.StaticDecoder.step
    bagel.capture = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            decode.StaticDecoder, "step", lambda self, ids: made.append(1) or original(self, ids)
        )
        speak(bagel, max_tokens=4)
        assert len(made) == 3
        speak(bagel, max_tokens=4, capture=False)
        assert len(made) == 3


def test_a_stop_rule_is_asked_at_its_ids_and_at_every_so_many():
    asked: list[int] = []
    rule = StopRule(lambda ids: asked.append(len(ids)) or False, {7}, every=4)
    for end in range(1, 10):
        rule([7 if i in (2, 3) else 1 for i in range(end)])
    assert asked == [3, 4, 8]


def test_a_row_that_is_made_to_say_nothing_is_refused(bagel):
    with pytest.raises(ValueError, match="without ids"):
        speak(bagel, force=[[5]] * 7 + [[]])


# --- captures -------------------------------------------------------------------------------------


def test_steps_are_captured_once_a_length_and_halving_and_replayed(bagel, recorder, monkeypatch):
    monkeypatch.setattr(decode, "FEW_ROWS", 0)
    force = [[5] * n for n in (20, 20, 20, 20, 9, 9, 9, 9)]
    eager = speak(bagel, force=force, capture=False)
    assert recorder.records == 0
    assert_same(speak(bagel, force=force, capture=True), eager)
    assert recorder.records == 2  # at the start and when four rows were left
    assert recorder.replays == 20 - 1 - 1  # the second capture's warm-up is the step that was due
    assert recorder.closed == 1
    recorder.records = 0
    monkeypatch.setattr(decode, "KEYS_STEP", 8)
    assert_same(speak(bagel, force=force, capture=True), eager)
    assert recorder.records > 2


def test_short_texts_and_the_last_steps_are_not_captured(bagel, recorder, monkeypatch):
    speak(bagel, force=[[5] * 15] * 8, max_tokens=400, capture=True)
    assert recorder.records == 0
    monkeypatch.setattr(decode, "FEW_ROWS", 0)
    for short, records in ((14, 2), (15, 1)):  # where half of the rows end
        recorder.records = 0
        force = [[5] * n for n in (18, 18, 18, 18, short, short, short, short)]
        eager = speak(bagel, force=force, capture=False)
        assert_same(speak(bagel, force=force, capture=True), eager)
        assert recorder.records == records


def test_finished_ones_of_few_rows_stay_in_the_graph(bagel, recorder):
    force = [[5] * n for n in (20, 3, 3, 4, 5, 5, 5, 9)]
    eager = speak(bagel, force=force, capture=False)
    assert_same(speak(bagel, force=force, capture=True), eager)
    assert recorder.records == 1
    assert recorder.replays == 19 - 1 + 1  # and the one that was compared


def test_a_graph_lives_as_long_as_one_call(bagel, monkeypatch):
    made: list[Recorder] = []
    monkeypatch.setattr(decode, "make_recorder", lambda device: made.append(Recorder()) or made[-1])
    force = [[5] * 20] * 8
    texts = []
    for factor in (1.0, 0.5):  # as a learner changes its weights, in place
        with torch.no_grad():
            bagel.language_model.lm_head.weight.mul_(factor)
        eager = speak(bagel, force=force, capture=False)
        texts.append(speak(bagel, force=force, capture=True))
        assert_same(texts[-1], eager)
    assert texts[0] != texts[1]

    def interrupt(row: int, token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        speak(bagel, force=force, capture=True, on_token=interrupt)
    assert [(one.records, one.closed) for one in made] == [(1, 1)] * 3


def test_the_first_replay_is_compared_with_an_eager_step(bagel, recorder, capsys):
    recorder.noise = 1.0
    eager = speak(bagel, capture=False)
    assert_same(speak(bagel, capture=True), eager)
    assert recorder.replays == recorder.closed == 1
    assert bagel.capture is False  # and further calls do not try again
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("note: text is said without a CUDA graph: its logits differ by 1 from")


def test_a_graph_that_holds_on_to_its_first_ids_is_found_out(bagel, recorder, capsys):
    eager, embed = speak(bagel, capture=False), bagel.embed_ids

    def replay():  # with the ids of the capture
        bagel.embed_ids = lambda ids: embed(torch.zeros_like(ids))
        output = recorder.output.copy_(recorder.forward())
        bagel.embed_ids = embed
        return output

    recorder.replay = replay
    assert_same(speak(bagel, capture=True), eager)
    assert "note: text is said without a CUDA graph: its logits differ" in capsys.readouterr().err


@pytest.mark.parametrize("never_runs", [False, True])
@pytest.mark.parametrize("halves", [False, True])
def test_a_capture_that_fails_changes_no_result(
    bagel, recorder, capsys, halves, never_runs, monkeypatch
):
    monkeypatch.setattr(decode, "FEW_ROWS", 0)
    recorder.never_runs = never_runs
    force = [[5] * n for n in (20, 20, 20, 20, 12, 3, 9, 9)]
    eager = speak(bagel, force=force, capture=False)
    record = recorder.record

    def later(forward):  # the second capture fails
        recorder.refuses = not halves or recorder.records == 1
        return record(forward)

    recorder.record = later
    assert_same(speak(bagel, force=force, capture=True), eager)
    assert (recorder.records, recorder.closed) == (1 + halves, 1)
    [line] = capsys.readouterr().err.splitlines()
    assert line == "note: text is said without a CUDA graph: this waits"


def test_a_replay_that_fails_late_drops_the_rows_that_have_finished(bagel, recorder, monkeypatch):
    """It gives up while finished rows are still in their places."""
    monkeypatch.setattr(decode, "KEYS_STEP", 8)
    monkeypatch.setattr(decode, "MIN_STEPS", 2)
    force = [[5] * n for n in (20, 20, 3, 20, 20, 5, 20, 20)]
    eager = speak(bagel, force=force, capture=False)
    record = recorder.record

    def later(forward):
        recorder.refuses = recorder.records == 2
        return record(forward)

    recorder.record = later
    assert_same(speak(bagel, force=force, capture=True), eager)
    assert recorder.records == 3


def test_broken_weights_are_reported_as_such(bagel, recorder, monkeypatch, capsys):
    whole = bagel.logits
    count = iter(range(100))
    monkeypatch.setattr(
        bagel, "logits", lambda x: whole(x) * (torch.nan if next(count) > 1 else 1.0)
    )
    with pytest.raises(FloatingPointError, match="no probability"):
        speak(bagel, capture=True)
    assert recorder.closed == 1
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_what_must_not_be_captured_is_not(bagel, recorder, capsys):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        StaticDecoder(bagel, Engine(bagel).caches(ragged(bagel)[:1]), [(1,)], 20, 20)
    assert "autocast" in capsys.readouterr().err
    assert recorder.closed == 1


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch) -> list[graphs.Recorder]:
    """The recorder of each capture that was begun."""
    begun, record = [], graphs.Recorder.record
    monkeypatch.setattr(
        graphs.Recorder, "record", lambda self, forward: begun.append(self) or record(self, forward)
    )
    return begun


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_give_the_log_probs_of_eager_ones(
    checkpoint, dtype, recorded, capsys, monkeypatch
):
    monkeypatch.setattr(decode, "KEYS_STEP", 32)  # several captures
    bagel = Bagel.from_pretrained(checkpoint, device="cuda", dtype=dtype)
    force = [[5 + row + i for i in range(20 + 10 * row)] for row in range(8)]
    options = {"force": force, "max_tokens": 96}
    for factor in (1.0, 0.5):  # the second call finds other weights in the same place
        with torch.no_grad():
            bagel.language_model.lm_head.weight.mul_(factor)
        expected = speak(bagel, capture=False, **options)
        recorded.clear()
        for one, other in zip(speak(bagel, **options), expected, strict=True):
            assert one.sampled_ids == other.sampled_ids
            near = 1e-3 if dtype == "float32" else 0.3
            assert one.logprobs == pytest.approx(other.logprobs, abs=near)
        assert len(recorded) > 2
        assert len(set(recorded)) == 1
        assert recorded[0].graph is None  # it is gone with the call
    assert capsys.readouterr().err == ""
    assert bagel.capture is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_that_waits_for_the_host_is_not_captured(checkpoint, recorded, capsys):
    bagel = Bagel.from_pretrained(checkpoint, device="cuda", dtype="float32")
    norm = bagel.language_model.model.norm
    hook = norm.register_forward_hook(lambda module, given, out: out * (out.sum().item() * 0 + 1))
    said = speak(bagel)
    assert "note: text is said without a CUDA graph" in capsys.readouterr().err
    assert bagel.capture is False
    hook.remove()
    bagel.capture = None
    for one, other in zip(said, speak(bagel), strict=True):
        assert one.sampled_ids == other.sampled_ids
    assert bagel.capture is None  # and a later capture works
    assert len(recorded) == 2
