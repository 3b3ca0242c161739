"""Checkpoint folders: what does not fit is refused by name, what is saved loads back, and a save
that is cut off leaves the old folder.

pytest tests/test_checkpoint.py
"""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import TINY, write_tiny_checkpoint
from umm_reflect import checkpoint
from umm_reflect.checkpoint import TensorFiles, load, save
from umm_reflect.config import FLUX_VAE, BagelConfig
from umm_reflect.errors import CheckpointError, UsageError, UserError
from umm_reflect.vit import sincos_table

UNFIT = "Config and weights do not belong together, or the file is damaged"
NORM = "language_model.model.norm_moe_gen.weight"
FILES = {
    "ae.safetensors",
    "config.json",
    "ema.safetensors",
    "llm_config.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "vit_config.json",
    "vocab.json",
}


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def refusal(folder: Path) -> str:
    """The one line that loading ends with."""
    with pytest.raises(CheckpointError) as error:
        load(folder, device="cpu")
    return str(error.value)


def rewrite(folder: Path, name: str, change) -> dict[str, Tensor]:
    state = load_file(folder / name)
    change(state)
    save_file(state, folder / name)
    return state


# --- what does not fit ----------------------------------------------------------------------------


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, "ema.safetensors", lambda state: state.pop(NORM))
    assert refusal(folder) == f"{folder}/ema.safetensors lacks 1 tensors: {NORM}. {UNFIT}"


def test_many_missing_tensors_are_counted_and_the_first_five_named(folder):
    def change(state):
        for name in [name for name in state if name.startswith("vit_model.")]:
            del state[name]

    rewrite(folder, "ema.safetensors", change)
    at = "vit_model.vision_model.e"
    assert refusal(folder) == (
        f"{folder}/ema.safetensors lacks 37 tensors: {at}mbeddings.patch_embedding.weight, "
        f"{at}mbeddings.patch_embedding.bias, {at}mbeddings.position_embedding.weight, "
        f"{at}ncoder.layers.0.self_attn.q_proj.weight, {at}ncoder.layers.0.self_attn.q_proj.bias "
        f"and 32 more. {UNFIT}"
    )


def test_a_tensor_that_the_model_does_not_know_is_named(folder):
    extra = "language_model.model.layers.2.self_attn.q_proj.weight"
    rewrite(folder, "ema.safetensors", lambda s: s.update({extra: torch.zeros(32, 32)}))
    assert refusal(folder) == (
        f"{folder}/ema.safetensors has, unknown to this model, 1 tensors: {extra}. {UNFIT}"
    )


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder):
    rewrite(folder, "ema.safetensors", lambda s: s.update({"vae2llm.weight": torch.zeros(32, 64)}))
    assert refusal(folder) == (
        f"{folder}/ema.safetensors has in another shape 1 tensors: "
        f"vae2llm.weight [32, 64] (expected [32, 16]). {UNFIT}"
    )


def test_the_autoencoder_is_held_to_its_own_shape(folder):
    name = "decoder.up.2.block.0.conv1.weight"
    rewrite(folder, "ae.safetensors", lambda s: s.update({name: torch.zeros(8, 8, 3, 3)}))
    assert refusal(folder) == (
        f"{folder}/ae.safetensors has in another shape 1 tensors: "
        f"{name} [8, 8, 3, 3] (expected [16, 16, 3, 3]). {UNFIT}"
    )
    rewrite(folder, "ae.safetensors", lambda state: state.pop("encoder.conv_in.weight"))
    assert refusal(folder) == (
        "the autoencoder has no tensor encoder.conv_in.weight. "
        "Take the ae.safetensors of a BAGEL release."
    )


@pytest.mark.parametrize("name", ["ema.safetensors", "ae.safetensors"])
@pytest.mark.parametrize("left", [0.999, 0.01, 0])
def test_a_truncated_file_is_refused_before_anything_is_read(folder, name, left):
    path = folder / name
    data = path.read_bytes()
    path.write_bytes(data[: int(left * len(data))])
    line = refusal(folder)
    assert line.startswith(f"{path} is not a readable safetensors file (")
    assert line.endswith("). It may be truncated: fetch it again")
    assert "\n" not in line


@pytest.mark.parametrize("name", ["ema.safetensors", "ae.safetensors"])
def test_a_file_that_is_not_there_is_named(folder, name):
    (folder / name).unlink()
    assert refusal(folder) == (
        f"{folder} has no {name} (nor {name}.index.json). "
        "Name a complete BAGEL checkpoint folder, or fetch one with: umm-reflect download"
    )


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    assert refusal(tmp_path) == (
        f"{tmp_path} is no model folder (it has neither llm_config.json nor adapter_config.json). "
        "Name a complete BAGEL folder or a PEFT adapter, or fetch one: umm-reflect download"
    )


def test_a_folder_of_another_kind_of_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    assert refusal(tmp_path) == (
        f"{tmp_path} has no tokenizer.json, and vocab.json, merges.txt, tokenizer_config.json "
        "is missing too. Name a folder that holds the checkpoint's tokenizer files."
    )


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(folder):
    def change(state):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            state[f"language_model.{name}"] = state[f"language_model.{name}"][:400].clone()

    rewrite(folder, "ema.safetensors", change)
    edit_json(folder / "llm_config.json", vocab_size=400)
    assert refusal(folder) == (
        f"the tokenizer of {folder} has 422 ids, the model 400 rows. "
        "Tokenizer and weights do not belong together"
    )


def test_a_config_without_a_key_names_file_and_key(folder):
    path = folder / "llm_config.json"
    content = json.loads(path.read_text())
    del content["num_hidden_layers"]
    path.write_text(json.dumps(content))
    assert refusal(folder) == (
        f"{path} has no key 'num_hidden_layers'. The file belongs to another kind of model"
    )
    path.write_text("{")
    assert refusal(folder).startswith(f"{path} is not readable as JSON (")


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- what the tensors decide ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("llm_config.json", "[]", "holds no JSON object"),
        ("config.json", "7", "holds no JSON object"),
        ("llm_config.json", {"hidden_size": "wide"}, "hidden_size is 'wide', which is no whole"),
        ("llm_config.json", {"num_attention_heads": 0}, "num_attention_heads is 0, which is no"),
        ("vit_config.json", {"patch_size": 14.5}, "patch_size is 14.5, which is no whole number"),
        ("config.json", {"latent_patch_size": True}, "latent_patch_size is True, which is no"),
        ("config.json", {"vit_max_num_patch_per_side": []}, "vit_max_num_patch_per_side is []"),
    ],
)
def test_a_config_of_the_wrong_form_is_refused_by_name(folder, name, content, line):
    path = folder / name
    if isinstance(content, dict):
        edit_json(path, **content)
    else:
        path.write_text(content)
    with pytest.raises(CheckpointError) as caught:
        BagelConfig.from_folder(folder)
    assert f"{path}" in str(caught.value)
    assert line in str(caught.value)


def test_a_config_may_leave_the_autoencoder_out(folder):
    edit_json(folder / "config.json", vae_config=None)
    assert BagelConfig.from_folder(folder).vae == FLUX_VAE


def test_the_grid_sides_come_from_the_tensors_and_not_from_the_config(folder):
    def change(state):
        state["latent_pos_embed.pos_embed"] = sincos_table(5, 32)
        state["vit_pos_embed.pos_embed"] = sincos_table(6, 32)
        name = "vit_model.vision_model.embeddings.position_embedding.weight"
        state[name] = state[name][:36].clone()

    rewrite(folder, "ema.safetensors", change)
    edit_json(folder / "config.json", max_latent_size=32, vit_max_num_patch_per_side=70)
    bagel = load(folder, device="cpu")
    assert (bagel.config.latent_grid_side, bagel.config.vit.grid_side) == (5, 6)
    assert bagel.latent_pos_embed.pos_embed.shape == (25, 32)


def test_a_position_table_that_is_no_square_is_refused(folder):
    rewrite(
        folder,
        "ema.safetensors",
        lambda s: s.update({"latent_pos_embed.pos_embed": torch.zeros(60, 32)}),
    )
    assert refusal(folder) == (
        f"{folder}/ema.safetensors: latent_pos_embed.pos_embed has 60 rows, "
        "which is no square grid. The file is damaged"
    )
    rewrite(folder, "ema.safetensors", lambda state: state.pop("latent_pos_embed.pos_embed"))
    assert refusal(folder) == (
        f"{folder}/ema.safetensors lacks latent_pos_embed.pos_embed. "
        "It is not a complete BAGEL checkpoint"
    )


def test_the_tables_are_computed_in_fp32_and_not_read(folder):
    rewrite(
        folder,
        "ema.safetensors",
        lambda s: s.update({"vit_pos_embed.pos_embed": torch.full((64, 32), 7.0)}),
    )
    bagel = load(folder, device="cpu", dtype="bfloat16")
    assert bagel.vit_pos_embed.pos_embed.dtype == torch.float32
    assert torch.equal(bagel.vit_pos_embed.pos_embed, sincos_table(8, 32))


def test_the_autoencoders_shape_comes_from_its_tensors(folder):
    content = json.loads((folder / "config.json").read_text())
    content["vae_config"] |= {"ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2}
    (folder / "config.json").write_text(json.dumps(content))
    bagel = load(folder, device="cpu")
    assert bagel.config.vae == TINY.vae
    assert bagel.vae.config == TINY.vae


# --- what loads -----------------------------------------------------------------------------------


def test_a_loaded_model_holds_the_files_numbers_and_is_ready_to_run(folder):
    bagel = load(folder, device="cpu", dtype="float32")
    stored = load_file(folder / "ema.safetensors")
    state = bagel.state_dict()
    assert set(state) == set(stored)
    for name in set(stored) - set(checkpoint.TABLES):
        assert torch.equal(state[name], stored[name].float()), name
    assert bagel.config == TINY
    assert not bagel.training
    assert not any(p.requires_grad for p in bagel.parameters())
    assert not any(t.is_meta for t in [*bagel.parameters(), *bagel.buffers()])
    assert bagel.folder == folder
    assert (bagel.frame.start, bagel.frame.end) == (401, 402)


def test_an_unknown_attention_kernel_is_refused_with_the_choices(folder):
    with pytest.raises(UsageError, match=r"no attention kernel 'fast'\. One of auto, "):
        load(folder, device="cpu", attn="fast")


def shard(folder: Path) -> Path:
    """The weights in two files and an index, as large releases come; returns the index."""
    state = load_file(folder / "ema.safetensors")
    names = sorted(state)
    halves = {"ema-1.safetensors": names[::2], "ema-2.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: state[name] for name in part}, folder / file)
    where = {name: file for file, part in halves.items() for name in part}
    index = folder / "ema.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "ema.safetensors").unlink()
    return index


def test_a_sharded_checkpoint_is_the_same_model(original, folder):
    shard(folder)
    whole, parts = (load(f, device="cpu").state_dict() for f in (original, folder))
    assert set(whole) == set(parts)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_errors_of_a_sharded_checkpoint_name_the_index_or_the_shard(folder):
    index = shard(folder)
    rewrite(folder, "ema-1.safetensors", lambda state: state.pop(NORM, None))
    rewrite(folder, "ema-2.safetensors", lambda state: state.pop(NORM, None))
    assert refusal(folder) == f"{index} lacks 1 tensors: {NORM}. {UNFIT}"
    (folder / "ema-2.safetensors").unlink()
    assert refusal(folder) == f"{folder}/ema-2.safetensors is missing. Fetch the checkpoint again"


# --- saving ---------------------------------------------------------------------------------------


def test_a_saved_model_loads_back_equal_with_all_its_files(folder, tmp_path):
    (folder / "reflection.json").write_text("{}")
    (folder / "README.md").write_text("# card")
    bagel = load(folder, device="cpu")
    saved = save(bagel, tmp_path / "out" / "saved")
    assert {path.name for path in saved.iterdir()} == FILES | {"reflection.json", "README.md"}
    assert (saved / "README.md").read_text() == "# card"
    again = load(saved, device="cpu")
    assert again.config == bagel.config
    before, after = bagel.state_dict(), again.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # the files themselves are bf16 in the layout that was read
    stored = load_file(saved / "ema.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert set(stored) == set(load_file(folder / "ema.safetensors"))
    assert list(tmp_path.glob("out/*")) == [saved]


def test_other_weights_can_be_stored_in_place_of_the_models(folder, tmp_path):
    bagel = load(folder, device="cpu")
    average = {name: torch.full_like(tensor, 0.5) for name, tensor in bagel.state_dict().items()}
    saved = save(bagel, tmp_path / "average", weights=average)
    assert (load(saved, device="cpu").llm2vae.weight == 0.5).all()
    assert (bagel.llm2vae.weight != 0.5).all()


@pytest.mark.parametrize("cut", ["copyfile", "save_file"])
def test_a_save_that_is_cut_off_leaves_the_old_folder(folder, tmp_path, monkeypatch, cut):
    bagel = load(folder, device="cpu")
    target = save(bagel, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    bagel.llm2vae.weight.data.fill_(0.5)

    def full_disk(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(
            *((checkpoint.shutil, cut) if cut == "copyfile" else (checkpoint, cut)), full_disk
        )
        with pytest.raises(OSError, match="No space left on device"):
            save(bagel, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]
    save(bagel, target)
    assert (load(target, device="cpu").llm2vae.weight == 0.5).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


def test_weights_that_the_disk_cannot_take_are_one_line_and_leave_nothing(folder, tmp_path):
    bagel = load(folder, device="cpu")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match=r"ema\.safetensors cannot be written .*Free some"):
            save(bagel, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_saving_over_the_folder_that_the_model_came_from_works(folder):
    bagel = load(folder, device="cpu", dtype="bfloat16")
    expected = {name: tensor.clone() for name, tensor in bagel.state_dict().items()}
    save(bagel, folder)
    again = load(folder, device="cpu", dtype="bfloat16").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


def test_one_tensor_at_a_time_is_read(folder):
    files = TensorFiles(folder, "ema.safetensors")
    stored = load_file(folder / "ema.safetensors")
    assert files.shapes() == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    name, tensor = next(files.tensors(torch.device("cpu")))
    assert torch.equal(tensor, stored[name])
