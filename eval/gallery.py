"""report.html: every trajectory of a run to look at, without a server.

    umm-reflect eval shapes553 --log-samples ...            # writes it beside summary.json
    python -m eval.gallery outputs/eval                     # writes it anew

The page shows the figures of summary.json, then each trajectory as a strip: its images with the
verdicts, what the model said of each, and on demand the boxes of what the judge saw. It is filtered
by set and edit view, family, verdict, what became of the first image, how it stopped, and words of
the prompt. The filters stand in the address after #, so that a selection can be passed on.

The page is one file; the images stay where they are, in the traces beside it, and are loaded as
they are scrolled into view. An image that was not kept is a grey tile with its verdict.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eval.best_of import picked
from eval.results import Box, Judged, Look, Result, candidate_place, read_results
from umm_reflect.errors import UserError
from umm_reflect.files import write_aside

REPORT = "report.html"
TEMPLATE = Path(__file__).with_name("templates") / "report.html.j2"

FIGURES = {  # those at the top of the page, where summary.json has them
    "accuracy_at_0": "right at 0 edits",
    "accuracy_at_1": "1 edit",
    "accuracy_at_2": "2 edits",
    "accuracy_at_3": "3 edits",
    "final_accuracy": "handed out",
    "repair": "repaired",
    "damage": "damaged",
    "protocol_valid": "form kept",
    "mean_edits": "edits",
}
MOST_BOXES = 24  # on one image
OUTCOMES = ("right", "repaired", "damaged", "wrong")

FindImage = Callable[[Result, int], "str | None"]  # an address relative to the page


def write_report(
    folder: str | Path,
    results: Sequence[Result] | None = None,
    find_image: FindImage | None = None,
) -> Path:
    """Write report.html into the folder of a finished run (its summary.json is there).

    results: those of the folder if None. find_image: where image number k of a result is, or None;
    by default in its trace. Errors: UserError where the folder holds no finished run.
    """
    from jinja2 import Environment, StrictUndefined

    folder = Path(folder)
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise UserError(
            f"{folder} holds no finished run ({error})", "Name an --output-dir of eval."
        ) from error
    if results is None:
        results = read_results(folder / "results.jsonl")
    find_image = find_image or in_traces(folder)
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    text = page.render(
        summary=summary,
        arms=[
            (set_name, view, figures)
            for set_name, views in summary["sets"].items()
            for view, figures in views.items()
        ],
        figures=FIGURES,
        outcomes=OUTCOMES,
        curve=(folder / "curve.png").exists(),
        # inside <script>: no "</" may end it, and "<!--" may not begin
        data=json.dumps(
            [record(result, find_image, in_candidates(folder)) for result in results],
            ensure_ascii=False,
            separators=(",", ":"),
        ).replace("<", "\\u003c"),
    )
    return write_aside(folder / REPORT, text)


def in_traces(folder: Path) -> FindImage:
    """Images as `agent.trace` keeps them, below the folder of the run."""

    def find(result: Result, number: int) -> str | None:
        path = f"{result.trace_folder}/image_{number}.png"
        return quote(path) if (folder / path).exists() else None

    return find


def in_candidates(folder: Path) -> FindImage:
    """Candidates as `eval.kept` keeps them; their numbers begin at 1."""

    def find(result: Result, number: int) -> str | None:
        path = f"{candidate_place(result.key, number)}/image_0.png"
        return quote(path) if (folder / path).exists() else None

    return find


def record(
    result: Result, find_image: FindImage, find_candidate: FindImage | None = None
) -> dict[str, Any]:
    """What the page knows of a trajectory."""
    return {
        "arm": f"{result.set} {result.edit_view}",
        "family": result.family,
        "prompt": result.prompt,
        "name": f"{result.row}, seed {result.seed}" + (f", {result.copy}" if result.copy else ""),
        "stop": result.stop,
        "outcome": outcome(result),
        "right": result.correct,
        "kept": result.kept,
        "images": [
            _image(image, find_image(result, number)) for number, image in enumerate(result.images)
        ],
        "looks": list(map(_look, result.looks)),
        "candidates": [
            {
                **_image(one.image, find_candidate and find_candidate(result, number)),
                "look": one.look and _look(one.look),
            }
            for number, one in enumerate(result.candidates, start=1)
        ],
        "picked": picked(result) if result.candidates else None,
    }


def _image(image: Judged, file: str | None) -> dict[str, Any]:
    return {
        "right": image.correct,
        "reason": image.reason,
        "score": image.score,
        "file": file,
        "boxes": [[box.label, *box.box, box.score] for box in surest(image.boxes)],
    }


def _look(look: Look) -> dict[str, Any]:
    if look.error is not None:
        return {"said": None, "edit": None, "error": look.error}
    return {"said": f"{look.score:g}/10 {look.action}", "edit": look.edit, "error": None}


def surest(boxes: Sequence[Box]) -> list[Box]:
    """Those that are shown: a detector's evidence holds dozens of faint ones. One without a
    confidence is sure."""
    return sorted(boxes, key=lambda box: -1.0 if box.score is None else -box.score)[:MOST_BOXES]


def outcome(result: Result) -> str:
    """One of OUTCOMES: from the first image to the one that is handed out."""
    if result.correct:
        return "right" if result.correct_at(0) else "repaired"
    return "damaged" if result.correct_at(0) else "wrong"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.gallery", description="Write report.html of a finished run."
    )
    parser.add_argument("folder", type=Path, help="its output folder")
    options = parser.parse_args(argv)
    print(write_report(options.folder))
    return 0


if __name__ == "__main__":
    from umm_reflect.cli import run_program

    sys.exit(run_program(main, sys.argv[1:]))
