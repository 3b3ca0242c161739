"""Trajectories → rows → packed pieces: what a model learns from one trajectory, kind by kind.

    rows = expand(found.records, found.anchors)        # {"controller": [Row, ...], ...}
    check_release_counts(found)                        # 29,529 / 58,020 / 58,020 / 20,529 / 1,265
    layer = Layer(tokens, transforms, system_prompt)
    example = layer.lay(rows["controller"][0])         # pieces for `packing.pack_row`

kind          one row for       what the model sees → learns
controller    a trajectory      all of it → every turn
transition    an image drawn    the image before it, the edit alone → the image
verifier      an image drawn    all up to and with it → the turn that looks at it
penultimate   as verifier       only where that turn asks for the trajectory's last edit
anchor        an anchor         the prompt → the image
whole         a trajectory      all of it in the running context → every turn and every image

A row is a few words until it is laid out; nothing is written and no pixel is read before that.
What each head sees comes from `agent.views`. A turn or an image with `learn` off carries no loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from agent.types import EditView, Seen, View
from agent.views import edit_view, first_image_view, reflect_view
from sft.data import Found, Record, expected
from sft.data_release import OLD_FORMAT, system_prompt
from sft.weights import Weighting, weighted_ids
from umm_reflect.context import ImageSegment, TextSegment
from umm_reflect.errors import UserError
from umm_reflect.images import Transforms
from umm_reflect.packing import Piece
from umm_reflect.rng import stream_seed
from umm_reflect.tokens import Tokens

Kind = Literal["controller", "transition", "verifier", "penultimate", "anchor", "whole"]
Branch = Literal["conditional", "text_uncond", "image_uncond"]
Droppable = Literal["text", "vae", "vit"]

RELEASE_KINDS: tuple[Kind, ...] = get_args(Kind)[:5]  # all but "whole"
RELEASE_COUNTS = {
    "trajectories": 29_529,
    "t2i": 15_000,
    "edit": 14_529,
    "controller": 29_529,
    "transition": 58_020,
    "t2i_initial": 15_000,
    "t2i_transition": 16_242,
    "edit_transition": 26_778,
    "verifier": 58_020,
    "verifier to edit": 28_491,
    "verifier to done": 29_529,
    "penultimate": 20_529,
    "anchor": 1_265,
    "rows": 167_363,
    "payload exact": 56_859,
    "payload render_truncated": 1_155,
    "payload whitespace_normalized": 6,
}


# --- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the trajectory it is of and, where it is about one image, that image's number."""

    kind: Kind
    uid: str
    record: Record
    image: int = -1

    @property
    def turn(self) -> int:
        """Of a verifier row: the number of the turn that looks at its image."""
        return self.image + self.record.planned


def expand(
    records: Iterable[Record],
    anchors: Iterable[Record] = (),
    kinds: Sequence[Kind] = RELEASE_KINDS,
) -> dict[Kind, list[Row]]:
    """The rows of each kind in the order of their uids, which no process or batch changes.

    Errors: ValueError for an unknown kind.
    """
    if unknown := [kind for kind in kinds if kind not in get_args(Kind)]:
        raise ValueError(f"unknown kind {unknown[0]!r}; choose from {', '.join(get_args(Kind))}")
    rows: dict[Kind, list[Row]] = {kind: [] for kind in kinds}
    for record in records:
        for row in rows_of(record):
            if row.kind in rows:
                rows[row.kind].append(row)
    if "anchor" in rows:
        rows["anchor"] += [Row("anchor", record.uid, record, 0) for record in anchors]
    return {kind: sorted(some, key=lambda row: row.uid) for kind, some in rows.items()}


def rows_of(record: Record) -> list[Row]:
    """All rows of one trajectory, those without anything to learn left out."""
    rows = []
    if any(said.learn for said in record.turns):
        rows.append(Row("controller", record.uid, record))
    for image in range(record.first_drawn, len(record.images)):
        if record.images[image].learn:
            uid = f"{pair_type(record, image)}::{record.uid}::{image:04d}"
            rows.append(Row("transition", uid, record, image))
        turn = image + record.planned
        said = record.turns[turn]
        if said.learn:
            uid = f"verifier::{record.uid}::{image:04d}::{said.reflection.action}"
            rows.append(Row("verifier", uid, record, image))
            if is_penultimate(record, turn):
                rows.append(Row("penultimate", uid, record, image))
    learns = any(said.learn for said in record.turns)
    if learns or any(image.learn for image in record.images[record.first_drawn :]):
        rows.append(Row("whole", record.uid, record))
    return rows


def pair_type(record: Record, image: int) -> str:
    """The release's word for what a drawn image follows from."""
    if record.task == "edit":
        return "edit_transition"
    return "t2i_transition" if image else "t2i_initial"


def is_penultimate(record: Record, turn: int) -> bool:
    """Whether a turn asks for the trajectory's last edit (the one before its done)."""
    return turn == len(record.turns) - 2


def payload(record: Record, image: int) -> str:
    """What an image was drawn from: the [EDIT] of its turn, or the prompt where no turn asked."""
    turn = image if record.planned else image - 1
    return record.turns[turn].reflection.edit if turn >= 0 else record.prompt


def columns(row: Row, prompt_file: str | None = None) -> dict[str, Any]:
    """The row as the release's row files have it, column by column.

    prompt_file: text of the released system prompt, which stored prompts of the release need.
    """
    record = row.record
    if row.kind == "anchor":
        return {"uid": record.uid, "task": "t2i", "user_prompt": record.prompt}
    if row.kind == "transition":
        return {
            "pair_uid": row.uid,
            "uid": record.uid,
            "task": record.task,
            "pair_type": pair_type(record, row.image),
            "payload": payload(record, row.image),
            "source_step_index": row.image - 1,
            "target_step_index": row.image,
            "target_image_sha256": record.images[row.image].sha256,
        }
    common = {
        "uid": record.uid,
        "task": record.task,
        "trajectory_subtype": record.subtype,
        "user_prompt": record.prompt,
        "system_prompt": trained_system_prompt(record, prompt_file),
    }
    if row.kind in ("controller", "whole"):
        said = _said_columns(record, len(record.turns), "response")
        actions = [turn.reflection.action for turn in record.turns]
        return {
            **common,
            **said,
            "response_action_list": actions,
            "source_image_step_index": record.first_drawn - 1,
            "milestone_plan_text": record.plan,
        }
    target = record.turns[row.turn]
    number, source = expected(record.task, record.planned, row.turn)
    return {
        "state_uid": row.uid,
        **common,
        **_said_columns(record, row.turn, "prefix"),
        "target_response": target.text,
        "target_action": target.reflection.action,
        "target_round_index": number,
        "target_source_image": source,
        "current_step_index": row.image,
        "is_penultimate": is_penultimate(record, row.turn),
    }


def _said_columns(record: Record, count: int, name: str) -> dict[str, list[Any]]:
    places = [expected(record.task, record.planned, turn) for turn in range(count)]
    edits = [record.turns[turn].reflection.action == "edit" for turn in range(count)]
    return {
        f"{name}_list" if name == "response" else f"{name}_response_list": [
            record.turns[turn].text for turn in range(count)
        ],
        f"{name}_round_list": [number for number, _ in places],
        f"{name}_source_image_list": [source for _, source in places],
        f"{name}_image_step_list": [
            record.draws(turn) if edit else -1 for turn, edit in enumerate(edits)
        ],
    }


def trained_system_prompt(record: Record, prompt_file: str | None) -> str:
    """The system prompt of a trajectory: its own, the release's brought up to date, or the file's.

    Errors: UserError where a stored prompt of the release lacks the file that mends it.
    """
    stored = record.system_prompt
    if stored is None:
        return prompt_file or ""
    if not OLD_FORMAT.search(stored):
        return stored
    if prompt_file is None:
        raise UserError(
            "the release's rows need the released system prompt",
            "Give --system-prompt FILE (umm-reflect download prompt fetches it).",
        )
    return system_prompt(stored, prompt_file)


# --- counts ---------------------------------------------------------------------------------------


def counts(found: Found, rows: Mapping[Kind, Sequence[Row]] | None = None) -> dict[str, int]:
    """The numbers of RELEASE_COUNTS for a dataset."""
    rows = expand(found.records, found.anchors) if rows is None else rows
    transitions, verifiers = rows["transition"], rows["verifier"]
    pairs = [pair_type(row.record, row.image) for row in transitions]
    to_done = sum(row.record.turns[row.turn].reflection.action == "done" for row in verifiers)
    origins = [origin for record in found.records for origin in record.payload_sources]
    tasks = [record.task for record in found.records]
    return {
        "trajectories": len(found.records),
        **{task: tasks.count(task) for task in ("t2i", "edit")},
        "controller": len(rows["controller"]),
        "transition": len(transitions),
        **{pair: pairs.count(pair) for pair in ("t2i_initial", "t2i_transition")},
        "edit_transition": pairs.count("edit_transition"),
        "verifier": len(verifiers),
        "verifier to edit": len(verifiers) - to_done,
        "verifier to done": to_done,
        "penultimate": len(rows["penultimate"]),
        "anchor": len(rows["anchor"]),
        "rows": sum(len(rows[kind]) for kind in RELEASE_KINDS),
        **{
            f"payload {origin}": origins.count(origin)
            for origin in ("exact", "render_truncated", "whitespace_normalized")
        },
    }


def check_release_counts(found: Found) -> None:
    """Errors: UserError that names every count in which a dataset is not the released one."""
    here = counts(found)
    wrong = [
        f"{name} {here[name]:,} instead of {count:,}"
        for name, count in RELEASE_COUNTS.items()
        if here[name] != count
    ]
    if wrong:
        raise UserError(f"this is not the released data: {'; '.join(wrong)}", "Fetch it again.")


# --- pieces ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StandIn(ImageSegment):
    """An image of the right size without pixels (meta tensors): picture `number` of a row."""

    row: Row | None = None
    number: int = -1


@dataclass(frozen=True)
class Laid:
    """A row as pieces for `packing.pack_row`.

    droppable: for each piece what the release's dropout may leave out ("text", "vae", "vit"), or
    None; an image that may lose its latents and its patches apart is two pieces.
    """

    pieces: tuple[Piece, ...]
    droppable: tuple[Droppable | None, ...]


class Layer:
    """Lays rows out. system_prompt: text for trajectories without one of their own (None: none);
    the release's stored prompts are brought up to date with it.

    edit_view: what transitions and anchors are drawn from; "local" is the release's. full_view: the
    share of them, by their uid, that has the full view all the same. stand_ins: images without
    pixels (meta tensors of the right size), to plan packs by length without reading any. One layer
    serves one process; it keeps the ids of system prompts, nothing else.
    """

    def __init__(
        self,
        tokens: Tokens,
        transforms: Transforms,
        system_prompt: str | None = None,
        weighting: Weighting = "release",
        edit_view: EditView = "local",
        full_view: float = 0.0,
        stand_ins: bool = False,
    ):
        self.tokens, self.transforms, self.system_prompt = tokens, transforms, system_prompt
        self.weighting, self.edit_view, self.full_view = weighting, edit_view, full_view
        self.stand_ins = stand_ins
        self._system: dict[str, TextSegment] = {}

    def lay(self, row: Row, branch: Branch = "conditional") -> Laid:
        """The pieces of a row; its pictures are read, decoded and resized here.

        branch: of a transition or an anchor, what the image is drawn from: everything, or what
        guidance steers away from. Errors: BadRow for a picture that cannot be used.
        """
        if row.kind == "anchor":
            seen = Seen(self._system_segment(row.record), self._text(row.record.prompt))
            view = first_image_view(seen, self.view(row))
            return self._drawing(view, self._image(row, 0), branch)
        if row.kind == "transition":
            return self._transition(row, branch)
        if branch != "conditional":
            raise ValueError(f"a {row.kind} row is not drawn and has no branch {branch!r}")
        return self._running(row)

    def _transition(self, row: Row, branch: Branch) -> Laid:
        record, target = row.record, self._image(row, row.image)
        asked = row.image if record.planned else row.image - 1  # the turn that asked for it
        # what lies further back is not seen in the local view, and not decoded
        sees = self.view(row)
        first = row.image - 1 if sees == "local" else 0
        seen, _ = self._seen(record, asked + 1, first=first, row=row)
        view = edit_view(seen, sees) if row.image else first_image_view(seen, sees)
        return self._drawing(view, target, branch)

    def view(self, row: Row) -> EditView:
        """What a row that is drawn sees."""
        lot = stream_seed(0, row.uid, 0, "view") / 2**64 if self.full_view else 1.0
        return "full" if lot < self.full_view else self.edit_view

    def _running(self, row: Row) -> Laid:
        record, whole = row.record, row.kind == "whole"
        last = row.turn if row.kind in ("verifier", "penultimate") else len(record.turns) - 1
        seen, learned = self._seen(record, last + 1, row=row)
        if row.kind in ("verifier", "penultimate"):
            learned = {last: learned[last]} if last in learned else {}
        spoken = {id(turn): k for k, turn in enumerate([*filter(None, [seen.plan]), *seen.turns])}
        number = {id(image): k for k, image in enumerate(seen.images)}
        pieces: list[Piece] = []
        droppable: list[Droppable | None] = []
        for segment in reflect_view(seen):
            turn, image = spoken.get(id(segment)), number.get(id(segment))
            if turn in learned:
                pieces.append(Piece(segment, learn=True, weights=learned[turn]))
            else:
                if whole and image is not None and self._draws(record, image):
                    pieces.append(Piece(segment, learn=True))
                    droppable.append(None)
                pieces.append(Piece(segment))
            request = segment is seen.system or segment is seen.request
            droppable.append("text" if request and not whole else None)
        return Laid(tuple(pieces), tuple(droppable))

    def _drawing(self, view: View, target: ImageSegment, branch: Branch) -> Laid:
        context = getattr(view, branch)
        pieces: list[Piece] = []
        droppable: list[Droppable | None] = []
        for segment in view.conditional if context is None else context:
            if isinstance(segment, ImageSegment):
                halves, kinds = _halves(segment)
                pieces += halves
                droppable += kinds
            else:
                pieces.append(Piece(segment))
                droppable.append("text")
        return Laid((*pieces, Piece(target, learn=True)), (*droppable, None))

    def _seen(
        self, record: Record, turns: int, *, row: Row, first: int = 0
    ) -> tuple[Seen, dict[int, tuple[float, ...]]]:
        """What is in sight after the first `turns` turns, and the weights of those to learn.

        Images before number `first` are not decoded: no view of this row shows them.
        """
        system = self._system_segment(record)
        seen = Seen(system, self._text(record.prompt), editing=record.task == "edit")
        weights: dict[int, tuple[float, ...]] = {}
        images = 0
        for turn in range(turns):
            if not (record.planned and turn == 0):
                seen = seen.with_image(self._image(row, images, hidden=images < first))
                images += 1
            said = record.turns[turn]
            ids, weighted = weighted_ids(self.tokens, said.text, self.weighting)
            if said.learn:
                weights[turn] = weighted
            edit = said.reflection.edit
            seen = seen.with_turn(TextSegment(ids), self._text(edit) if edit else None)
        return seen, weights

    def _draws(self, record: Record, image: int) -> bool:
        return image >= record.first_drawn and record.images[image].learn

    def _image(self, row: Row, number: int, hidden: bool = False) -> ImageSegment:
        picture = row.record.images[number]
        if not (self.stand_ins or hidden):
            return self.transforms.segment(picture.load())
        size = picture.size or ((1, 1) if hidden else picture.examined("headers").size)
        vae, vit = (torch.empty(3, *s, device="meta") for s in self.transforms.sizes(*size))
        return StandIn(vae, vit, row=row, number=number)

    def _text(self, text: str) -> TextSegment:
        return self.tokens.segment(text, allow_special=False)

    def _system_segment(self, record: Record) -> TextSegment | None:
        text = trained_system_prompt(record, self.system_prompt)
        if text and text not in self._system:
            self._system[text] = self._text(text)
        return self._system[text] if text else None


def _halves(image: ImageSegment) -> tuple[list[Piece], list[Droppable | None]]:
    """An image as its latents and its patches, which take the same tokens and positions apart."""
    pieces: list[Piece] = []
    kinds: list[Droppable | None] = []
    if image.has_vae:
        pieces.append(Piece(replace(image, vit_pixels=None)))
        kinds.append("vae")
    if image.has_vit:
        pieces.append(Piece(replace(image, vae_pixels=None, latent=None)))
        kinds.append("vit")
    return pieces, kinds
