"""Writes a golden-format folder from the naive reference: other ids, sizes, sides and layouts.

    folder = record_golden(tmp_path, seed=1)

Parity must read it without knowing anything of the one golden folder: the checkpoint is
`tests.tiny`'s (latents of 4 channels, sides of 8), names are new, contexts stand in every place
where they may.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny import write_tiny_checkpoint
from umm_reflect.parity_implementations import (
    Branches,
    ContextPart,
    Guidance,
    ReferenceImplementation,
    SizeRule,
    TrainLatents,
    TrainText,
    VAEPicture,
)
from umm_reflect.reference import Text, ViTImage
from umm_reflect.reference_pictures import patchify

VAE_RULE = {"max_size": 80, "min_size": 48, "stride": 16}
VIT_RULE = {"max_size": 84, "min_size": 42, "stride": 14}


class Recorder:
    """Collects tensors and cases by file and writes them."""

    def __init__(self, folder: Path, seed: int):
        self.folder = folder
        self.random = torch.Generator().manual_seed(seed)
        self.impl = ReferenceImplementation(write_tiny_checkpoint(folder / "small", seed))
        self.tensors: dict[str, dict[str, Tensor]] = {}
        self.meanings: dict[tuple[str, str], str] = {}
        self.cases: dict[str, dict[str, Any]] = {}

    def put(self, file: str, prefix: str = "", **tensors: Tensor) -> None:
        self.cases.setdefault(file, {})
        for name, tensor in tensors.items():
            self.tensors.setdefault(file, {})[prefix + name] = tensor.detach().contiguous()

    def write(self) -> None:
        files = {}
        for file, tensors in self.tensors.items():
            save_file(tensors, self.folder / f"{file}.safetensors")
            files[f"{file}.safetensors"] = {
                "tensors": {
                    name: {
                        "shape": list(tensor.shape),
                        "meaning": self.meanings.get((file, name), "recorded"),
                        "fp64_max_abs_diff": 0.0,
                    }
                    for name, tensor in tensors.items()
                },
                "cases": self.cases[file],
            }
        ids = self.impl.special_ids
        conventions = {
            "checkpoint": "small",
            "special_ids": {"bos": f"<|im_start|> = {ids['start']}"},
            "transforms": {"vae": VAE_RULE, "vit": VIT_RULE},
        }
        manifest = {"format_version": 1, "conventions": conventions, "files": files}
        (self.folder / "manifest.json").write_text(json.dumps(manifest))

    def text(self, words: str) -> Text:
        return Text(tuple(self.impl.encode(words)))

    def context(self, segments: Sequence[dict[str, Any]]) -> list[ContextPart]:
        """The parts of a list of one-key segments."""
        parts: list[ContextPart] = []
        for segment in segments:
            ((kind, value),) = segment.items()
            if kind == "text":
                parts.append(self.text(value))
            else:
                pixels = self.tensors["misc"][value.removeprefix("misc ")]
                parts.append(ViTImage(pixels) if kind == "vit_image" else VAEPicture(pixels))
        return parts


def record_golden(folder: Path, seed: int = 1) -> Path:
    recorder = Recorder(folder, seed)
    _misc(recorder)
    _texts(recorder)
    _looks(recorder)
    _drawings(recorder)
    _training(recorder)
    recorder.write()
    return folder


def _misc(r: Recorder) -> None:
    impl = r.impl
    for name, (height, width) in {"p": (40, 90), "q": (70, 33)}.items():
        raw = torch.randint(0, 256, (height, width, 3), generator=r.random, dtype=torch.uint8)
        resized = impl.resize(raw.numpy(), SizeRule(**VAE_RULE))
        looked_at = impl.resize(resized, SizeRule(**VIT_RULE))
        stored = {f"raw_{name}": raw, f"{name}_resized": torch.from_numpy(resized)}
        stored |= {f"{name}_vae": impl.to_pixels(resized), f"{name}_vit": impl.to_pixels(looked_at)}
        r.put("misc", "image.", **stored)
    positions = torch.tensor([0, 5, 31])
    cos, sin = impl.rope(positions)
    r.put("misc", "rope.", positions=positions, cos=cos, sin=sin)
    ids = {"bos_token_id": impl.special_ids["start"], "end_of_image": impl.special_ids["image_end"]}
    r.cases["misc"] = {"special_ids": ids, "tokenizer": [{"text": "a", "ids": impl.encode("a")}]}


def _texts(r: Recorder) -> None:
    start, end = r.impl.special_ids["start"], r.impl.special_ids["end"]
    turns = {"ask": ["two red", "a", "the moon"], "again": ["make it", "keep the rest", "edit"]}
    contexts: list[list[ContextPart]] = [[], [], []]
    r.cases["text"] = {"prompts": turns | {}}
    for name, prompts in turns.items():
        before = [one.length for one in r.impl.prefill(contexts)]
        contexts = [[*c, r.text(p)] for c, p in zip(contexts, prompts, strict=True)]
        filled = r.impl.prefill(contexts)
        ids = [[start, *r.impl.encode(prompt), end] for prompt in prompts]
        r.put(
            "text",
            f"{name}.",
            ids=torch.tensor([i for one in ids for i in one]),
            lens=torch.tensor([len(one) for one in ids], dtype=torch.int32),
            kv_lens_before=torch.tensor(before, dtype=torch.int32),
            logits=torch.cat([one.logits for one in filled]),
            kv=torch.cat([one.kv for one in filled], dim=2),
        )
    r.cases["text"]["prompts"] |= {
        "kv_lens_after": [one.length for one in filled],
        "rope_after": [one.position for one in filled],
    }


def _looks(r: Recorder) -> None:
    segments = [
        {"vit_image": "misc image.p_vit"},
        {"text": "The picture"},
        {"vae_image": "misc image.q_vae"},
        {"vit_image": "misc image.q_vit"},
        {"text": "shows three"},
    ]
    context = r.context(segments)
    filled = r.impl.prefill([context])[0]
    words, logits = r.impl.greedy(context, 5)
    generated = torch.tensor([r.impl.special_ids["start"], *words])[:-1]
    r.put("und", "story.", kv=filled.kv, generated=generated, step_logits=logits)
    r.cases["und"]["story"] = {
        "segments": segments,
        "kv_lens": [filled.length],
        "ropes": [filled.position],
        "decoded": r.impl.decode(generated.tolist()),
    }


def _drawings(r: Recorder) -> None:
    """A picture after two rounds in view, two pictures in one call, and one to the end as uint8."""
    first = [
        {"text": "a star"},
        {"vae_image": "misc image.p_vae"},
        {"vit_image": "misc image.p_vit"},
    ]
    told = [*first, {"text": "add a ring"}]
    later = [
        *told,
        {"vae_image": "misc image.q_vae"},
        {"vit_image": "misc image.q_vit"},
        {"text": "darker"},
    ]
    texts = [segment for segment in later if "text" in segment]
    local = {"conditional": told[1:], "cfg_text": told[1:3], "cfg_img": told[3:]}
    listed = {
        "contexts": {"conditional": later, "cfg_text": later[:-1], "cfg_img": texts},
        "two.pictures_contexts": {
            "conditional": [told, [{"text": "two red"}]],
            "cfg_text": [first, []],
            "cfg_img": [],
        },
    }
    settings = {
        "num_timesteps": 4,
        "timestep_shift": 2.0,
        "cfg_text_scale": 3.0,
        "cfg_img_scale": 1.0,
        "cfg_interval": [0.5, 1.0],
        "cfg_renorm_type": "channel",
        "cfg_renorm_min": 0.25,
    }
    sizes = [[32, 48]]
    cases = {
        "all_rounds": settings | {"image_sizes_hw": sizes, "cfg_img_scale": 1.7},
        "local": settings | {"image_sizes_hw": sizes, "cfg_img_scale": 2.0, "contexts": local},
        "two.pictures": settings
        | {
            "image_sizes_hw": [[32, 48], [64, 32]],
            "norm_over": "call",
            "cfg_renorm_type": "global",
        },
    }
    branches = {
        "all_rounds": [listed["contexts"]],
        "local": [local],
        "two.pictures": [
            {"conditional": told, "cfg_text": first, "cfg_img": []},
            {"conditional": [{"text": "two red"}], "cfg_text": [], "cfg_img": []},
        ],
    }
    for name, case in cases.items():
        contexts = [
            Branches(*(r.context(one[key]) for key in ("conditional", "cfg_text", "cfg_img")))
            for one in branches[name]
        ]
        grids = [(height // 16, width // 16) for height, width in case["image_sizes_hw"]]
        n = sum(rows * columns for rows, columns in grids)
        guidance = Guidance(
            case["num_timesteps"],
            case["timestep_shift"],
            case["cfg_text_scale"],
            case["cfg_img_scale"],
            tuple(case["cfg_interval"]),
            case["cfg_renorm_type"],
            case["cfg_renorm_min"],
            case.get("norm_over", "image"),
        )
        # A first run gives the states at which the second one records velocities.
        noise = torch.randn(1, n, 16, generator=r.random).expand(4, n, 16)
        states = r.impl.draw(contexts, grids, noise, guidance).x
        drawn = r.impl.draw(contexts, grids, states, guidance)
        r.put("gen_story", f"{name}.", x=drawn.x, v=drawn.guided, v_cond=drawn.cond)
        r.put("gen_story", f"{name}.", v_text_uncond=drawn.text_uncond, timesteps=drawn.times)
        if len(grids) == 1:
            r.put("gen_story", f"{name}.", image=torch.stack(drawn.images))
            r.put("gen_story", f"{name}.", v_img_uncond=drawn.image_uncond)
        if name == "local":
            uint8 = torch.from_numpy(r.impl.to_uint8(drawn.images[0]))
            r.put("gen_story", "end.", uint8=uint8)
            meaning = "noise and settings are those of gen_story local"
            r.meanings["gen_story", "end.uint8"] = meaning
        filled = r.impl.prefill([one.cond for one in contexts])
        cases[name] = case | {
            "kv_lens": [one.length for one in filled],
            "ropes": [one.position for one in filled],
        }
    whole = r.context(later)
    r.put("gen_story", "context.", kv=r.impl.prefill([whole])[0].kv)
    r.put("gen_story", "context.", kv_after_vae=r.impl.prefill([whole[:5]])[0].kv)
    r.cases["gen_story"] = cases | listed


def _training(r: Recorder) -> None:
    """Two samples; the second has a target, its clean copy, a look at it and a scored text."""
    impl = r.impl
    images = torch.rand(2, 3, 48, 64, generator=r.random) * 2 - 1
    latents = impl.vae_encode(images)
    grids = [(2, 3), (3, 4), (3, 4)]
    padded = latents[[0, 1, 1]]
    clean = [
        patchify(latent[:, : rows * 2, : columns * 2], 2)
        for latent, (rows, columns) in zip(padded, grids, strict=True)
    ]
    raw = [-0.4, 0.8, -math.inf]
    noise = [torch.randn(tokens.shape, generator=r.random) for tokens in clean]
    parts = [TrainLatents(*values) for values in zip(clean, grids, raw, noise, strict=True)]
    looked_at = torch.rand(3, 28, 42, generator=r.random) * 2 - 1
    asked, words = impl.encode("a star"), impl.encode("one is missing")
    end = impl.special_ids["end"]
    samples = [
        [TrainText(tuple(asked), {}), parts[0]],
        [
            parts[1],
            parts[2],
            ViTImage(looked_at),
            TrainText(tuple(words), dict(enumerate((*words, end)))),
        ],
    ]
    lens = [len(asked) + 2, 8, 14, 14, 8, len(words) + 2]
    modes = ["causal", "noise", "noise", "full", "full", "causal"]
    starts = torch.tensor([0, *lens]).cumsum(0).tolist()
    frame = impl.special_ids
    text_at: list[int] = []
    text_ids: list[int] = []
    for start, length, mode in zip(starts, lens, modes, strict=False):
        if mode == "causal":
            own = asked if start == 0 else words
            text_at += range(start, start + length)
            text_ids += [frame["start"], *own, frame["end"]]
        else:
            text_at += [start, start + length - 1]
            text_ids += [frame["image_start"], frame["image_end"]]

    def inside(*splits: int) -> Tensor:
        places = [i for s in splits for i in range(starts[s] + 1, starts[s] + lens[s] - 1)]
        return torch.tensor(places)

    scored = starts[5] + torch.arange(len(words) + 1)
    result = impl.train(samples, 2.5)
    r.put(
        "train",
        "in.",
        packed_text_ids=torch.tensor(text_ids),
        packed_text_indexes=torch.tensor(text_at),
        packed_vit_token_indexes=inside(4),
        packed_vit_tokens=patchify(looked_at, 14),
        packed_vit_position_ids=impl.position_ids(2, 3, impl.vit_side, False),
        packed_vae_token_indexes=inside(1, 2, 3),
        packed_timesteps=torch.cat(
            [torch.full((len(t),), value) for t, value in zip(clean, raw, strict=True)]
        ),
        padded_images=images[[0, 1, 1]],
        padded_latent=padded,
        ce_loss_indexes=scored,
        packed_label_ids=torch.tensor([*words, end]),
        mse_loss_indexes=inside(1, 2),
        attention_mask=result.attention_mask,
        packed_position_ids=result.position_ids,
    )
    key = "language_model.model.layers.1.mlp_moe_gen.down_proj.weight"
    recorded = {f"grad.{key}": result.gradients[key]}
    for name in ("t", "input_sequence", "hidden", "ce", "mse", "loss"):
        recorded[name] = getattr(result, name)
    r.put("train", "shift2.5.", noise=torch.cat(noise), **recorded)
    norms = {k: None if g is None else float(g.norm()) for k, g in result.gradients.items()}
    r.cases["train"] = {
        "batch": {
            "sequence_length": sum(lens),
            "sample_lens": [sum(lens[:2]), sum(lens[2:])],
            "split_lens": lens,
            "attn_modes": modes,
            "patchified_vae_latent_shapes": [list(grid) for grid in grids],
        },
        "grad_norms_shift2.5": {"norms": norms},
    }
