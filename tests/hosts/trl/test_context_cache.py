"""Keys and values kept between calls change what is read, and nothing that comes out: against calls without them, in
float64, on models of several families."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_plugins.trl.compat import cache_argument, fell_back
from rl_plugins.trl.generation.context_cache import ContextCache, no_reuse

SIZE = dict(vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
SMALL_EYES = dict(depth=1, embed_dim=8, hidden_size=16, num_heads=2, mlp_ratio=2)
THREE_AXES = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 0])
SIZE |= dict(num_key_value_heads=2, head_dim=4, max_position_embeddings=256, bos_token_id=None, eos_token_id=None)


def build(family):
    torch.manual_seed(3)
    if family == "gpt2":  # positions are learned embeddings
        model = GPT2LMHeadModel(GPT2Config(vocab_size=23, n_embd=16, n_layer=2, n_head=4, n_positions=256))
    elif family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZE))
    elif family == "sliding":
        model = MistralForCausalLM(MistralConfig(**SIZE, sliding_window=8))
    elif family in ("dynamic", "yarn"):
        rope = {"rope_type": family, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
        model = LlamaForCausalLM(LlamaConfig(**{**SIZE, "max_position_embeddings": 64}, rope_parameters=rope))
    elif family == "gpt":  # keeps nothing
        model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=23, n_embd=16, n_layer=2, n_head=4, n_positions=256))
    elif family == "images":
        model = Qwen2VLForConditionalGeneration(
            Qwen2VLConfig(text_config={**SIZE, "rope_parameters": THREE_AXES}, vision_config=SMALL_EYES)
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZE))
    if family == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "v_proj"]))
    return model.double().eval()


class Saw(LogitsProcessor):
    def __init__(self):
        self.logits = []

    def __call__(self, input_ids, scores):
        self.logits.append(scores)
        return scores


class Serves:
    """Contexts in, tokens and logits out, with or without a cache; counts the positions that went through the model."""

    def __init__(self, model, cache=None, sample=True):
        self.model, self.cache = model, cache
        self.config = GenerationConfig(do_sample=sample, eos_token_id=1, pad_token_id=0)
        self.positions = self.passes = 0

    def __call__(self, contexts, tokens, seed, pad=0):
        width = max(map(len, contexts)) + pad
        ids = torch.tensor([[0] * (width - len(c)) + list(c) for c in contexts])
        mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts])
        saw, config = Saw(), GenerationConfig(**self.config.to_diff_dict())
        config.max_new_tokens = tokens
        options = dict(input_ids=ids, attention_mask=mask, logits_processor=LogitsProcessorList([saw]))
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        hook = inner.register_forward_pre_hook(self._count, with_kwargs=True)
        torch.manual_seed(seed)
        with torch.no_grad():
            if self.cache is None:
                out = self.model.generate(generation_config=config, **options)
            else:
                out = self.cache.generate(self.model.generate, self.model, config, **options)
        hook.remove()
        return out[:, width:].tolist(), torch.stack(saw.logits, 1)

    def _count(self, module, args, kwargs):
        self.passes += 1
        self.positions += kwargs["input_ids"].numel()


def both(model, limit=10**9, **options):
    return Serves(model), Serves(model, ContextCache(limit, **options))


def equal(plain, ours, contexts, tokens, seed=0, pad=0, within=1e-12):
    """Both serve it alike; the tokens."""
    want, logits = plain(contexts, tokens, seed)
    made, own = ours(contexts, tokens, seed, pad)
    assert made == want
    assert (logits - own).abs().max() < within
    return made


@pytest.mark.parametrize("family", ["qwen3", "llama", "yarn", "gpt2", "lora"])
def test_turns_of_agents_read_what_is_new(family):
    plain, ours = both(build(family))
    rng = random.Random(0)
    contexts = [[rng.randrange(2, 23) for _ in range(rng.randint(3, 30))] for _ in range(5)]
    for turn in range(4):
        ours.positions = 0
        made = equal(plain, ours, contexts, 4, seed=turn, pad=turn % 3)
        # the last token made, which no pass has read, and two of the environment, and three passes for the others
        assert turn == 0 or ours.positions <= 5 * (3 + 3)
        ours.cache.end_round()
        contexts = [[*c, *m, 2 + turn, 5] for c, m in zip(contexts, made, strict=True)]
    assert ours.cache.read < 0.5 * ours.cache.positions


def test_branches_of_a_tree_read_from_the_branch_on():
    """Cut in the middle of what was generated, with another token in its place; the parent's row is used by several."""
    plain, ours = both(build("qwen3"))
    root = [3, 4, 5, 6, 7, 8, 9]
    plain.config.eos_token_id = ours.config.eos_token_id = None
    (made,) = equal(plain, ours, [root], 12)
    ours.cache.end_round()
    branches = [[*root, *made[:k], 2 + (made[k] + 1) % 21] for k in (1, 4, 4, 9)] + [[*root, *made]]
    ours.positions = 0
    equal(plain, ours, branches, 3)
    assert ours.positions == 5 * (1 + 2)  # a new token each, and two passes
    ours.cache.end_round()
    equal(plain, ours, [[*root, *made[:1], 22]], 1)
    ours.cache.end_round()
    ours.positions = 0
    equal(plain, ours, [[*root, *made[:10], 22]], 1)
    assert ours.positions == 1  # the parent is there as long as its branches are grown


def test_continuations_of_a_context_read_it_once():
    plain, ours = both(build("qwen3"))
    contexts = [[c] * 100 for c in (3, 4)] * 8
    equal(plain, ours, contexts, 3)
    assert plain.positions == 16 * (100 + 2)
    assert ours.positions == 2 * 100 + 16 * (1 + 2) and ours.passes == plain.passes + 1
    plain, ours = both(build("qwen3"), more_passes=False)
    equal(plain, ours, contexts, 3)
    assert ours.positions == plain.positions and ours.passes == plain.passes


def test_a_short_context_is_not_worth_a_pass():
    plain, ours = both(build("qwen3"))
    equal(plain, ours, [[3, 4, 5]] * 8, 3)
    assert ours.passes == plain.passes


def test_one_long_new_context_is_read_ahead_of_many_known_ones():
    plain, ours = both(build("qwen3"))
    contexts = [[k] * 60 for k in range(3, 19)]
    made = equal(plain, ours, contexts, 3)
    ours.cache.end_round()
    contexts = [[*c, *m, 2] for c, m in zip(contexts, made, strict=True)] + [[20] * 80]
    ours.positions = 0
    equal(plain, ours, contexts, 2)
    assert ours.positions == 80 + 17 * 2 + 17


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([10**9, 20_000, 3_000, 0]), st.booleans())
def test_any_sequence_of_requests(seed, limit, sample):
    """New contexts, equal ones, extensions, cuts and branches, several calls per round, whatever the limit is."""
    model, rng = build("qwen3"), random.Random(seed)
    plain, ours = Serves(model, sample=sample), Serves(model, ContextCache(limit), sample=sample)
    pool = []
    for _ in range(rng.randint(1, 4)):
        for _ in range(rng.randint(1, 2)):
            contexts = []
            for _ in range(rng.randint(1, 10)):
                kind = rng.choice(["new", "equal", "longer", "cut"]) if pool else "new"
                c = [rng.randrange(2, 23) for _ in range(rng.choice([1, 5, 90]))] if kind == "new" else rng.choice(pool)
                if kind == "longer":
                    c = [*c, *(rng.randrange(2, 23) for _ in range(rng.randint(1, 6)))]
                elif kind == "cut":
                    c = c[: rng.randint(1, len(c))]
                contexts.append(c)
            made = equal(plain, ours, contexts, rng.randint(1, 5), seed, rng.choice([0, 3]))
            pool = [*pool[-20:], *([*c, *m] for c, m in zip(contexts, made, strict=True))]
        assert sum(c.size for c in ours.cache._kept) <= limit and all(c.tokens for c in ours.cache._kept)
        ours.cache.end_round()
    assert ours.positions <= plain.positions + 64 * ours.passes  # padding columns


def test_beyond_the_limit_some_rows_are_kept():
    """Of 16 rows 14 fit; the other two are read ahead, in a pass of their own."""
    row = 2 * 2 * 2 * 4 * 8 * 101  # keys and values, layers, heads, size of a head, bytes, positions
    plain, ours = both(build("qwen3"), limit=14 * row + 100)
    contexts = [[k] * 99 for k in range(2, 18)]
    made = equal(plain, ours, contexts, 3)
    assert [len(c.tokens) for c in ours.cache._kept] == [14]
    ours.cache.end_round()
    contexts = [[*c, *m, 3] for c, m in zip(contexts, made, strict=True)]
    ours.positions = 0
    equal(plain, ours, contexts, 1)
    assert ours.positions == 2 * 103 + 16 * 2
    kept = ours.cache._kept[-1]
    assert sum(x.untyped_storage().nbytes() for layer in kept.layers for x in layer) <= 14 * row + 100


def test_a_rank_that_is_done_before_the_others():
    """With shared parameters it goes on with passes, whose positions are nothing it generated."""
    model = build("qwen3")
    plain, ours = both(model, more_passes=False)
    host, name = model.generate, cache_argument(model)

    def synced(**kwargs):
        out = host(**kwargs)
        more = torch.cat([kwargs["attention_mask"], torch.ones(len(out), out.size(1) - kwargs["input_ids"].size(1))], 1)
        for _ in range(3):
            model(input_ids=out[:, -1:], attention_mask=more, use_cache=True, **{name: kwargs[name]})
            more = torch.cat([more, more[:, -1:]], 1)
        return out

    model.generate = synced
    contexts = [[3, 4, 5, 6], [7, 8, 9, 10, 11]]
    with torch.no_grad():
        made, _ = ours(contexts, 4, 0)
    ours.cache.end_round()
    del model.generate
    contexts = [[*c, *m, 5] for c, m in zip(contexts, made, strict=True)]
    ours.positions = 0
    equal(plain, ours, contexts, 1)
    assert ours.positions == 2 * 2


def test_what_nobody_uses_goes():
    _, ours = both(build("qwen3"))
    ours([[3, 4, 5]], 2, 0)
    ours.cache.end_round()
    assert len(ours.cache._kept) == 1
    ours([[9, 9, 9]], 2, 0)
    ours.cache.end_round()
    assert [len(c.tokens) for c in ours.cache._kept] == [1] and ours.cache._kept[0].tokens[0].startswith(b"\0\0\0\t")


@pytest.mark.parametrize("family", ["sliding", "dynamic", "images", "gpt"])
def test_models_that_read_whole_contexts(family, caplog):
    """The run says so, once."""
    fell_back.cache_clear()
    model = build(family)
    plain, ours = both(model)
    for contexts in ([[3] * 90] * 8, [[3] * 92] * 4):
        # with transformers 5.24 (not explained): its dynamic RoPE may depend on what the model read before
        equal(
            plain, ours, contexts, 3, within=1e-6 if family == "dynamic" and cache_argument(model) == "cache" else 1e-12
        )
    assert ours.positions == plain.positions and not ours.cache._kept
    assert ours.cache.read == ours.cache.positions == 720 + 368
    assert caplog.text.count("rollout_cache_gb has no effect") == 1


def test_a_model_whose_forward_takes_no_cache(caplog):
    """transformers 5.24 calls the parameter `cache`; one more name would be told."""
    fell_back.cache_clear()
    model = build("qwen3")
    assert no_reuse(model, model.generation_config, {}) == "" and cache_argument(model) in ("cache", "past_key_values")
    model.forward = lambda input_ids, kept_states=None: None
    ContextCache(10**9).generate(dict, model, GenerationConfig(), torch.ones(1, 2).long(), torch.ones(1, 2).long())
    assert "`forward` of the model takes no cache" in caplog.text


OWN = [("use_cache", False), ("cache_implementation", "static"), ("prefill_chunk_size", 32), ("num_beams", 2)]


@pytest.mark.parametrize("of", ["run", "model"])
@pytest.mark.parametrize(("option", "value"), OWN)
def test_options_with_which_whole_contexts_are_read(option, value, of):
    """Given for the run, or left to the model's own generation config, as TRL leaves it."""
    model = build("qwen3")
    plain, ours = both(model)
    for config in (model.generation_config,) if of == "model" else (plain.config, ours.config):
        setattr(config, option, value)
    for seed in range(2):
        if option == "num_beams":  # its logits are those of beams
            ours.cache.generate(dict, model, ours.config, *(torch.ones(8, 90).long(),) * 2)
        else:
            equal(plain, ours, [[3] * 90] * 8, 3, seed)
    assert not ours.cache._kept and ours.cache.read == ours.cache.positions == 2 * 720


def test_what_comes_with_the_tokens():
    """Images: the tokens are not all there is to a context. Prompt tuning: there are positions before them."""
    from peft import PromptTuningConfig, get_peft_model

    ids, mask = torch.full((8, 90), 3), torch.ones(8, 90, dtype=torch.int64)
    for model, more in (
        (build("qwen3"), {"pixel_values": torch.zeros(1)}),
        (get_peft_model(build("qwen3"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)), {}),
    ):
        seen = ContextCache(10**9).generate(dict, model, GenerationConfig(), ids, mask, **more)
        assert cache_argument(build("qwen3")) not in seen and set(more) < set(seen)


def test_a_model_that_recomputes_activations():
    """It leaves nothing where its host makes no cache then; transformers 5.24 makes one without gradients."""
    model = build("qwen3")
    plain, ours = both(model)
    model.train()
    model.gradient_checkpointing_enable()
    for _ in range(2):
        equal(plain, ours, [[3] * 90], 3)
    with torch.no_grad():
        left = getattr(model(input_ids=torch.ones(1, 2).long(), use_cache=True), cache_argument(model))
    assert bool(ours.cache._kept) == bool(left is not None and left.get_seq_length())
