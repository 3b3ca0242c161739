"""The checks of a golden folder's texts and contexts: prefill in turns, pictures, greedy text.

As in parity_primitives.py, what is not known is left to be counted as not covered.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from umm_reflect.parity_golden import Case, Golden, compare_named, packed_kv, text_of_ids
from umm_reflect.parity_implementations import GoldenContext, Implementation
from umm_reflect.parity_report import NotCovered, Report
from umm_reflect.reference import ViTImage

# --- text: prefill in turns -----------------------------------------------------------------------


def check_text(golden: Golden, impl: Implementation, report: Report, file: str) -> None:
    tensors, cases = golden.tensors(file), golden.cases(file)
    groups = [name.removesuffix(".ids") for name in tensors if name.endswith(".ids")]
    contexts: dict[str, list[GoldenContext]] = {}
    lengths: dict[str, list[int]] = {}
    last: list[tuple[int, int]] = []
    # A second turn says how long the contexts were before it: that finds the turn it continues.
    for group in sorted(groups, key=lambda g: int(tensors[f"{g}.kv_lens_before"].sum())):
        names = [name for name in tensors if name.startswith(f"{group}.")]
        with report.guard(file, names):
            ids = tensors[f"{group}.ids"].split(tensors[f"{group}.lens"].tolist())
            before = tensors[f"{group}.kv_lens_before"].tolist()
            contexts[group] = [[text_of_ids(part.tolist(), impl)] for part in ids]
            if any(before):
                earlier = [
                    g
                    for g, held in lengths.items()
                    if held == before and _continues(tensors, group, g, before[0])
                ]
                if not earlier:
                    raise NotCovered("no recorded turn leaves the contexts that it continues")
                contexts[group] = [
                    [*old, *new]
                    for old, new in zip(contexts[earlier[-1]], contexts[group], strict=True)
                ]
            filled = impl.prefill(contexts[group])
            lengths[group] = [one.length for one in filled]
            last = [(one.length, one.position) for one in filled]
            new = [len(one.hidden) for one in filled]
            prompts = cases.get("prompts", {}).get(group)
            actual = {
                "lens": torch.tensor(new, dtype=torch.int32),
                "kv_lens_before": torch.tensor(
                    [one.length - n for one, n in zip(filled, new, strict=True)], dtype=torch.int32
                ),
                "position_ids": torch.cat(
                    [
                        torch.arange(one.position - n, one.position)
                        for one, n in zip(filled, new, strict=True)
                    ]
                ),
                "hidden": torch.cat([one.hidden for one in filled]),
                "logits": torch.cat([one.logits for one in filled]),
                "kv": packed_kv([one.kv for one in filled]),
            }
            if prompts is not None:
                start, end = impl.special_ids["start"], impl.special_ids["end"]
                framed = [i for text in prompts for i in (start, *impl.encode(text), end)]
                actual["ids"] = torch.tensor(framed)
            else:
                report.given(file, f"{group}.ids")
            compare_named(golden, report, file, f"{group}.", actual)
    for case, content in cases.items():
        if case != "prompts":
            check_context_case(golden, impl, report, file, case, content)
            continue
        for key, value in content.items():
            name = f"cases.prompts.{key}"
            with report.guard(file, [name]):
                if key in ("kv_lens_after", "rope_after"):
                    axis = ("kv_lens_after", "rope_after").index(key)
                    report.equal(file, name, list(value), [pair[axis] for pair in last])
                elif key not in groups:
                    raise NotCovered("prompts without recorded tensors, or an unknown value")


def _continues(tensors: Mapping[str, Tensor], group: str, earlier: str, length: int) -> bool:
    """Whether the recorded KV of the first context begins as the earlier turn left it."""
    one, other = (tensors.get(f"{name}.kv") for name in (group, earlier))
    if one is None or other is None:
        return True
    return torch.allclose(one[:, :, :length], other[:, :, :length], atol=1e-3)


# --- contexts with greedy text --------------------------------------------------------------------


def check_context_case(
    golden: Golden, impl: Implementation, report: Report, file: str, case: str, content: object
) -> None:
    """A case with a `segments` list: its KV, lengths, positions, logits and greedy text."""
    if not isinstance(content, Mapping) or "segments" not in content:
        report.not_covered(file, f"cases.{case}", "an unknown case")
        return
    names = [name for name in golden.tensors(file) if name.startswith(f"{case}.")]
    with report.guard(file, names):
        context = golden.context(content["segments"], impl)
        compare_context(golden, impl, report, file, f"{case}.", context)
    with report.guard(file, _value_names(case, content)):
        context = golden.context(content["segments"], impl)
        check_context_values(golden, impl, report, file, case, content, context, f"{case}.")


def _value_names(case: str, content: Case) -> list[str]:
    return [f"cases.{case}.{key}" for key in content if key in CONTEXT_VALUES]


CONTEXT_VALUES = (
    "kv_lens",
    "ropes",
    "start_position",
    "min_top2_margin",
    "decoded",
    "question_ids",
)
CONTEXT_INPUTS = ("segments", "question", "max_length", "do_sample")


def compare_context(
    golden: Golden,
    impl: Implementation,
    report: Report,
    file: str,
    prefix: str,
    context: GoldenContext,
) -> None:
    """Everything that may be recorded of a context under `prefix`."""
    tensors = golden.tensors(file)
    if any(prefix + name in tensors for name in ("kv", "hidden", "logits")):
        filled = impl.prefill([context])[0]
        recorded = {"kv": filled.kv, "hidden": filled.hidden, "logits": filled.logits}
        compare_named(golden, report, file, prefix, recorded)
    ids, logits = prefix + "generated", prefix + "step_logits"
    if ids in tensors or logits in tensors:
        steps = len(tensors[logits]) if logits in tensors else len(tensors[ids]) - 1
        words, rows = impl.greedy(context, steps)
        # The original's list starts with the start token and leaves out the last computed token.
        shown = [impl.special_ids["start"], *words][: len(tensors.get(ids, []))]
        actual = {"generated": torch.tensor(shown), "step_logits": rows}
        compare_named(golden, report, file, prefix, actual)


def check_context_values(
    golden: Golden,
    impl: Implementation,
    report: Report,
    file: str,
    case: str,
    content: Case,
    context: GoldenContext,
    prefix: str,
) -> None:
    """The numbers and texts that a case states about a context."""
    filled = impl.prefill([context])[0]
    tensors = golden.tensors(file)
    for key, value in content.items():
        name = f"cases.{case}.{key}"
        if key in CONTEXT_INPUTS or report.has(file, name) or key in ("description", "note"):
            if key == "do_sample" and value:
                report.not_covered(file, name, "sampled text cannot be compared, only greedy")
            continue
        if key == "kv_lens":
            report.equal(file, name, list(value), [filled.length])
        elif key == "ropes":
            report.equal(file, name, list(value), [filled.position])
        elif key == "start_position":
            report.equal(file, name, value, filled.position)
        elif key == "question_ids":
            expected = [text_of_ids(value, impl).ids]
            report.equal(file, name, expected, [tuple(impl.encode(content["question"]))])
        elif key in ("min_top2_margin", "decoded") and prefix + "generated" in tensors:
            generated = tensors[prefix + "generated"]
            rows = tensors.get(prefix + "step_logits", generated)
            words, logits = impl.greedy(context, len(rows))
            if key == "decoded":
                shown = [impl.special_ids["start"], *words][: len(generated)]
                report.equal(file, name, value, impl.decode(shown))
            else:
                top = logits.topk(2, dim=-1).values
                margin = (top[:, 0] - top[:, 1]).min()
                noise = 2 * (golden.noise(file, prefix + "step_logits") or 0.0)
                report.compare(file, name, torch.tensor(value), margin, noise=noise)
        else:
            report.not_covered(file, name, "an unknown setting or value")


def check_und(golden: Golden, impl: Implementation, report: Report, file: str) -> None:
    """Cases with `segments`, and the plain layout: a looked-at picture, a question, greedy text."""
    cases, tensors = golden.cases(file), golden.tensors(file)
    plain: dict[str, GoldenContext] = {}
    for case, content in cases.items():
        names = [f"cases.{case}"]
        with report.guard(file, names):
            listed = isinstance(content, Mapping) and "segments" in content
            if listed and any(name.startswith(f"{case}.") for name in tensors):
                check_context_case(golden, impl, report, file, case, content)
            elif listed:
                plain[case] = golden.context(content["segments"], impl)
            elif case == "after_image":
                plain[case] = [_looked_at_picture(golden, impl, content, tensors)]
            elif case == "after_text" and "after_image" in plain:
                words = content.get("question_ids") or impl.encode(content["question"])
                plain[case] = [*plain["after_image"], text_of_ids(words, impl)]
            elif case == "generate" and plain:
                plain[case] = plain.get("after_text", next(iter(plain.values())))
            else:
                raise NotCovered("an unknown case")
    for case, content in cases.items():
        if case not in plain:
            continue
        with report.guard(file, _value_names(case, content)):
            context = plain[case]
            check_context_values(golden, impl, report, file, case, content, context, "")
    for case in plain:
        name = f"kv_{case}"
        if name in tensors and not report.has(file, name):
            with report.guard(file, [name]):
                filled = impl.prefill([plain[case]])[0]
                noise = golden.noise(file, name)
                report.compare(file, name, tensors[name], filled.kv, noise=noise)
    if "generate" in plain:
        with report.guard(file, [n for n in ("generated", "step_logits") if n in tensors]):
            compare_context(golden, impl, report, file, "", plain["generate"])


def _looked_at_picture(
    golden: Golden, impl: Implementation, content: Case, tensors: Mapping[str, Tensor]
) -> ViTImage:
    """The stored picture whose ViT block is as long as the case says.

    Of several of that size it is the one that the recorded values belong to: layer 0 decides.
    """
    patches = content["kv_lens"][0] - 2
    fitting = [
        ViTImage(pixels)
        for _, pixels in golden.pictures("vit")
        if pixels.shape[1] * pixels.shape[2] == patches * impl.vit_patch**2
    ]
    if not fitting:
        raise NotCovered(f"no stored picture has {patches} ViT patches")
    recorded = tensors.get("kv_after_image")
    if len(fitting) > 1 and recorded is not None:
        filled = impl.prefill([[picture] for picture in fitting])
        gaps = [float((one.kv[0] - recorded[0]).abs().max()) for one in filled]
        return fitting[gaps.index(min(gaps))]
    return fitting[0]


def check_other(golden: Golden, impl: Implementation, report: Report, file: str) -> None:
    """A file of an unknown name: its `segments` cases are walked, the rest is not covered."""
    for case, content in golden.cases(file).items():
        check_context_case(golden, impl, report, file, case, content)
