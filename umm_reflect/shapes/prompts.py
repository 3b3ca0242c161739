"""What a prompt of the shapes world asks for: metadata rows in GenEval's schema, and their words.

A row is `{tag, include, [exclude,] prompt}` as in GenEval; `draw_row` draws one, `canonical_spec`
says which rows ask for the same, `phrase` puts a row into other words. Kinds differ between the
clauses of a row, so a kind names a clause.

    row = position_row(clause("moon"), clause("star"), "left of")
    row["prompt"]                        # "a star left of a moon"
    phrase(row, random.Random(0))        # for example "draw a moon with a star to its left"
    mirrored = position_row(clause("star"), clause("moon"), "right of")
    canonical_spec(row) == canonical_spec(mirrored)
"""

import random
import re
from collections.abc import Sequence
from typing import NotRequired, TypedDict

from umm_reflect.shapes.scene import COLORS, KINDS, MIRRORED, RELATIONS

# GenEval's families in GenEval's order, and one of ours.
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr", "compound")

# What `draw_row` draws: the tags, and three families of the harder split, whose rows carry the tags
# counting, compound and compound.
HARD_FAMILIES = ("hard_counting", "hard_compound", "hard_relation")
FAMILIES = TAGS + HARD_FAMILIES
# Drawn for training only, with the tag compound: two or three clauses, some with a color, some with
# a count, or two colored objects in a relation. Test rows combine what the other families never do,
# so training has to combine too.
MIXED = "mixed"

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")

# `position` is [relation, index of the anchor clause in include].
Clause = TypedDict(
    "Clause",
    {
        "class": str,
        "count": int,
        "color": NotRequired[str],
        "position": NotRequired[list[str | int]],
    },
)
Exclusion = TypedDict("Exclusion", {"class": str, "count": int})


class Row(TypedDict):
    tag: str
    include: list[Clause]
    exclude: NotRequired[list[Exclusion]]
    prompt: str


Spec = tuple[tuple[tuple[str, int, str], ...], tuple[tuple[str, str, str], ...]]


def clause(kind: str, count: int = 1, color: str | None = None) -> Clause:
    """An include clause; raises ValueError for a kind, color or count the world does not have."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; choose from {', '.join(KINDS)}")
    if color is not None and color not in COLORS:
        raise ValueError(f"unknown color {color!r}; choose from {', '.join(COLORS)}")
    if not 1 <= count < len(NUMBERS):
        raise ValueError(f"count must be in 1..{len(NUMBERS) - 1}, got {count}")
    if color is None:
        return {"class": kind, "count": count}
    return {"class": kind, "count": count, "color": color}


def plain_row(tag: str, clauses: Sequence[Clause]) -> Row:
    """A row without a relation. Counting and compound rows ask for exact counts, so they exclude
    one more of each kind; the others are GenEval's "at least one"."""
    if len({part["class"] for part in clauses}) < len(clauses):
        raise ValueError("the clauses of a row must have different kinds")
    row: Row = {"tag": tag, "include": list(clauses), "prompt": listing([noun(c) for c in clauses])}
    return _exact(row) if tag in ("counting", "compound") else row


def position_row(
    anchor: Clause, subject: Clause, relation: str, others: Sequence[Clause] = ()
) -> Row:
    """A row with one relation, clauses in GenEval's order (anchor, then subject), then any others.
    The tag is position, or compound (with exact counts) where the clauses say more than kinds."""
    if relation not in RELATIONS:
        raise ValueError(f"unknown relation {relation!r}; choose from {', '.join(RELATIONS)}")
    placed: Clause = {**subject, "position": [relation, 0]}
    prompt = f"{noun(subject)} {relation} {noun(anchor)}"
    if not others and "color" not in anchor and "color" not in subject:
        return {"tag": "position", "include": [anchor, placed], "prompt": prompt}
    rest = "".join(f", and {noun(other)}" for other in others)
    include = [anchor, placed, *others]
    return _exact({"tag": "compound", "include": include, "prompt": prompt + rest})


def _exact(row: Row) -> Row:
    exclude: list[Exclusion] = [
        {"class": c["class"], "count": c["count"] + 1} for c in row["include"]
    ]
    return {
        "tag": row["tag"],
        "include": row["include"],
        "exclude": exclude,
        "prompt": row["prompt"],
    }


def canonical_spec(row: Row) -> Spec:
    """What a row asks for, apart from tag, words and order: its sorted (kind, count, color or "")
    and its relations, each written with left of or above (mirrored relations are one spec)."""
    kinds = [part["class"] for part in row["include"]]
    counts = sorted(
        (part["class"], part["count"], part.get("color", "")) for part in row["include"]
    )
    relations = []
    for part in row["include"]:
        if "position" in part:
            relation, anchor = part["position"]
            subject, other = part["class"], kinds[int(anchor)]
            if relation in ("right of", "below"):
                subject, relation, other = other, MIRRORED[str(relation)], subject
            relations.append((subject, str(relation), other))
    return tuple(counts), tuple(sorted(relations))


# --- drawing rows -------------------------------------------------------------------------------


def draw_row(rng: random.Random, family: str) -> Row:
    """A row of a family by lot, held out or not; training takes `sampler.sample_row`."""
    if family == "single_object":
        return plain_row("single_object", [clause(rng.choice(KINDS))])
    if family == "counting":
        return plain_row("counting", [clause(rng.choice(KINDS), rng.randint(2, 4))])
    if family == "hard_counting":
        color = rng.choice(COLORS) if rng.random() < 0.5 else None
        return plain_row("counting", [clause(rng.choice(KINDS), rng.randint(5, 6), color)])
    if family == "colors":
        return plain_row("colors", [clause(rng.choice(KINDS), 1, rng.choice(COLORS))])
    if family == "two_object":
        return plain_row("two_object", [clause(kind) for kind in rng.sample(KINDS, 2)])
    if family == "position":
        anchor, subject = rng.sample(KINDS, 2)
        return position_row(clause(anchor), clause(subject), rng.choice(RELATIONS))
    if family in ("color_attr", "hard_relation"):
        many = 2 if family == "color_attr" else 3
        kinds, colors = rng.sample(KINDS, many), rng.sample(COLORS, many)
        parts = [clause(kind, 1, color) for kind, color in zip(kinds, colors, strict=True)]
        if family == "color_attr":
            return plain_row("color_attr", parts)
        return position_row(parts[0], parts[1], rng.choice(RELATIONS), parts[2:])
    if family in ("compound", "hard_compound"):
        counts = rng.choice(_COUNTS[family])
        kinds = rng.sample(KINDS, len(counts))
        pairs = zip(kinds, counts, strict=True)
        return plain_row("compound", [clause(k, n, rng.choice(COLORS)) for k, n in pairs])
    if family == MIXED:
        kinds = rng.sample(KINDS, rng.choice((2, 2, 3)))
        if len(kinds) == 2 and rng.random() < 0.4:
            parts = [
                clause(kind, 1, color)
                for kind, color in zip(kinds, rng.sample(COLORS, 2), strict=True)
            ]
            return position_row(*parts, rng.choice(RELATIONS))
        counts = [rng.choice((1, 1, 1, 2)) for _ in kinds]
        colors = [rng.choice(COLORS) if rng.random() < 0.4 else None for _ in kinds]
        parts = [clause(*part) for part in zip(kinds, counts, colors, strict=True)]
        return plain_row("compound", parts)
    raise ValueError(f"unknown family {family!r}; choose from {', '.join((*FAMILIES, MIXED))}")


def _splits(totals: Sequence[int], most: int) -> list[tuple[int, ...]]:
    twos = [(a, b) for a in range(1, most + 1) for b in range(1, most + 1)]
    threes = [(a, b, c) for a, b in twos for c in range(1, most + 1)]
    return [counts for counts in twos + threes if sum(counts) in totals]


# Counts of the clauses of a compound row: two or three clauses, three to five objects (hard: five
# or six).
_COUNTS = {"compound": _splits((3, 4, 5), 4), "hard_compound": _splits((5, 6), 4)}


# --- words --------------------------------------------------------------------------------------


def plural(kind: str) -> str:
    return kind + ("es" if kind.endswith("s") else "s")


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def noun(part: Clause) -> str:
    """A clause in its canonical words: "a star", "an orange moon", "two red circles"."""
    color, kind, count = part.get("color"), part["class"], part["count"]
    words = [color] if color else []
    words.append(kind if count == 1 else plural(kind))
    return " ".join([article(words[0]) if count == 1 else NUMBERS[count], *words])


def listing(parts: Sequence[str], last: str = "and") -> str:
    """ "a", "a and b", "a, b and c"."""
    return f" {last} ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


_VERBS = ("draw", "paint", "show", "make", "create", "show me", "i want", "please draw")
_MEDIA = ("a picture", "an image", "a photo", "a drawing", "draw a picture", "i want a picture")
_OPENINGS = (
    *["{}"] * 6,  # mostly the bare request
    *[verb + " {}" for verb in _VERBS],
    *[medium + " of {}" for medium in _MEDIA],
    "{} please",
    "can you draw {}",
    "there should be {}",
    "a picture with {}",
    "an image that shows {}",
)
_JOINS = ("and", "and", "and", "with", "and also", "together with")
_RELATION_FORMS = {
    "left of": (
        "{s} to the left of {a}",
        "{s} on the left of {a}",
        "{s} on the left and {a} on the right",
        "{a} with {s} to its left",
        "{a} on the right and {s} on the left",
    ),
    "right of": (
        "{s} to the right of {a}",
        "{s} on the right of {a}",
        "{s} on the right and {a} on the left",
        "{a} with {s} to its right",
        "{a} on the left and {s} on the right",
    ),
    "above": (
        "{s} over {a}",
        "{s} placed above {a}",
        "{s} at the top and {a} at the bottom",
        "{a} with {s} above it",
        "{a} at the bottom and {s} at the top",
    ),
    "below": (
        "{s} under {a}",
        "{s} placed below {a}",
        "{s} at the bottom and {a} at the top",
        "{a} with {s} below it",
        "{a} at the top and {s} at the bottom",
    ),
}


def phrase(row: Row, rng: random.Random) -> str:
    """The row's request in other words that ask for the same; one time in four its own prompt."""
    if rng.random() < 0.25:
        return row["prompt"]
    include = row["include"]
    subject = next((i for i, part in enumerate(include) if "position" in part), None)
    if subject is None:
        parts = [_other_noun(part, rng) for part in include]
        rng.shuffle(parts)
        body = listing(parts, rng.choice(_JOINS))
    else:
        relation, anchor = include[subject]["position"]
        anchor = int(anchor)
        if rng.random() < 0.3:
            subject, anchor, relation = anchor, subject, MIRRORED[str(relation)]
        form = rng.choice(("{s} {relation} {a}", *_RELATION_FORMS[str(relation)]))
        names = {"s": _other_noun(include[subject], rng), "a": _other_noun(include[anchor], rng)}
        body = form.format(relation=relation, **names)
        rest = [_other_noun(p, rng) for i, p in enumerate(include) if i not in (subject, anchor)]
        if rest:
            body = (
                f"{body}, and {listing(rest)}"
                if rng.random() < 0.6
                else f"{listing(rest)}, and {body}"
            )
    text = rng.choice(_OPENINGS).format(body)
    return text + "." if rng.random() < 0.15 else text


def _other_noun(part: Clause, rng: random.Random) -> str:
    color, kind, count = part.get("color"), part["class"], part["count"]
    lot = rng.random()
    if lot < 0.55:
        return noun(part)
    if count == 1:
        determiner = "one" if lot < 0.7 else ("a single" if lot < 0.8 else None)
        name = kind
    else:
        determiner = (
            str(count) if lot < 0.75 else ("exactly " if lot < 0.85 else "") + NUMBERS[count]
        )
        name = plural(kind)
    if color is None:
        return f"{determiner or article(name)} {name}"
    if lot < 0.85:
        return f"{determiner or article(color)} {color} {name}"
    after = f"{name} in {color}" if lot < 0.93 else f"{name} colored {color}"
    return f"{determiner or article(name)} {after}"


def words(text: str) -> list[str]:
    """Lower-case words (of any script) and digits of a text, in order."""
    return re.findall(r"[^\W\d_]+|\d", text.lower())


def _vocabulary() -> tuple[str, ...]:
    forms = [form for group in _RELATION_FORMS.values() for form in group]
    fixed = ("a an one single exactly in colored", *_OPENINGS, *_JOINS, *RELATIONS, *forms)
    known = {word for text in fixed for word in words(re.sub(r"\{\w*\}", " ", text))}
    known |= {*COLORS, *KINDS, *map(plural, KINDS), *NUMBERS[1:], *map(str, range(2, 7))}
    return tuple(sorted(known))


VOCABULARY = _vocabulary()

# What instructions to change an image say besides: verbs, places, what tells two objects apart.
EDIT_WORDS = (
    *("add", "put", "remove", "erase", "delete", "move", "shift", "swap", "exchange", "turn"),
    *("change", "replace", "into", "centre", "leftmost", "rightmost", "topmost", "lowest"),
    *("malformed", "shape"),
)


def unknown_words(prompt: str, *, editing: bool = False) -> list[str]:
    """Words of a prompt (editing: of an instruction) that this world lacks, each once, in order."""
    known = {*VOCABULARY, *EDIT_WORDS} if editing else set(VOCABULARY)
    return [word for word in dict.fromkeys(words(prompt)) if word not in known]
