"""What a row becomes, as a page: its segments, the weight of each token, which images are noised.

    page = html_page(row, layer.lay(row), tokens)      # one file, pictures inside
    for line in summary(row, laid, tokens): print(line)

A token with a loss is coloured by its weight (hover for the number); what carries none is grey.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator

from sft.rows import Laid, Row
from umm_reflect.context import ImageSegment, TextSegment
from umm_reflect.images import to_pil
from umm_reflect.packing import Piece
from umm_reflect.tokens import Tokens

THUMB = 256

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; color: #222; }
section { border-left: 4px solid #ccc; padding: .2rem 1rem; margin: 1rem 0; }
section.learn { border-color: #c60; }
h1 { font-size: 1.3rem; } h2 { font-size: .95rem; margin: .2rem 0; color: #555; }
.text { white-space: pre-wrap; font-family: ui-monospace, monospace; font-size: 13px; }
.none { color: #777; } img { image-rendering: auto; border: 1px solid #aaa; }
"""


def describe(piece: Piece) -> str:
    """One line: what a piece is, how long, and what it is for."""
    segment = piece.segment
    if isinstance(segment, TextSegment):
        what = f"text, {len(segment.ids)} tokens"
        if not piece.learn:
            return f"{what}, condition"
        weights = piece.weights or (1.0,) * (len(segment.ids) + 1)
        return (
            f"{what}, cross-entropy on {sum(w > 0 for w in weights)} of {len(weights)} labels, "
            f"weights {min(weights):.3g} to {max(weights):.3g}, sum {sum(weights):.3g}"
        )
    parts = []
    if segment.vae_pixels is not None:
        height, width = segment.vae_pixels.shape[-2:]
        parts.append(f"latents of {width}x{height} px")
    if piece.learn:
        return f"image, {parts[0]}, noised target (flow matching), hidden from what follows"
    if segment.vit_pixels is not None:
        height, width = segment.vit_pixels.shape[-2:]
        parts.append(f"patches of {width}x{height} px")
    return f"image, {' and '.join(parts)}, condition"


def summary(row: Row, laid: Laid) -> Iterator[str]:
    """The row for a terminal: a line for the row, then one for each piece."""
    yield f"{row.kind} row {row.uid}: {row.record.task}, {row.record.prompt!r}"
    for number, (piece, droppable) in enumerate(zip(laid.pieces, laid.droppable, strict=True)):
        may = f"; dropout may leave out its {droppable}" if droppable else ""
        yield f"{number:3}  {describe(piece)}{may}"


def html_page(row: Row, laid: Laid, tokens: Tokens) -> str:
    """The same as one HTML file, with every token and picture."""
    head, *lines = summary(row, laid)
    weights = [w for piece in laid.pieces if piece.learn and piece.weights for w in piece.weights]
    top = max(weights, default=1.0)
    sections = []
    for piece, line in zip(laid.pieces, lines, strict=True):
        body = _image(piece) if isinstance(piece.segment, ImageSegment) else ""
        if isinstance(piece.segment, TextSegment):
            body = f'<div class="text">{_text(piece, tokens, top)}</div>'
        kind = ' class="learn"' if piece.learn else ""
        sections.append(f"<section{kind}><h2>{html.escape(line)}</h2>{body}</section>")
    return (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(row.uid)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(head)}</h1>\n" + "\n".join(sections) + "\n"
    )


def _text(piece: Piece, tokens: Tokens, top: float) -> str:
    ids = piece.segment.ids
    if not piece.learn:
        return f'<span class="none">{html.escape(tokens.decode(ids))}</span>'
    weights = piece.weights or (1.0,) * (len(ids) + 1)
    spans = []
    for token, weight in zip((*ids, tokens.end), weights, strict=True):
        text = html.escape(tokens.decode([token]))
        shade = f"background:rgba(230,110,0,{0.75 * weight / top:.3f})"
        kind = ' class="none"' if not weight else f' style="{shade}"'
        spans.append(f'<span{kind} title="{weight:.4g}">{text}</span>')
    return "".join(spans)


def _image(piece: Piece) -> str:
    segment = piece.segment
    pixels = segment.vae_pixels if segment.vae_pixels is not None else segment.vit_pixels
    picture = to_pil(pixels)
    picture.thumbnail((THUMB, THUMB))
    data = io.BytesIO()
    picture.save(data, "PNG")
    code = base64.b64encode(data.getvalue()).decode()
    return f'<img alt="" src="data:image/png;base64,{code}">'
