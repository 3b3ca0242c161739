"""The grammar of a turn: legal ones survive a round trip, each malformed one has its code."""

import itertools
from pathlib import Path

import pytest

from agent import protocol
from agent.types import ProtocolError, Reflection

E = ProtocolError
GOLDEN = Path(__file__).resolve().parents[2] / "shared/golden/tiny_bagel"

LEGAL = """<think>
[CURRENT_ROUND] Round#1
[SCORE] 4/10
[ACTION] edit
[THINKING] One circle is missing.
[SOURCE_IMAGE] Image #1
</think>
[EDIT] Add a red circle."""


def edited(old: str, new: str) -> str:
    """The legal turn with one change."""
    assert LEGAL.count(old) == 1, old
    return LEGAL.replace(old, new)


def done(tail: str, action: str = "done") -> str:
    return edited("[ACTION] edit", f"[ACTION] {action}").replace("\n[EDIT] Add a red circle.", tail)


def test_the_forced_prefix_is_spelled_as_the_release_spells_it():
    assert protocol.prefix(0) == "<think>\n[CURRENT_ROUND] Round#0\n[SCORE] "
    assert len(protocol.prefix(9)) == 40


def test_a_legal_turn_reads_as_what_it_says():
    expected = Reflection("One circle is missing.", 4, "edit", "Add a red circle.")
    assert protocol.parse(LEGAL, 1, "Image #1") == expected
    assert protocol.canonical(expected, 1, "Image #1") == LEGAL
    assert protocol.canonical(Reflection("Right.", 10, "done", ""), 2, "Image #2") == (
        "<think>\n[CURRENT_ROUND] Round#2\n[SCORE] 10/10\n[ACTION] done\n[THINKING] Right.\n"
        "[SOURCE_IMAGE] Image #2\n</think>\n[EDIT] None"
    )


def test_every_legal_turn_survives_a_round_trip():
    thoughts = [
        "One is missing.",
        "first line\nsecond [note] line",
        "5 of 6, so 1 < 2",
        "ein Stück",
    ]
    edits = ["Add a star.", "Paint it red, then\nmove it left", "none of the circles may stay"]
    sources = [(0, "Image #0"), (0, "given"), (0, "None"), (3, "Image #2"), (12, "Image #12")]
    turns = 0
    for thinking, score, (round_index, source) in itertools.product(thoughts, range(11), sources):
        for edit in [*edits, ""]:
            said = Reflection(thinking, score, "edit" if edit else "done", edit)
            text = protocol.canonical(said, round_index, source)
            assert protocol.parse(text, round_index, source) == said
            assert protocol.parse_schema(text, round_index, source) == said
            turns += 1
    assert turns == 4 * 11 * 5 * 4


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", E.MALFORMED_THINK),
        ("endless text without a tag", E.MALFORMED_THINK),
        (" " + LEGAL, E.MALFORMED_THINK),
        (edited("<think>", "<think><think>"), E.MALFORMED_THINK),
        (LEGAL + "</think>", E.MALFORMED_THINK),
        (edited("</think>", ""), E.MALFORMED_THINK),
        (edited("</think>", "</THINK>"), E.MALFORMED_THINK),
        (edited("\n[EDIT] ", "\n\n[EDIT] "), E.EDIT_MARKER),
        (edited("[EDIT] Add", "[EDIT]Add"), E.EDIT_MARKER),
        (edited("\n[EDIT] ", " [EDIT] "), E.EDIT_MARKER),
        (LEGAL + "\n[edit] None", E.EDIT_COUNT),
        (edited("[ACTION] edit\n", ""), E.ACTION_COUNT),
        (edited("[ACTION] edit", "[ACTION] maybe"), E.ACTION_COUNT),
        (edited("[ACTION] edit", "[ACTION] edited"), E.ACTION_COUNT),
        (edited("[ACTION] edit", "[ACTION] edit\n[action] done"), E.ACTION_COUNT),
        (edited("[THINKING] One circle is missing.\n", ""), E.THINKING_COUNT),
        (edited("[THINKING] One", "[THINKING] [THINKING] One"), E.THINKING_COUNT),
        (edited("One circle is missing.", "  "), E.THINKING_EMPTY),
        (
            edited("One circle is missing.", "Ground the decision in the visible IMAGE."),
            E.THINKING_PLACEHOLDER,
        ),
        (
            edited(
                "One circle is missing.",
                "ground the decision only in the request and supplied image context.",
            ),
            E.THINKING_PLACEHOLDER,
        ),
        (edited("[SCORE] 4/10\n", ""), E.SCORE_COUNT),
        (edited("is missing.", "is missing.\n  [SCORE] 5/10"), E.SCORE_COUNT),
        (edited("4/10", "4/9"), E.SCORE_FORMAT),
        (edited("4/10", "four"), E.SCORE_FORMAT),
        (edited("4/10", "4.5/10"), E.SCORE_FORMAT),
        (edited("4/10", "100/10"), E.SCORE_FORMAT),
        (edited("4/10", "11/10"), E.SCORE_RANGE),
        (LEGAL + "\n", E.EDIT_WHITESPACE),
        (edited("[EDIT] Add", "[EDIT]  Add"), E.EDIT_WHITESPACE),
        (LEGAL + " <think", E.EDIT_PROTOCOL_TEXT),
        (LEGAL + " </THINK", E.EDIT_PROTOCOL_TEXT),
        (LEGAL + " [score] 3/10", E.EDIT_PROTOCOL_TEXT),
        (LEGAL + " [Source_Image] x", E.EDIT_PROTOCOL_TEXT),
        (done("\n[EDIT] Add a red circle."), E.DONE_NOT_NONE),
        (done("\n[EDIT] none"), E.DONE_NOT_NONE),
        (done("\n[EDIT] None\n"), E.DONE_NOT_NONE),
        (done("\n[EDIT] None.", action="DONE"), E.DONE_NOT_NONE),
        (edited("is missing.", "wants an [EDIT] now."), E.THINKING_HOLDS_EDIT),
        (edited("is missing.", "is missing.\n[NOTE] so add it"), E.FIELD_ORDER),
        (edited("is missing.", "is missing.\n[CURRENT_ROUND] Round#2"), E.FIELD_ORDER),
        (LEGAL + " [CURRENT_ROUND] Round#2", E.EDIT_SPECIAL_TEXT),
        (LEGAL + " <|im_end|>", E.EDIT_SPECIAL_TEXT),
    ],
)
def test_each_broken_rule_has_its_own_code(text, code):
    assert protocol.parse(text, 1, "Image #1") is code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (edited("</think>", ""), E.MALFORMED_THINK),
        (edited("\n[EDIT] ", "\n\n[EDIT] "), E.EDIT_MARKER),
        (LEGAL + " [EDIT] again", E.EDIT_COUNT),
        (edited("is missing.", "wants an [EDIT]."), E.THINKING_HOLDS_EDIT),
        (edited("[SCORE] 4/10\n[ACTION] edit", "[ACTION] edit\n[SCORE] 4/10"), E.FIELD_ORDER),
        (edited("<think>\n", "<think>"), E.FIELD_ORDER),
        (edited("[ACTION] edit", "[ACTION] "), E.FIELD_VALUE),
        (edited("[ACTION] edit", "[ACTION]edit"), E.FIELD_VALUE),
        (edited("[SOURCE_IMAGE] Image #1", "[SOURCE_IMAGE] Image #1\nmore"), E.FIELD_MULTILINE),
        (edited("One circle is missing.", " "), E.THINKING_EMPTY),
        (
            edited("One circle is missing.", "Ground the decision in the visible image."),
            E.THINKING_PLACEHOLDER,
        ),
        (edited("Round#1", "Round 1"), E.ROUND_SYNTAX),
        (edited("Round#1", "Round#2"), E.ROUND_INDEX),
        (edited("4/10", "4.5/10"), E.SCORE_FORMAT),
        (edited("4/10", "11/10"), E.SCORE_RANGE),
        (edited("Image #1", "image 1"), E.SOURCE_SYNTAX),
        (edited("Image #1", "Image #0"), E.SOURCE_STATE),
        (edited("Image #1", "given"), E.SOURCE_STATE),
        (edited("[ACTION] edit", "[ACTION] Edit"), E.ACTION_UNKNOWN),
        (edited("Add a red circle.", "N/A"), E.EDIT_EMPTY),
        (edited("Add a red circle.", ""), E.EDIT_EMPTY),
        (LEGAL + " ", E.EDIT_WHITESPACE),
        (edited("Add a red circle.", "Concrete edit instruction"), E.EDIT_PLACEHOLDER),
        (LEGAL + " </think", E.EDIT_PROTOCOL_TEXT),
        (LEGAL + " [SCORE]", E.EDIT_PROTOCOL_TEXT),
        (LEGAL + " <|x|>", E.EDIT_SPECIAL_TEXT),
        (done("\n[EDIT] nothing"), E.DONE_NOT_NONE),
    ],
)
def test_the_strict_schema_forgives_nothing(text, code):
    read = protocol.parse_schema(text, 1, "Image #1")
    assert read is code if code else isinstance(read, Reflection)


def test_a_source_that_belongs_to_the_other_task_has_its_own_code():
    given = LEGAL.replace("Round#1", "Round#0").replace("Image #1", "given")
    nothing = given.replace("given", "None")
    assert protocol.parse_schema(given, 0, "None") is E.SOURCE_TASK
    assert protocol.parse_schema(nothing, 0, "given") is E.SOURCE_TASK
    assert protocol.parse_schema(given, 0, "given") == protocol.parse_schema(nothing, 0, "None")


@pytest.mark.parametrize(
    "edit",
    [
        "",
        "None",
        "none",
        " NULL ",
        "n/a",
        "NA\n",
        "Executable payload",
        "concrete generation instruction",
    ],
)
def test_an_edit_without_a_text_means_done(edit):
    read = protocol.parse(edited("Add a red circle.", edit), 1, "Image #1")
    assert read == Reflection("One circle is missing.", 4, "done", "")


@pytest.mark.parametrize(
    "text",
    [
        edited("[ACTION] edit\n", "[ACTION]  EDIT , because\n"),
        edited("4/10\n[ACTION] edit\n", "  4 / 10 \nsome chatter\n[ACTION] edit"),
        edited("[SOURCE_IMAGE] Image #1\n", ""),
        edited("[SOURCE_IMAGE] Image #1", "[SOURCE_IMAGE] given"),
        edited("One circle is missing.", "\n One circle is missing. \n"),
    ],
)
def test_what_the_release_does_not_check_is_not_checked(text):
    expected = Reflection("One circle is missing.", 4, "edit", "Add a red circle.")
    assert protocol.parse(text, 1, "Image #1") == expected


def test_an_edit_of_several_lines_is_legal():
    read = protocol.parse(LEGAL + "\n---\nStep 2", 1, "Image #1")
    assert read.edit == "Add a red circle.\n---\nStep 2"


def test_decimal_scores_are_read_only_where_they_are_asked_for():
    text = edited("4/10", "7.5/10")
    assert protocol.parse(text, 1, "Image #1") is E.SCORE_FORMAT
    assert protocol.parse_schema(text, 1, "Image #1") is E.SCORE_FORMAT
    read = protocol.parse_schema(text, 1, "Image #1", decimals=True)
    assert read.score == 7.5
    assert protocol.canonical(read, 1, "Image #1") == text
    whole = protocol.parse_schema(LEGAL, 1, "Image #1", decimals=True)
    assert isinstance(whole.score, int)


def test_a_reflection_says_edit_exactly_when_it_has_an_edit():
    with pytest.raises(ValueError, match="does not go with"):
        Reflection("Right.", 10, "done", "Add a star.")
    with pytest.raises(ValueError, match="does not go with"):
        Reflection("Wrong.", 2, "edit", "")


def test_the_payload_line_ends_at_the_first_newline_after_the_marker():
    assert not protocol.payload_ended(LEGAL)
    assert protocol.payload_ended(LEGAL + "\n")
    assert protocol.first_payload_line(LEGAL + " \njunk\n[EDIT] more") == LEGAL
    assert protocol.first_payload_line("no marker\nat all") == "no marker\nat all"


def test_every_failure_of_the_release_has_a_code_of_ours():
    assert set(protocol.RELEASED_CODES.values()) <= set(E)
    assert len(protocol.RELEASED_CODES) == 35
    only_ours = set(E) - set(protocol.RELEASED_CODES.values())
    assert only_ours == {E.TRUNCATED, E.REPEATED_TEXT}


def digits_single(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_the_score_trie_branches_at_the_root_and_after_a_one():
    trie = protocol.score_trie(digits_single)
    assert sorted(trie) == [ord(d) for d in "0123456789"]
    assert sorted(trie[ord("1")]) == [ord("/"), ord("0")]
    assert trie[ord("7")] == {ord("/"): {ord("1"): {ord("0"): {}}}}
    assert trie[ord("1")][ord("0")] == {ord("/"): {ord("1"): {ord("0"): {}}}}


def test_a_tokenizer_that_mixes_up_the_scores_is_refused():
    with pytest.raises(ValueError, match="must tell the eleven scores apart"):
        protocol.score_trie(lambda text: [ord(text[0])])
    with pytest.raises(ValueError, match="'3/10' has the tokens"):
        protocol.score_trie(lambda text: [] if text == "3/10" else digits_single(text))


def test_the_scores_make_a_trie_with_a_real_tokenizer():
    if not GOLDEN.exists():
        pytest.skip("shared data: the golden folder is not there")
    from umm_reflect.tokens import Tokens

    tokens = Tokens.from_folder(GOLDEN)
    trie, leaves = protocol.score_trie(tokens.encode), []

    def walk(node, ids):
        for token, rest in node.items():
            walk(rest, [*ids, token])
        if not node:
            leaves.append(tokens.decode(ids))

    walk(trie, [])
    assert sorted(leaves) == sorted(protocol.SCORES)
