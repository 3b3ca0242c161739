"""SpectraReward: the mean log-likelihood of the prompt, by transformers, by BAGEL, by a server."""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, models
from tokenizers import pre_tokenizers as splits
from tokenizers.trainers import BpeTrainer

from eval.rewards.registry import build
from eval.rewards.selftest import shape_pairs
from eval.rewards.spectra import Likelihood, Settings, resolved, tail, verdict_of
from eval.rewards.spectra_local import LocalSpectra
from eval.rewards.spectra_self import SelfSpectra
from eval.rewards.spectra_vllm import likelihood
from eval.transport import ServiceError
from tests.endpoint import judge_endpoint
from tests.tiny import CORPUS, write_tiny_checkpoint
from umm_reflect.errors import UsageError, UserError
from umm_reflect.tokens import qwen2_pipeline

PROMPTS = ["a red circle", "two stars left of a moon, and one more", "a blue square", "a"]
GREY = Image.new("RGB", (40, 30), (90, 90, 90))


def pictures() -> list[Image.Image]:
    return [pair.good.resize((64, 48)) for pair in shape_pairs()]


# --- the number -----------------------------------------------------------------------------------


def test_the_value_is_the_mean_and_the_score_the_geometric_mean():
    verdict = verdict_of(Likelihood(("a", " red", " star"), (-1.0, -2.0, -0.3)))
    assert verdict.value == pytest.approx(-1.1)
    assert verdict.reward == verdict.value
    assert verdict.score == pytest.approx(math.exp(-1.1))
    assert verdict.reason == "-1.100 a token; least likely: 'red' -2.00"
    assert verdict.evidence["logprobs"] == [-1.0, -2.0, -0.3]


def test_a_prompt_without_tokens_or_with_broken_numbers_is_not_judged():
    assert verdict_of(Likelihood((), ())).error == "the prompt has no tokens"
    assert "not finite" in verdict_of(Likelihood(("a",), (float("nan"),))).error


def test_the_answer_starts_where_the_conversation_differs():
    assert tail([1, 2, 3], [1, 2, 3, 4, 5]) == 2
    assert tail([1, 2, 9], [1, 2, 7, 4, 5]) == 3  # letters merged over the seam
    assert tail([1, 2], [1, 2]) == 0


def test_the_cards_variables_say_where_and_what_and_settings_win(monkeypatch):
    monkeypatch.delenv("SPECTRAREWARD_URL", raising=False)
    monkeypatch.delenv("SPECTRAREWARD_MODEL_ID", raising=False)
    published = resolved(Settings())
    assert (published.backend, published.model) == (
        "transformers",
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
    )
    monkeypatch.setenv("SPECTRAREWARD_URL", "http://10.0.0.2:18090")
    monkeypatch.setenv("SPECTRAREWARD_MODEL_ID", "Qwen/Qwen3-VL-8B-Instruct")
    told = resolved(Settings())
    assert (told.backend, told.url, told.model) == (
        "vllm",
        "http://10.0.0.2:18090",
        "Qwen/Qwen3-VL-8B-Instruct",
    )
    own = resolved(Settings(backend="transformers", model="mine"))
    assert (own.backend, own.url, own.model) == ("transformers", "", "mine")
    with pytest.raises(UsageError, match="backend self needs model"):
        build({"reward": "spectra", "backend": "self"})


# --- transformers ---------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A LLaVA of random weights: a CLIP tower and a Qwen2 of two layers each."""
    from transformers import (
        CLIPImageProcessor,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    folder = tmp_path_factory.mktemp("llava")
    tokenizer = qwen2_pipeline(models.BPE())
    letters = splits.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"]
    tokenizer.add_tokens([AddedToken(token, special=True) for token in special])
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlavaConfig(
        vision_config={
            **size,
            "model_type": "clip_vision_model",
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        },
        text_config={
            **size,
            "model_type": "qwen2",
            "vocab_size": 448,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        image_token_index=tokenizer.token_to_id("<image>"),
        vision_feature_layer=-1,
    )
    torch.manual_seed(1)
    model = LlavaForConditionalGeneration(config)
    for name, weights in model.named_parameters():
        if weights.ndim > 1:
            gain = 3.0 if "lm_head" in name else 1.0
            weights.data = gain * torch.randn_like(weights) / weights[0].numel() ** 0.5
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    square = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    LlavaProcessor(
        CLIPImageProcessor(**square),
        fast,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


def local(folder, **more) -> LocalSpectra:
    return LocalSpectra(
        resolved(Settings(backend="transformers", model=str(folder), device="cpu", **more))
    )


def test_a_batch_equals_one_forward_for_each_image_written_out(llava):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    reward = local(llava, batch_size=3)
    found = reward.score(pictures(), [{"prompt": prompt} for prompt in PROMPTS])
    model = AutoModelForImageTextToText.from_pretrained(llava).eval()
    processor = AutoProcessor.from_pretrained(llava)
    for image, prompt, verdict in zip(pictures(), PROMPTS, found, strict=True):
        opening = "<|im_start|>user\n<image>\n<|im_end|>\n<|im_start|>assistant\n"
        inputs = processor(text=[opening + prompt], images=[image], return_tensors="pt")
        ids = inputs["input_ids"][0]
        length = len(processor.tokenizer(prompt)["input_ids"])
        with torch.inference_mode():
            logprobs = model(**inputs).logits[0].log_softmax(-1)
        expected = [
            logprobs[place - 1, ids[place]].item() for place in range(len(ids) - length, len(ids))
        ]
        assert verdict.evidence["logprobs"] == pytest.approx(expected, abs=1e-4)
        assert verdict.value == pytest.approx(sum(expected) / length, abs=1e-4)
    reward.close()


def test_the_image_and_the_words_around_the_prompt_change_the_number(llava):
    plain, told = local(llava), local(llava, prompt_prefix="It shows ", user_instruction="Describe")
    rows = [{"prompt": "a red circle"}] * 2
    pair = shape_pairs()[0]
    good, bad = plain.score([pair.good, pair.bad], rows)
    assert good.value != bad.value
    other = told.score([pair.good], rows[:1])[0]
    assert len(other.evidence["tokens"]) > len(good.evidence["tokens"])
    assert other.evidence["tokens"][-2:] == good.evidence["tokens"][-2:]
    assert other.value != good.value


def test_a_token_that_ends_a_turn_is_no_target(llava):
    reward = local(llava)
    [verdict] = reward.score([GREY], [{"prompt": "a star<|im_end|>"}])
    assert "<|im_end|>" not in verdict.evidence["tokens"]
    [only] = reward.score([GREY], [{"prompt": "<|im_end|>"}])
    assert only.error == "the prompt has no tokens"


def test_random_weights_fail_the_check_and_are_in_the_manifest(llava):
    reward = local(llava)
    with pytest.raises(UserError, match="does not tell good from bad"):
        reward.check()
    assert len(reward.manifest()["sha256"]["model.safetensors"]) == 64


# --- BAGEL itself ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bagel_folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("bagel"))


def test_bagels_own_likelihood_is_what_it_says_of_forced_words(bagel_folder):
    from umm_reflect.context import Context
    from umm_reflect.generate import Engine, say

    settings = Settings(backend="self", model=str(bagel_folder), device="cpu", batch_size=3)
    reward = SelfSpectra.load(settings)
    found = reward.score(pictures(), [{"prompt": prompt} for prompt in PROMPTS])
    bagel = reward.bagel
    for image, prompt, verdict in zip(pictures(), PROMPTS, found, strict=True):
        ids = bagel.tokens.encode(prompt)
        cache = Engine(bagel).caches([Context.of(reward.transforms.segment(image))])
        [said] = say(
            bagel,
            cache,
            forced=[()],
            temperature=1.0,
            max_tokens=len(ids),
            generators=[torch.Generator()],
            force=[ids],
            support=bagel.config.llm.vocab_size,
        )
        assert verdict.evidence["logprobs"] == pytest.approx(said.logprobs, abs=1e-4)
    assert "sha256" in reward.manifest()
    reward.close()


# --- a server -------------------------------------------------------------------------------------

OPENING = [1, 2, 3]


def server(answer_ids, logprobs, off_by=0):
    """A stand-in for vLLM that tokenizes and scores every prompt alike."""

    def answer(body):
        if body["path"] == "/tokenize":
            ended = "continue_final_message" in body
            return {"tokens": [*OPENING, *(answer_ids if ended else [])]}
        entries = [None, *({"7": {"logprob": -0.1, "decoded_token": "x"}} for _ in range(4))]
        entries += [
            {str(i + off_by): {"logprob": p, "decoded_token": f"t{i}"}, "0": {"logprob": -9.0}}
            for i, p in zip(answer_ids, logprobs, strict=True)
        ]
        return {"choices": [{"message": {"content": "x"}}], "prompt_logprobs": entries}

    return answer


def test_a_servers_numbers_are_taken_from_the_end_by_id():
    with judge_endpoint(server([4, 5], [-1.0, -2.0])) as (url, seen):
        reward = build({"reward": "spectra", "url": url, "model": "tiny"})
        verdicts = reward.score([GREY] * 3, [{"prompt": p} for p in ("a", "b", "a")])
        reward.close()
    assert [v.value for v in verdicts] == [-1.5] * 3
    assert verdicts[0].evidence["tokens"] == ["t4", "t5"]
    asked = [body for body in seen if "prompt_logprobs" in body]
    assert len(asked) == 3
    assert len(seen) == 3 + 1 + 2  # the opening, and each prompt once
    body = asked[0]
    assert (body["max_tokens"], body["prompt_logprobs"], body["temperature"]) == (1, 0, 0.0)
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    said = sorted(one["messages"][1]["content"] for one in asked)
    assert said == ["a", "a", "b"]


def test_numbers_of_other_tokens_or_none_at_all_are_refused():
    with judge_endpoint(server([4, 5], [-1.0, -2.0], off_by=1)) as (url, _):
        reward = build({"reward": "spectra", "url": url, "model": "tiny"})
        with pytest.raises(UserError, match=r"are of other tokens .no id 4"):
            reward.score([GREY], [{"prompt": "a"}])
        reward.close()
    for nothing in (None, [], [None]):
        with pytest.raises(UserError, match="no prompt_logprobs for the whole prompt"):
            likelihood([4, 5], nothing)


def test_a_server_without_tokenize_or_with_another_model_is_named():
    with judge_endpoint(lambda body: 400) as (url, _):
        reward = build({"reward": "spectra", "url": url, "model": "tiny", "attempts": 1})
        with pytest.raises(ServiceError, match="/tokenize does not serve"):
            reward.score([GREY], [{"prompt": "a"}])
        reward.close()

    def other(body):
        if body["path"] == "/v1/models":
            return {"data": [{"id": "other"}]}
        return {"version": "0.32"}

    with judge_endpoint(other) as (url, _):
        reward = build({"reward": "spectra", "url": url, "model": "tiny"})
        with pytest.raises(UserError, match="serves other, not tiny"):
            reward.check()
        reward.close()
