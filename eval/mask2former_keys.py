"""mmdet's Mask2Former Swin-S as transformers': every tensor's new name, and the strict converter.

    umm-reflect geneval convert FILE.pth FOLDER          # model.safetensors and config.json
    convert(path, folder)
    convert_tensors(tensors, model)                      # the renaming alone

mmdet 2.x and 3.x name the same tensors differently; both are understood. Two things are more than
a new name: query, key and value stand in one tensor in mmdet and in three here, and where Swin
merges four neighbours, mmdet stacks them channel by channel and transformers place by place, in
another order. mmdet's relative_position_index is computed from the window and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from eval.conversion import Rule, model_shapes, read_checkpoint, rename, save_converted, split, to
from umm_reflect.files import sha256 as sha256_of
from umm_reflect.verifier_files import MASK2FORMER

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation

# What a complete model need not be given: a norm that nothing uses, a weight of the loss.
OPTIONAL = r"model\.pixel_level_module\.encoder\.(swin\.)?layernorm\.(weight|bias)"
OPTIONAL += r"|criterion\.empty_weight|.*\.relative_position_index"

_LEVEL = "model.pixel_level_module."
_SWIN = (_LEVEL + "encoder.swin.", _LEVEL + "encoder.")
_PIXELS = _LEVEL + "decoder."
_QUERIES = "model.transformer_module."


def merged_neighbours(tensor: Tensor) -> Tensor:
    """The last axis of a patch merging, [..., 4C], from mmdet's order to transformers'.

    mmdet: channel by channel, the four places (0,0) (0,1) (1,0) (1,1) beside each other.
    transformers: place by place, (0,0) (1,0) (0,1) (1,1), all channels of one beside each other.
    """
    by_place = tensor.unflatten(-1, (-1, 4))[..., [0, 2, 1, 3]]
    return by_place.transpose(-1, -2).flatten(-2)


def _swin(*rests: str) -> list[str]:
    return [prefix + rest for prefix in _SWIN for rest in rests]


def _rules() -> list[Rule]:
    block = r"backbone\.stages\.(\d+)\.blocks\.(\d+)\."
    here = r"encoder.layers.\1.blocks.\2."
    leaf = r"(weight|bias)"
    pixel = r"panoptic_head\.pixel_decoder\."
    read = pixel + r"encoder\.layers\.(\d+)\."
    reader = _PIXELS + r"encoder.layers.\1."
    ask = r"panoptic_head\.transformer_decoder\.layers\.(\d+)\."
    asker = _QUERIES + r"decoder.layers.\1."
    cross, own = r"(?:attentions\.0|cross_attn)\.attn\.", r"(?:attentions\.1|self_attn)\.attn\."
    feed = r"(?:ffns\.0|ffn)\.layers\."
    return [
        Rule(
            r"backbone\.patch_embed\.projection\." + leaf,
            to(*_swin(r"embeddings.patch_embeddings.projection.\1")),
        ),
        Rule(r"backbone\.patch_embed\.norm\." + leaf, to(*_swin(r"embeddings.norm.\1"))),
        Rule(
            r"backbone\.norm(\d)\." + leaf,
            lambda m: to(_LEVEL + f"encoder.hidden_states_norms.stage{int(m[1]) + 1}.{m[2]}")(m),
        ),
        Rule(block + r"norm1\." + leaf, to(*_swin(here + r"layernorm_before.\3"))),
        Rule(block + r"norm2\." + leaf, to(*_swin(here + r"layernorm_after.\3"))),
        Rule(
            block + r"attn\.w_msa\.qkv\." + leaf,
            split(
                *(
                    _swin(here + rf"attention.{new}_proj.\3", here + rf"attention.self.{old}.\3")
                    for new, old in (("q", "query"), ("k", "key"), ("v", "value"))
                )
            ),
        ),
        Rule(
            block + r"attn\.w_msa\.proj\." + leaf,
            to(*_swin(here + r"attention.o_proj.\3", here + r"attention.output.dense.\3")),
        ),
        Rule(
            block + r"attn\.w_msa\.relative_position_bias_table",
            to(
                *_swin(
                    here + "attention.relative_position_bias.relative_position_bias_table",
                    here + "attention.self.relative_position_bias_table",
                )
            ),
        ),
        Rule(block + r"attn\.w_msa\.relative_position_index", None),
        Rule(
            block + r"ffn\.layers\.0\.0\." + leaf,
            to(*_swin(here + r"mlp.fc1.\3", here + r"intermediate.dense.\3")),
        ),
        Rule(
            block + r"ffn\.layers\.1\." + leaf,
            to(*_swin(here + r"mlp.fc2.\3", here + r"output.dense.\3")),
        ),
        Rule(
            r"backbone\.stages\.(\d+)\.downsample\.(norm|reduction)\." + leaf,
            to(*_swin(r"encoder.layers.\1.downsample.\2.\3"), change=merged_neighbours),
        ),
        Rule(
            pixel + r"input_convs\.(\d)\.conv\." + leaf, to(_PIXELS + r"input_projections.\1.0.\2")
        ),
        Rule(pixel + r"input_convs\.(\d)\.gn\." + leaf, to(_PIXELS + r"input_projections.\1.1.\2")),
        Rule(pixel + r"lateral_convs\.0\.conv\." + leaf, to(_PIXELS + r"adapter_1.0.\1")),
        Rule(pixel + r"lateral_convs\.0\.gn\." + leaf, to(_PIXELS + r"adapter_1.1.\1")),
        Rule(pixel + r"output_convs\.0\.conv\." + leaf, to(_PIXELS + r"layer_1.0.\1")),
        Rule(pixel + r"output_convs\.0\.gn\." + leaf, to(_PIXELS + r"layer_1.1.\1")),
        Rule(pixel + r"level_encoding\.weight", to(_PIXELS + "level_embed")),
        Rule(pixel + r"mask_feature\." + leaf, to(_PIXELS + r"mask_projection.\1")),
        Rule(
            read + r"(?:attentions\.0|self_attn)\."
            r"(sampling_offsets|attention_weights|value_proj|output_proj)\." + leaf,
            to(reader + r"self_attn.\2.\3"),
        ),
        Rule(read + r"norms\.0\." + leaf, to(reader + r"self_attn_layer_norm.\2")),
        Rule(read + r"norms\.1\." + leaf, to(reader + r"final_layer_norm.\2")),
        Rule(read + feed + r"0\.0\." + leaf, to(reader + r"fc1.\2")),
        Rule(read + feed + r"1\." + leaf, to(reader + r"fc2.\2")),
        Rule(
            ask + cross + r"(in_proj_weight|in_proj_bias|out_proj\.weight|out_proj\.bias)",
            to(asker + r"cross_attn.\2"),
        ),
        Rule(
            ask + own + r"in_proj_" + leaf,
            split(*([asker + rf"self_attn.{name}_proj.\2"] for name in "qkv")),
        ),
        Rule(ask + own + r"out_proj\." + leaf, to(asker + r"self_attn.out_proj.\2")),
        Rule(ask + r"norms\.0\." + leaf, to(asker + r"cross_attn_layer_norm.\2")),
        Rule(ask + r"norms\.1\." + leaf, to(asker + r"self_attn_layer_norm.\2")),
        Rule(ask + r"norms\.2\." + leaf, to(asker + r"final_layer_norm.\2")),
        Rule(ask + feed + r"0\.0\." + leaf, to(asker + r"fc1.\2")),
        Rule(ask + feed + r"1\." + leaf, to(asker + r"fc2.\2")),
        Rule(
            r"panoptic_head\.transformer_decoder\.post_norm\." + leaf,
            to(_QUERIES + r"decoder.layernorm.\1"),
        ),
        Rule(
            r"panoptic_head\.mask_embed\.([024])\." + leaf,
            lambda m: to(
                _QUERIES + f"decoder.mask_predictor.mask_embedder.{int(m[1]) // 2}.0.{m[2]}"
            )(m),
        ),
        Rule(r"panoptic_head\.query_embed\.weight", to(_QUERIES + "queries_embedder.weight")),
        Rule(r"panoptic_head\.query_feat\.weight", to(_QUERIES + "queries_features.weight")),
        Rule(r"panoptic_head\.level_embed\.weight", to(_QUERIES + "level_embed.weight")),
        Rule(r"panoptic_head\.cls_embed\." + leaf, to(r"class_predictor.\1")),
    ]


def convert_tensors(
    tensors: Mapping[str, Tensor], model: Mask2FormerForUniversalSegmentation
) -> dict[str, Tensor]:
    """mmdet's tensors under the names that this transformers has for them.

    Errors: CheckpointError for a name that is unknown, missing or of another shape.
    """
    return rename(tensors, _rules(), model_shapes(model), OPTIONAL)


def full_size_config() -> Mask2FormerConfig:
    """Mask2Former with Swin-S as in mmdet's COCO instance config: 80 classes, 100 queries."""
    from transformers import Mask2FormerConfig, SwinConfig

    swin = SwinConfig(
        embed_dim=96,
        depths=[2, 2, 18, 2],
        num_heads=[3, 6, 12, 24],
        window_size=7,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    return Mask2FormerConfig(backbone_config=swin, num_labels=80, num_queries=100)


def convert(path: Path, folder: Path, *, sha256: str | None = MASK2FORMER.sha256) -> Path:
    """Write mmdet's checkpoint as a folder that `Mask2FormerDetector` reads.

    sha256: of the file; the published one unless given, None for weights of one's own.
    Errors: CheckpointError.
    """
    import transformers
    from transformers import Mask2FormerForUniversalSegmentation

    tensors = read_checkpoint(path, sha256=sha256)
    config = full_size_config()
    weights = convert_tensors(tensors, Mask2FormerForUniversalSegmentation(config))
    source = {
        "source": path.name,
        "source_sha256": sha256 or sha256_of(path),
        "transformers": transformers.__version__,
    }
    return save_converted(weights, folder, config.to_json_string(), source)
