"""The grammar of one turn: forced prefix, legal scores, strict parse, canonical text.

A turn is one text. The loop writes the prefix, the policy the rest:

    <think>
    [CURRENT_ROUND] Round#0
    [SCORE] 4/10
    [ACTION] edit
    [THINKING] One circle is missing.
    [SOURCE_IMAGE] Image #0
    </think>
    [EDIT] Add a red circle on the left.

`parse` reads what the policy wrote, as leniently and as strictly as the released system does: text
around the fields is ignored, the source that it names is replaced by the true one, and an edit
without a text is "done". `parse_schema` reads the canonical text and training data and forgives
nothing. Both return a `Reflection` or a `ProtocolError`; what a model wrote never raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from agent.types import ProtocolError, Reflection

Trie = dict[int, "Trie"]  # from token id to what may follow; a leaf is empty

SCORES: tuple[str, ...] = tuple(f"{n}/10" for n in range(11))
EDIT_MARKER = "\n[EDIT] "
FIELDS = ("CURRENT_ROUND", "SCORE", "ACTION", "THINKING", "SOURCE_IMAGE")

_CLOSE = "</think>"
_NO_EDIT = {"", "none", "null", "n/a", "na"}
_EDIT_PLACEHOLDERS = {
    "executable payload",
    "executable payload or none",
    "concrete generation instruction",
    "concrete edit instruction",
}
_THINKING_PLACEHOLDERS = {
    "ground the decision in the visible image.",
    "ground the decision only in the request and supplied image context.",
}
_ACTION_TAG = re.compile(r"\[ACTION\]", re.IGNORECASE)
_ACTION_FIELD = re.compile(
    r"\[ACTION\][ \t]*(edit|done)(?=[ \t]*(?:,|\r|\n|\[[A-Za-z]|</think>))", re.IGNORECASE
)
_THINKING_TAG = re.compile(r"\[THINKING\]", re.IGNORECASE)
_THINKING_FIELD = re.compile(r"\[THINKING\](.*?)(?=\[SOURCE_IMAGE\]|</think>)", re.I | re.S)
_SCORE_LINE = re.compile(r"^[ \t]*\[SCORE\](.*)$", re.IGNORECASE | re.MULTILINE)
_SCORE_VALUE = re.compile(r"[ \t]*(\d{1,2})[ \t]*/[ \t]*10[ \t]*")
_EDIT_TAG = re.compile(r"\[EDIT\]", re.IGNORECASE)
_PROTOCOL_TEXT = re.compile(r"</?think|\[(?:ACTION|EDIT|THINKING|SOURCE_IMAGE|SCORE)\]", re.I)
_SPECIAL_TEXT = re.compile(r"\[CURRENT_ROUND\]|<\|.*?\|>", re.IGNORECASE | re.DOTALL)
_LINE_TAG = re.compile(r"^\[([A-Z][A-Z0-9_]*)\]", re.MULTILINE)
_SOURCE = re.compile(r"None|given|Image #\d+")

# The release's name of each failure (up to its first colon) and ours. Names that no text can reach
# in the release, because an earlier rule of the same meaning comes first, share the code of that
# rule.
RELEASED_CODES: dict[str, ProtocolError] = {
    "proposal_malformed_think": ProtocolError.MALFORMED_THINK,
    "proposal_external_edit_marker_not_exact": ProtocolError.EDIT_MARKER,
    "proposal_external_edit_field_count": ProtocolError.EDIT_COUNT,
    "proposal_external_edit_prefix_not_exact": ProtocolError.EDIT_MARKER,
    "proposal_action_count": ProtocolError.ACTION_COUNT,
    "proposal_thinking_count": ProtocolError.THINKING_COUNT,
    "proposal_thinking_empty": ProtocolError.THINKING_EMPTY,
    "proposal_thinking_placeholder": ProtocolError.THINKING_PLACEHOLDER,
    "proposal_score_count": ProtocolError.SCORE_COUNT,
    "proposal_score_format": ProtocolError.SCORE_FORMAT,
    "proposal_score_range": ProtocolError.SCORE_RANGE,
    "proposal_edit_payload_invalid": ProtocolError.EDIT_WHITESPACE,
    "payload_contains_protocol_text": ProtocolError.EDIT_PROTOCOL_TEXT,
    "empty_payload": ProtocolError.EDIT_EMPTY,
    "proposal_edit_payload_changed": ProtocolError.NOT_CANONICAL,
    "proposal_done_payload_not_exact_none": ProtocolError.DONE_NOT_NONE,
    "malformed_full_schema_controller": ProtocolError.THINKING_HOLDS_EDIT,
    "full_schema_field_order": ProtocolError.FIELD_ORDER,
    "external_edit_payload_protocol_suffix": ProtocolError.EDIT_SPECIAL_TEXT,
    "generated_thinking_placeholder": ProtocolError.THINKING_PLACEHOLDER,
    "generated_edit_payload_placeholder": ProtocolError.EDIT_PLACEHOLDER,
    "external_edit_payload_invalid": ProtocolError.EDIT_WHITESPACE,
    "external_edit_field_count": ProtocolError.EDIT_COUNT,
    "full_schema_field_values": ProtocolError.FIELD_VALUE,
    "full_schema_multiline_context_field": ProtocolError.FIELD_MULTILINE,
    "empty_thinking": ProtocolError.THINKING_EMPTY,
    "current_round_syntax": ProtocolError.ROUND_SYNTAX,
    "current_round_index": ProtocolError.ROUND_INDEX,
    "score_syntax": ProtocolError.SCORE_FORMAT,
    "score_range": ProtocolError.SCORE_RANGE,
    "source_image_syntax": ProtocolError.SOURCE_SYNTAX,
    "source_image_state": ProtocolError.SOURCE_STATE,
    "unknown_action": ProtocolError.ACTION_UNKNOWN,
    "task_source_image_class": ProtocolError.SOURCE_TASK,
    "model-score canonical": ProtocolError.NOT_CANONICAL,
}


def prefix(round_index: int) -> str:
    """The text that the loop writes before the policy goes on with the score."""
    return f"<think>\n[CURRENT_ROUND] Round#{round_index}\n[SCORE] "


def canonical(reflection: Reflection, round_index: int, source: str) -> str:
    """The text of a turn as later turns see it and training data spells it; no final newline."""
    return (
        f"{prefix(round_index)}{reflection.score}/10\n[ACTION] {reflection.action}\n"
        f"[THINKING] {reflection.thinking}\n[SOURCE_IMAGE] {source}\n{_CLOSE}"
        f"{EDIT_MARKER}{reflection.edit or 'None'}"
    )


def parse(text: str, round_index: int, source: str) -> Reflection | ProtocolError:
    """Read a whole turn, prefix and all, by the rules of the released system, in its order.

    source: the true name of the current image (`views.current`); what the text says there is
    ignored.
    """
    E = ProtocolError
    if not text.startswith("<think>") or text.count("<think>") != 1 or text.count(_CLOSE) != 1:
        return E.MALFORMED_THINK
    inside, after = _split(text)
    if not after.startswith(EDIT_MARKER):
        return E.EDIT_MARKER
    if len(_EDIT_TAG.findall(after)) != 1:
        return E.EDIT_COUNT
    actions = _ACTION_FIELD.findall(inside)
    if len(_ACTION_TAG.findall(inside)) != 1 or len(actions) != 1:
        return E.ACTION_COUNT
    thoughts = _THINKING_FIELD.findall(inside)
    if len(_THINKING_TAG.findall(inside)) != 1 or len(thoughts) != 1:
        return E.THINKING_COUNT
    thinking = thoughts[0].strip()
    if not thinking:
        return E.THINKING_EMPTY
    if thinking.casefold() in _THINKING_PLACEHOLDERS:
        return E.THINKING_PLACEHOLDER
    lines = _SCORE_LINE.findall(text)
    if len(lines) != 1:
        return E.SCORE_COUNT
    value = _SCORE_VALUE.fullmatch(lines[0].rstrip("\r"))
    if value is None:
        return E.SCORE_FORMAT
    score = int(value[1])
    if score > 10:
        return E.SCORE_RANGE
    action, edit = actions[0].lower(), after.removeprefix(EDIT_MARKER)
    if action == "edit" and edit.strip().lower() in _NO_EDIT | _EDIT_PLACEHOLDERS:
        return _checked(Reflection(thinking, score, "done", ""), round_index, source)
    if action == "done":
        if edit != "None":
            return E.DONE_NOT_NONE
        return _checked(Reflection(thinking, score, "done", ""), round_index, source)
    if edit != edit.strip():
        return E.EDIT_WHITESPACE
    if _PROTOCOL_TEXT.search(edit):
        return E.EDIT_PROTOCOL_TEXT
    return _checked(Reflection(thinking, score, "edit", edit), round_index, source)


def parse_schema(
    text: str, round_index: int, source: str, *, decimals: bool = False
) -> Reflection | ProtocolError:
    """Read a canonical turn strictly: every field in its place and true, no alias for "done".

    source: what [SOURCE_IMAGE] must say; `given` also means that the task is an editing task, and
    with `None` that it is not. decimals: allow scores such as 7.5/10 (training data of the release
    has them).
    """
    E = ProtocolError
    if not text.startswith("<think>") or text.count("<think>") != 1 or text.count(_CLOSE) != 1:
        return E.MALFORMED_THINK
    inside, after = _split(text)
    if not after.startswith(EDIT_MARKER):
        return E.EDIT_MARKER
    if after.count("[EDIT]") != 1:
        return E.EDIT_COUNT
    if "[EDIT]" in inside:
        return E.THINKING_HOLDS_EDIT
    values = _fields(inside)
    if isinstance(values, ProtocolError):
        return values
    thinking = values["THINKING"].strip()
    if not thinking:
        return E.THINKING_EMPTY
    if thinking.casefold() in _THINKING_PLACEHOLDERS:
        return E.THINKING_PLACEHOLDER
    said_round = re.fullmatch(r"Round#(\d+)", values["CURRENT_ROUND"])
    if said_round is None:
        return E.ROUND_SYNTAX
    if int(said_round[1]) != round_index:
        return E.ROUND_INDEX
    number = re.fullmatch(r"(\d+(?:\.\d+)?)/10" if decimals else r"(\d+)/10", values["SCORE"])
    if number is None:
        return E.SCORE_FORMAT
    score = float(number[1]) if "." in number[1] else int(number[1])
    if score > 10:
        return E.SCORE_RANGE
    if _SOURCE.fullmatch(values["SOURCE_IMAGE"]) is None:
        return E.SOURCE_SYNTAX
    if {values["SOURCE_IMAGE"], source} == {"None", "given"}:
        return E.SOURCE_TASK
    if values["SOURCE_IMAGE"] != source:
        return E.SOURCE_STATE
    action, edit = values["ACTION"], after.removeprefix(EDIT_MARKER)
    if action == "done":
        return Reflection(thinking, score, "done", "") if edit == "None" else E.DONE_NOT_NONE
    if action != "edit":
        return E.ACTION_UNKNOWN
    return _edit_error(edit) or Reflection(thinking, score, "edit", edit)


def payload_ended(text: str) -> bool:
    """Whether the [EDIT] line of a turn is complete: a newline follows its text."""
    _, marker, payload = text.partition(_CLOSE + EDIT_MARKER)
    return bool(marker) and "\n" in payload


def first_payload_line(text: str) -> str:
    """The turn without anything after its [EDIT] line."""
    head, marker, payload = text.partition(_CLOSE + EDIT_MARKER)
    return head + marker + payload.split("\n")[0].rstrip() if marker else text


def score_trie(encode: Callable[[str], Sequence[int]]) -> Trie:
    """The eleven legal scores as a trie over token ids: what the constrained field may hold.

    With digits as single tokens only the root and the node after "1" branch. Raises ValueError if
    the tokenizer does not tell the scores apart, or if one is the beginning of another.
    """
    trie: Trie = {}
    sequences = {score: tuple(encode(score)) for score in SCORES}
    for score, ids in sequences.items():
        for other, longer in sequences.items():
            if score != other and longer[: len(ids)] == ids:
                raise ValueError(
                    f"score {score!r} has the tokens {ids}, which begin the tokens {longer} of "
                    f"{other!r}; the tokenizer must tell the eleven scores apart"
                )
        node = trie
        for token in ids:
            node = node.setdefault(token, {})
    return trie


def _split(text: str) -> tuple[str, str]:
    end = text.index(_CLOSE) + len(_CLOSE)
    return text[:end], text[end:]


def _checked(reflection: Reflection, round_index: int, source: str) -> Reflection | ProtocolError:
    """What was read, if its canonical text keeps the strict schema and says the same."""
    again = parse_schema(canonical(reflection, round_index, source), round_index, source)
    if isinstance(again, ProtocolError):
        return again
    return again if again == reflection else ProtocolError.NOT_CANONICAL


def _fields(inside: str) -> dict[str, str] | ProtocolError:
    """The values of the five fields of a think block, or what is wrong with its structure."""
    body = inside.removeprefix("<think>").removesuffix(_CLOSE)
    tags = list(_LINE_TAG.finditer(body))
    if tuple(tag[1] for tag in tags) != FIELDS or body[: tags[0].start()] != "\n":
        return ProtocolError.FIELD_ORDER
    values = {}
    ends = [*(tag.start() for tag in tags[1:]), len(body)]
    for tag, end in zip(tags, ends, strict=True):
        value = body[tag.end() : end].removesuffix("\n")
        if tag[1] == "THINKING":
            values[tag[1]] = value
            continue
        if not value.startswith(" ") or not value.strip():
            return ProtocolError.FIELD_VALUE
        if "\n" in value:
            return ProtocolError.FIELD_MULTILINE
        values[tag[1]] = value[1:]
    return values


def _edit_error(edit: str) -> ProtocolError | None:
    if edit.strip().lower() in _NO_EDIT:
        return ProtocolError.EDIT_EMPTY
    if edit != edit.strip():
        return ProtocolError.EDIT_WHITESPACE
    if edit.lower() in _EDIT_PLACEHOLDERS:
        return ProtocolError.EDIT_PLACEHOLDER
    if _PROTOCOL_TEXT.search(edit):
        return ProtocolError.EDIT_PROTOCOL_TEXT
    if _SPECIAL_TEXT.search(edit):
        return ProtocolError.EDIT_SPECIAL_TEXT
    return None
