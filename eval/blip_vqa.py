"""A second opinion on colours: BLIP's "yes" to "red dog?" about a crop.

    vqa = BlipVqa.load(folder, device="cuda:0")
    vqa.yes([crop, crop], ["red dog?", "blue dog?"])          # [0.93, 0.02]

As T2I-CompBench asks it: the crop (with what is around the object) is stretched to the model's
square, the question's first token says "encode", the answer's first token is weighed between yes
and no. An image about which several questions are asked is looked at once.

The weights are Salesforce's model_base_vqa_capfilt_large.pth (`umm-reflect geneval convert`), or any
folder of transformers' BlipForQuestionAnswering with its tokenizer. `convert` renames them
strictly.
"""  # noqa: E501  (a command is one line)

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from eval.clip_colors import normalised
from eval.conversion import (
    CONVERSION,
    Rule,
    check_converted,
    model_shapes,
    read_checkpoint,
    rename,
    save_converted,
    to,
)
from umm_reflect.errors import CheckpointError
from umm_reflect.files import sha256 as sha256_of
from umm_reflect.verifier_files import BERT, BLIP_VQA, TOKENIZER_FILES

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import BlipConfig

DECODE, ENCODE = 30522, 30523  # the two tokens that BLIP adds to BERT's
MOST_TOKENS = 35  # of a question
MEASURED = 30524  # tokens of the vocabulary

_LEAF = r"(weight|bias)"
_SEES = "vision_model."
_BLOCK = r"visual_encoder\.blocks\.(\d+)\."
_LAYER = _SEES + r"encoder.layers.\1."
_RULES = [
    Rule(r"visual_encoder\.cls_token", to(_SEES + "embeddings.class_embedding")),
    Rule(r"visual_encoder\.pos_embed", to(_SEES + "embeddings.position_embedding")),
    Rule(
        r"visual_encoder\.patch_embed\.proj\." + _LEAF,
        to(_SEES + r"embeddings.patch_embedding.\1"),
    ),
    Rule(r"visual_encoder\.norm\." + _LEAF, to(_SEES + r"post_layernorm.\1")),
    Rule(_BLOCK + r"norm([12])\." + _LEAF, to(_LAYER + r"layer_norm\2.\3")),
    Rule(_BLOCK + r"attn\.qkv\." + _LEAF, to(_LAYER + r"self_attn.qkv.\2")),
    Rule(_BLOCK + r"attn\.proj\." + _LEAF, to(_LAYER + r"self_attn.projection.\2")),
    Rule(_BLOCK + r"mlp\.fc([12])\." + _LEAF, to(_LAYER + r"mlp.fc\2.\3")),
    Rule(r"text_(encoder|decoder\.bert)\.embeddings\.position_ids", None),
    Rule(r"(text_(?:encoder|decoder)\..*)", to(r"\1")),
]
# The same tensor under a second name: a file may leave it out, and ours does.
_SAME = {
    "text_decoder.cls.predictions.decoder.weight": (
        "text_decoder.bert.embeddings.word_embeddings.weight"
    ),
    "text_decoder.cls.predictions.decoder.bias": "text_decoder.cls.predictions.bias",
}
OPTIONAL = "|".join(map(re.escape, _SAME)) + r"|.*\.position_ids"


# --- weights --------------------------------------------------------------------------------------


def full_size_config(image_size: int = 480) -> BlipConfig:
    """BLIP's base model for questions: ViT-B/16 and BERT base, each layer looking at the image."""
    from transformers import BlipConfig

    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    text = {"num_attention_heads": 12, "encoder_hidden_size": 768, "layer_norm_eps": 1e-12}
    vision = {"num_attention_heads": 12, "patch_size": 16, "layer_norm_eps": 1e-6}
    return BlipConfig(
        text_config={**sizes, **text, "vocab_size": MEASURED},
        vision_config={**sizes, **vision, "image_size": image_size},
    )


def convert(
    path: Path, folder: Path, *, tokenizer: Path, sha256: str | None = BLIP_VQA.sha256
) -> Path:
    """Write Salesforce's checkpoint, with BERT's tokenizer, as a folder that `BlipVqa` reads.

    The side of the images follows from the number of positions. Errors: CheckpointError for
    another hash, or a name that is unknown, missing or of another shape.
    """
    from transformers import BlipForQuestionAnswering

    tensors = read_checkpoint(path, sha256=sha256)
    places = tensors.get("visual_encoder.pos_embed")
    if places is None:
        raise CheckpointError(f"{path} has no visual_encoder.pos_embed", f"Fetch {BLIP_VQA.name}.")
    side = round((places.shape[1] - 1) ** 0.5) * 16
    config = full_size_config(side)
    model = BlipForQuestionAnswering(config)
    weights = convert_tensors(tensors, model)
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, folder / name)
    source = {"source": path.name, "source_sha256": sha256 or sha256_of(path)}
    return save_converted(weights, folder, config.to_json_string(), source)


def convert_tensors(tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """BLIP's tensors under transformers' names, each once. Errors: CheckpointError."""
    weights = rename(tensors, _RULES, model_shapes(model), OPTIONAL)
    for name, same in _SAME.items():
        if name in weights and not weights.pop(name).equal(weights[same]):
            raise CheckpointError(f"{name} differs from {same}, which it should be")
    return weights


# --- questions ------------------------------------------------------------------------------------


def question(color: str, kind: str) -> str:
    """'Red', ' dog' -> 'red dog?'."""
    return " ".join(f"{color} {kind}?".lower().split())


class BlipVqa:
    """BLIP asked yes-or-no questions, fp32."""

    def __init__(
        self, model: Any, tokenizer: Any, *, device: torch.device, batch_size: int, weights: str
    ):
        """model: BlipForQuestionAnswering; tokenizer: BERT's. weights: their sha256.

        Errors: CheckpointError for a vocabulary that is not BERT's with BLIP's two tokens.
        """
        words = model.config.text_config.vocab_size
        ids = [tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no")]
        if words != MEASURED or tokenizer.unk_token_id in ids or None in ids:
            raise CheckpointError(
                f"this BLIP has {words} tokens and knows yes and no as {ids}",
                f"It needs BERT's uncased vocabulary and {MEASURED} tokens: {BERT}.",
            )
        self.model = model.eval().requires_grad_(False).to(device)
        self.tokenizer = tokenizer
        self.device = device
        self.batch_size = batch_size
        self.weights = weights
        self.side = model.config.vision_config.image_size
        self._answers = ids

    @classmethod
    def load(
        cls, name: str | Path, *, device: str | torch.device = "auto", batch_size: int = 32
    ) -> BlipVqa:
        """A folder, a hub id or id@revision. Errors: CheckpointError."""
        from transformers import BertTokenizer, BlipForQuestionAnswering

        from eval.model_files import pretrained, weights_sha256
        from umm_reflect import hub
        from umm_reflect.device import resolve_device

        folder = hub.resolve(name)
        if (folder / CONVERSION).exists():
            check_converted(folder)
        model = pretrained(BlipForQuestionAnswering, folder)
        tokenizer = BertTokenizer.from_pretrained(folder, local_files_only=True)
        return cls(
            model,
            tokenizer,
            device=resolve_device(device),
            batch_size=batch_size,
            weights=weights_sha256(folder),
        )

    def yes(self, crops: Sequence[Image.Image], questions: Sequence[str]) -> list[float]:
        """P(yes) / (P(yes) + P(no)) for each crop and its question; a crop may occur repeatedly."""
        import torch

        pictures = list({id(crop): crop for crop in crops}.values())
        row_of = {id(crop): row for row, crop in enumerate(pictures)}
        found: list[float] = [0.0] * len(crops)
        with torch.inference_mode():
            for start in range(0, len(pictures), self.batch_size):
                here = range(start, min(start + self.batch_size, len(pictures)))
                asked = [i for i, crop in enumerate(crops) if row_of[id(crop)] in here]
                seen = self._see([pictures[row] for row in here])
                rows = torch.tensor([row_of[id(crops[i])] - start for i in asked])
                answers = self._ask(seen[rows.to(seen.device)], [questions[i] for i in asked])
                for index, answer in zip(asked, answers, strict=True):
                    found[index] = answer
        return found

    def _see(self, crops: Sequence[Image.Image]) -> Tensor:
        """[N, places, D]."""
        size = (self.side, self.side)
        squares = [crop.convert("RGB").resize(size, Image.Resampling.BICUBIC) for crop in crops]
        return self.model.vision_model(pixel_values=normalised(squares, self.device))[0]

    def _ask(self, seen: Tensor, questions: Sequence[str]) -> list[float]:
        import torch

        tokens = self.tokenizer(
            list(questions),
            padding=True,
            truncation=True,
            max_length=MOST_TOKENS,
            return_tensors="pt",
        ).to(self.device)
        ids, attended = tokens["input_ids"], tokens["attention_mask"]
        ids[:, 0] = ENCODE
        everywhere = torch.ones(seen.shape[:2], dtype=torch.long, device=self.device)
        read = self.model.text_encoder(
            input_ids=ids,
            attention_mask=attended,
            encoder_hidden_states=seen,
            encoder_attention_mask=everywhere,
        )[0]
        start = torch.full((len(questions), 1), DECODE, device=self.device)
        logits = self.model.text_decoder(
            input_ids=start, encoder_hidden_states=read, encoder_attention_mask=attended
        ).logits[:, -1]
        weighed = logits[:, self._answers].cpu().double()
        if not torch.isfinite(weighed).all():
            raise FloatingPointError("BLIP's answers are no numbers")
        return weighed.softmax(-1)[:, 0].tolist()

    def identity(self) -> dict[str, Any]:
        """What decides the answers."""
        return {"name": "blip-vqa", "sha256": self.weights, "dtype": "float32", "side": self.side}

    def move(self, device: torch.device) -> None:
        """Go to a device."""
        self.model.to(device)
        self.device = device
