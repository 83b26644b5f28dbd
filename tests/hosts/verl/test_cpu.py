"""verl without an accelerator: sampler, decoder, server, weight transfer, registration and workarounds, without Ray."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import subprocess
import types
from pathlib import Path

import pytest
import torch
from messages import raises
from waiting import NEVER

pytest.importorskip("verl", reason="verl is not installed")

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.demo.policy import build_model, build_tokenizer
from rl_plugins.runtime.cheap import CheapCopy, CheapOptions
from rl_plugins.verl.cpu import names, workarounds
from rl_plugins.verl.cpu.activate import activate
from rl_plugins.verl.cpu.decoder import Decoder, Request
from rl_plugins.verl.cpu.sampling import Sampling, choose, filtered_log_probs, penalize

pytestmark = pytest.mark.host
EOS = 1


@pytest.fixture(autouse=True, scope="module")
def _cpu():
    """This process is on the CPU platform, as every process of such a run is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_PLATFORM", "cpu")
        activate()
        yield


@pytest.fixture(scope="module")
def model():
    return build_model(3).eval()


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, 60, (n,), generator=generator).tolist() for n in lengths]


def finish(decoder, requests):
    decoder.step(requests)
    while decoder.requests:
        decoder.step()
    return requests


# ---- sampler


def plain_log_probs(logits, temperature, top_k, top_p):
    """One row, token by token: temperature, then top-k, then top-p."""
    if temperature == 0:
        return logits.log_softmax(0)
    scaled = (logits / temperature).tolist()
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    order = order[: top_k if top_k > 0 else None]
    probs = torch.tensor([scaled[i] for i in order]).softmax(0).tolist()
    kept, total = [], 0.0
    for i, p in zip(order, probs, strict=True):
        if top_p < 1 and total >= top_p:
            break
        kept.append(i)
        total += p
    out = torch.full_like(logits, -torch.inf)
    out[kept] = torch.tensor([scaled[i] for i in kept]).log_softmax(0)
    return out


def test_filter_equals_a_plain_loop():
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)) * 3
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 0.7, 1.3, 1.0])
    top_k = torch.tensor([-1, 5, 0, 3, 50, 7, 1, 20])
    top_p = torch.tensor([1.0, 1.0, 0.6, 0.5, 0.9, 0.3, 1.0, 0.999])
    out = filtered_log_probs(logits, temperature, top_k, top_p)
    for row in range(8):
        plain = plain_log_probs(logits[row], temperature[row].item(), top_k[row].item(), top_p[row].item())
        assert torch.equal(out[row].isinf(), plain.isinf())
        torch.testing.assert_close(out[row], plain, rtol=1e-5, atol=1e-5)
    assert out.isinf().any(1).tolist() == [False, True, True, False, True, True, True, True]


def test_choice_follows_the_distribution():
    """Noise on a grid of n points meets every token n * p times, and no token of probability 0."""
    probs = torch.tensor([0.0, 0.25, 0.0, 0.6, 0.15, 0.0])
    n = 20_000
    noise = (torch.arange(n) + 0.5) / n
    chosen = choose(probs.log().expand(n, -1), torch.zeros(n, dtype=torch.bool), noise)
    torch.testing.assert_close(torch.bincount(chosen, minlength=6) / n, probs, atol=2 / n, rtol=0)
    edges = torch.tensor([0.0, 1 - 2**-24])
    assert choose(probs.log().expand(2, -1), torch.zeros(2, dtype=torch.bool), edges).tolist() == [1, 4]
    assert choose(probs.log()[None], torch.tensor([True]), torch.tensor([0.99])).tolist() == [3]


def test_repetition_penalty_equals_a_plain_loop():
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    ids, mask = torch.tensor([[0, 2, 2], [0, 0, 7], [4, 5, 0]]), torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1]])
    penalty = torch.tensor([1.5, 2.0, 1.0])
    expected = logits.clone()
    for row, seen in enumerate([{2}, {0, 7}, {0, 4, 5}]):
        for i in seen:
            expected[row, i] = logits[row, i] / penalty[row] if logits[row, i] > 0 else logits[row, i] * penalty[row]
    torch.testing.assert_close(penalize(logits, ids, mask, penalty), expected)


def test_settings_come_from_verls_dictionary():
    read = Sampling.read({"temperature": 0.5, "top_k": 3, "stop_token_ids": [9], "logprobs": True}, 8, 100, True)
    assert read == Sampling(8, 0.5, 3, 1.0, 1.0, frozenset({9}), True, True)
    assert [Sampling.read({k: 20}, 8, room).max_tokens for k, room in (("max_tokens", 9), ("max_new_tokens", 30))] == [
        9,
        20,
    ]
    assert Sampling.read({"max_tokens": 0}, 8, 9).max_tokens == 1
    with pytest.raises(ValueError, match="asked to sample with min_p, which it does not have"):
        Sampling.read({"min_p": 0.1}, 8, 9)
    with pytest.raises(ValueError, match=r"top_p=0\.0"):
        Sampling.read({"top_p": 0}, 8, 9)


# ---- decoder


def test_greedy_equals_transformers(model):
    requests = [Request(p, Sampling(20, temperature=0)) for p in prompts(3, 9, 1, 5)]
    eos = finish(Decoder(model, []), requests)[0].tokens[4]  # so that rows end one after the other
    lengths = set()
    for request in finish(Decoder(model, [eos]), [Request(r.prompt, r.sampling) for r in requests]):
        out = model.generate(
            torch.tensor([request.prompt]), max_new_tokens=20, do_sample=False, eos_token_id=eos, pad_token_id=0
        )
        assert request.tokens == out[0, len(request.prompt) :].tolist()
        lengths.add(len(request.tokens))
    assert len(lengths) > 1 and max(lengths) == 20


def test_log_probs_are_the_models(model):
    settings = Sampling(12, temperature=0.7, top_k=8, top_p=0.9, repetition_penalty=1.2)
    requests = finish(Decoder(model, [EOS]), [Request(p, settings, seed=i) for i, p in enumerate(prompts(4, 7, 2))])
    for request in requests:
        ids = torch.tensor([[*request.prompt, *request.tokens]])
        with torch.no_grad():
            logits = model(ids).logits[0]
        for t, (token, log_prob) in enumerate(zip(request.tokens, request.log_probs, strict=True)):
            end = len(request.prompt) + t
            before = ids[:, :end]
            row = penalize(logits[end - 1 : end], before, torch.ones_like(before), torch.tensor([1.2]))
            assert plain_log_probs(row[0], 0.7, 8, 0.9)[token].item() == pytest.approx(log_prob, abs=2e-5)
            assert log_prob > -torch.inf


def test_a_request_does_not_depend_on_its_neighbors(model):
    def requests():
        return [Request(p, Sampling(12), seed=i) for i, p in enumerate(prompts(5, 2, 9, 3))]

    alone = [finish(Decoder(model, [EOS]), [r])[0].tokens for r in requests()]
    together = [r.tokens for r in finish(Decoder(model, [EOS]), requests())]
    late = requests()
    decoder = Decoder(model, [EOS])
    decoder.step(late[:1])
    decoder.step(late[1:3])
    finish(decoder, late[3:])
    assert alone == together == [r.tokens for r in late]
    assert len({tuple(r) for r in alone}) == 4


def test_a_request_ends_at_its_own_limits(model):
    (prompt,) = prompts(4)

    def run(eos=(), **settings):
        return finish(Decoder(model, eos), [Request(prompt, Sampling(max_tokens=30, **settings), seed=1)])[0].tokens

    free = run()
    assert len(free) == 30
    eos, stop = free[7], free[3]
    assert run({eos}) == free[: free.index(eos) + 1]
    assert run({eos}, ignore_eos=True) == free
    assert run({eos}, ignore_eos=True, stop_token_ids={stop}) == free[: free.index(stop) + 1] != free


# ---- server


def server(model, **limits):
    from rl_plugins.verl.cpu.server import Limits, Server

    return Server(Decoder(model, [EOS]), Limits(prompt_length=16, response_length=64, context=80, **limits))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_a_quantized_rollout_samples_from_the_copy_and_follows_the_weights():
    """Its log-probs are those of a copy of the present weights, and not of the weights."""
    torch.manual_seed(0)
    network, other = build_model(3).eval(), build_model(4).eval()
    for p in (*network.parameters(), *other.parameters()):
        p.data.add_(0.1 * torch.randn(p.shape))
    s = server(network)
    s.decoder = Decoder(network, [EOS], cheap=CheapOptions("fp4"))
    (prompt,) = prompts(6)

    def check(weights):
        request = finish(s.decoder, [Request(prompt, Sampling(max_tokens=12, ignore_eos=True), seed=1)])[0]
        ids = torch.tensor([prompt + request.tokens])
        found = []
        for m in (CheapCopy(weights, CheapOptions("fp4")).module, weights):
            with torch.no_grad():
                logits = m(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            found.append(logits[torch.arange(12), torch.tensor(request.tokens)])
        torch.testing.assert_close(torch.tensor(request.log_probs), found[0], rtol=0, atol=1e-4)
        assert (found[0] - found[1]).abs().mean() > 0.01

    check(network)
    asyncio.run(s.load_weights(other.state_dict(), 1))
    check(other)


GREEDY = {"temperature": 0, "ignore_eos": True, "logprobs": True}


def test_abort_between_two_tokens_and_resume(model):
    """The partial completion comes back; continuing from it gives what an unbroken request gives."""
    first, second = prompts(4, 6)

    async def run():
        s = server(model)
        whole = await s.generate("a", prompt_ids=first, sampling_params=GREEDY)
        running = asyncio.create_task(s.generate("b", prompt_ids=first, sampling_params=GREEDY))
        await until(lambda: s.decoder.requests and len(s.decoder.requests[0].tokens) >= 3)
        assert (await s.abort_all_requests())["aborted_count"] == 1
        partial = await asyncio.wait_for(running, NEVER)
        assert partial.stop_reason == "aborted" and 3 <= len(partial.token_ids) < 64
        assert len(partial.log_probs) == len(partial.token_ids)

        waiting = asyncio.create_task(s.generate("c", prompt_ids=second, sampling_params=GREEDY))
        await asyncio.sleep(0.1)
        assert not waiting.done() and not s.decoder.requests
        await s.resume_generation()
        assert (await waiting).stop_reason == "completed"

        rest = {**GREEDY, "max_tokens": 64 - len(partial.token_ids)}
        continued = await s.generate("d", prompt_ids=first + partial.token_ids, sampling_params=rest)
        assert partial.token_ids + continued.token_ids == whole.token_ids
        torch.testing.assert_close(
            torch.tensor(partial.log_probs + continued.log_probs), torch.tensor(whole.log_probs), atol=1e-5, rtol=0
        )

        await s.abort_all_requests(reject_request=True)
        rejected = await s.generate("e", prompt_ids=first, sampling_params=GREEDY)
        assert (rejected.stop_reason, rejected.token_ids) == ("aborted", [])

    asyncio.run(run())


def test_verls_own_client_hides_an_abort(model):
    """`FullyAsyncLLMServerClient` puts an interrupted request together again."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

    class Handle:
        """Calls as of a Ray actor."""

        def __init__(self, target):
            self.target = target

        def __getattr__(self, name):
            return types.SimpleNamespace(remote=getattr(self.target, name))

    class Balancer:
        async def require_acquire_fields(self):
            return []

        require_release_fields = require_acquire_fields

        async def acquire_server(self, request_id):
            return "0", handle

        def release_server(self, server_id):
            pass

    async def run():
        nonlocal handle
        s = server(model)
        handle = Handle(s)
        rollout = types.SimpleNamespace(name="hf_cpu", response_length=64)
        config = types.SimpleNamespace(actor_rollout_ref=types.SimpleNamespace(rollout=rollout))
        client = FullyAsyncLLMServerClient(config, Handle(Balancer()))
        (prompt,) = prompts(4)
        whole = await client.generate("a", prompt_ids=prompt, sampling_params=GREEDY)
        await s.set_global_steps(5)
        running = asyncio.create_task(client.generate("b", prompt_ids=prompt, sampling_params=GREEDY))
        await until(lambda: s.decoder.requests and len(s.decoder.requests[0].tokens) >= 3)
        await s.abort_all_requests()
        await s.set_global_steps(6)
        await s.resume_generation()
        merged = await running
        assert merged.token_ids == whole.token_ids and len(merged.log_probs) == 64
        assert (merged.extra_fields["min_global_steps"], merged.extra_fields["max_global_steps"]) == (5, 6)

    handle = None
    asyncio.run(run())


def test_samples_do_not_depend_on_the_order_of_requests(model):
    ids = [p for p in prompts(4, 6, 3) for _ in range(3)]

    async def run(order, steps=1):
        s = server(model)
        await s.set_global_steps(steps)
        params = {"temperature": 1.0, "max_tokens": 8}
        outs = await asyncio.gather(*(s.generate("x", prompt_ids=ids[i], sampling_params=params) for i in order))
        assert all(out.log_probs is None for out in outs)  # not asked for
        return sorted((ids[i], out.token_ids) for i, out in zip(order, outs, strict=True))

    forward = asyncio.run(run(range(9)))
    assert forward == asyncio.run(run([8, 1, 4, 0, 2, 7, 5, 3, 6]))
    assert forward != asyncio.run(run(range(9), steps=2))
    assert len({tuple(tokens) for _, tokens in forward}) == 9


def test_more_requests_than_fit_at_once(model):
    async def run():
        s = server(model, requests=2)
        sizes = []
        step = s.decoder.step

        def counted(arriving):
            finished = step(arriving)
            sizes.append(len(s.decoder.requests) + len(finished))
            return finished

        s.decoder.step = counted
        params = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
        outs = await asyncio.gather(*(s.generate("x", prompt_ids=p, sampling_params=params) for p in prompts(2, 3, 4)))
        assert [len(out.token_ids) for out in outs] == [3, 3, 3] and max(sizes) == 2
        with pytest.raises(ValueError, match="prompt of 80 tokens cannot be continued in a context of 80"):
            await s.generate("y", prompt_ids=[7] * 80, sampling_params=params)
        with pytest.raises(ValueError, match="was given image_data"):
            await s.generate("y", prompt_ids=[7], sampling_params=params, image_data=["x"])

    asyncio.run(run())


def test_a_failing_model_fails_its_requests_only(model):
    async def run():
        s = server(model)
        with pytest.raises(IndexError):
            await s.generate("x", prompt_ids=[10_000], sampling_params=GREEDY)
        assert (await s.generate("y", prompt_ids=[10], sampling_params=GREEDY)).stop_reason == "completed"

    asyncio.run(run())


# ---- weights


def test_new_weights_are_used_and_checked():
    old, new = build_model(1).eval(), build_model(2).eval()
    (prompt,) = prompts(5)

    async def run():
        s = server(old)
        before = await s.generate("x", prompt_ids=prompt, sampling_params=GREEDY)
        named = {name: p.detach().clone() for name, p in new.named_parameters()}
        assert "lm_head.weight" not in named  # tied, and sent once
        await s.load_weights(named, 7)
        after = await s.generate("x", prompt_ids=prompt, sampling_params=GREEDY)
        assert after.extra_fields["global_steps"] == 7
        return before.token_ids, after.token_ids, named, s

    before, after, named, s = asyncio.run(run())
    fresh = finish(Decoder(new, []), [Request(prompt, Sampling(64, temperature=0))])[0].tokens
    assert after == fresh != before
    gone = named.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"1 are missing \(model\.norm\.weight\), 0 are unexpected"):
        asyncio.run(s.load_weights(named))
    with pytest.raises(ValueError, match=r"1 are unexpected \(lora\)"):
        asyncio.run(s.load_weights({**named, "model.norm.weight": gone, "lora": gone}))
    with pytest.raises(ValueError, match=r"shape \(1,\)"):
        asyncio.run(s.load_weights({**named, "model.norm.weight": torch.ones(1)}))


def test_weights_travel_in_a_file(tmp_path):
    from rl_plugins.verl.cpu.weights import FileCheckpointEngine

    sender, other = (FileCheckpointEngine(0, is_master=master, folder=str(tmp_path)) for master in (True, False))
    receivers = [FileCheckpointEngine(0, folder=str(tmp_path)) for _ in range(2)]
    engines = [sender, other, *receivers]
    kwargs = FileCheckpointEngine.build_topology(2, 2, [engine.prepare() for engine in engines])
    paths = kwargs[0]["path"] + kwargs[1]["path"]
    for engine, path in zip(engines, paths, strict=True):
        engine.init_process_group(path=path)
    weights = {"a": torch.randn(3, 4).T, "b": torch.ones(2, dtype=torch.bfloat16)}

    async def receive(engine):
        return {name: tensor async for name, tensor in engine.receive_weights()}

    async def run():
        read = iter(weights.items())
        waiting = [asyncio.create_task(receive(engine)) for engine in receivers]
        await asyncio.sleep(0.1)
        assert await other.send_weights(read) == {} and next(read, None) is None
        sent = await sender.send_weights(iter(weights.items()))
        assert sent == {"cpu_file/megabytes": 52 / 2**20}
        return await asyncio.gather(*waiting)

    for received in asyncio.run(run()):
        assert received.keys() == weights.keys()
        assert all(torch.equal(received[name], weights[name]) for name in weights)
    assert list(tmp_path.iterdir()) == [Path(paths[0])]
    for engine in engines:
        engine.finalize()
    assert list(tmp_path.iterdir()) == []


# ---- registration


def test_nothing_happens_unless_asked(monkeypatch):
    placed, registered = [], []
    for module in (names, workarounds):
        monkeypatch.setattr(module, "after_import", lambda name, action: placed.append((name, action)))
    monkeypatch.setattr(
        importlib.import_module("rl_plugins.verl.cpu.platform"), "register", lambda: registered.append(1)
    )
    monkeypatch.delenv("VERL_PLATFORM")
    activate()
    assert placed == registered == []
    monkeypatch.setenv("VERL_PLATFORM", "CPU ")
    activate()
    once = list(placed)
    assert len({name for name, _ in once}) == 7 and len(once) == 8 and registered == [1]
    activate()
    assert placed == 2 * once, "the same actions, which run once"


def test_an_action_runs_once(monkeypatch):
    from rl_plugins.verl import imports

    monkeypatch.setattr(imports, "_placed", set())
    monkeypatch.setattr(imports._finder, "waiting", {})
    ran = []

    def action(module):
        ran.append(module.__name__)

    for module in ("types", "types", "no_module_of_this_name", "no_module_of_this_name"):
        imports.after_import(module, action)
    assert ran == ["types"] and imports._finder.waiting == {"no_module_of_this_name": [action]}


def test_the_platform_is_registered_and_refuses_a_rival(monkeypatch):
    from verl.plugin.platform import PlatformBase, PlatformRegistry, get_platform

    from rl_plugins.verl.cpu.platform import CPUPlatform

    platform = get_platform()
    assert isinstance(platform, CPUPlatform)
    assert not platform.is_platform_available(use_smi_check=True)  # never chosen unasked
    assert torch.ones(1).to(platform.current_device()).device.type == "cpu"
    assert platform.device_module.max_memory_allocated() == 0 and platform.device_module.mem_get_info() == (0, 0)
    state = platform.device_module.get_rng_state()
    drawn = torch.rand(2)
    platform.device_module.set_rng_state(state)
    assert torch.equal(torch.rand(2), drawn)

    class Rival(PlatformBase):
        pass

    monkeypatch.setattr(PlatformRegistry, "_platforms", {"cpu": Rival})
    with raises(ConfigError, match=r"'cpu'.*Rival"):
        activate()
    assert PlatformRegistry._platforms == {"cpu": Rival}


def test_names_are_registered_and_refuse_a_rival():
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

    assert issubclass(get_rollout_replica_class("hf_cpu"), RolloutReplica)
    assert get_rollout_class("hf_cpu").__name__ == "ServerAdapter"
    assert CheckpointEngineRegistry.get("cpu_file").__name__ == "FileCheckpointEngine"
    rival = types.SimpleNamespace(_ROLLOUT_REGISTRY={("hf_cpu", "async"): "somebody.Else"})
    with raises(ConfigError, match=r"somebody\.Else"):
        names._adapter(rival)


def test_what_the_rollout_cannot_do_is_refused():
    from verl.workers.config import RolloutConfig

    from rl_plugins.verl.cpu.rollout import check_config

    good = dict(name="hf_cpu", tensor_model_parallel_size=1)
    check_config(RolloutConfig(**good))
    with raises(ConfigError, match=r"tensor_model_parallel_size.*2.*actor_rollout_ref\.rollout\.tensor_m"):
        check_config(RolloutConfig(name="hf_cpu"))
    with raises(ConfigError, match="full_determinism"):
        check_config(RolloutConfig(**good, full_determinism=True))
    check_config(RolloutConfig(**good, quantization="int8"))
    with raises(ConfigError, match=r"fp8.*rollout\.name=hf_cpu.*bf16"):
        check_config(RolloutConfig(**good, quantization="fp8"))


# ---- workarounds


def test_process_group_is_gloo_once(monkeypatch):
    distributed = importlib.import_module("verl.utils.distributed")
    asked = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **kwargs: asked.append(kwargs["backend"]))
    distributed.initialize_global_process_group_ray()
    assert asked == ["cpu:gloo"]


def test_engines_and_offload_work_on_the_cpu():
    engines = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    registry = engines.EngineRegistry
    assert registry.get_engine_cls("language_model", "fsdp2") is engines.FSDPEngineWithLMHead
    assert registry.get_engine_cls("value_model", "fsdp2") is engines.FSDPEngineWithValueHead
    assert engines.CPUOffloadPolicy(pin_memory=True).pin_memory is False


def test_critic_takes_the_attention_of_the_config(tmp_path):
    from transformers import AutoConfig

    build_model(0).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation="flash_attention_2", num_labels=1)
    module = importlib.import_module("verl.utils.model")
    critic = module.load_valuehead_model(tmp_path, torch.float32, config, False)
    assert critic.config._attn_implementation == "sdpa"
    assert critic(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 1)


# What verl does today, and what it would do with the patch: (workaround, name, today, fixed).
def _backend_today(timeout_second=None, backend=None):
    return backend or f"cpu:gloo,{'cpu'}:gloo"


def _backend_fixed(timeout_second=None, backend=None):
    return backend or "cpu:gloo"


def _save_today(model):
    return {name: (p.detach().cpu(), None) for name, p in model.named_parameters()}, None


def _save_fixed(model):
    return {name: (p.detach().to("cpu", copy=True), None) for name, p in model.named_parameters()}, None


def _critic_today(local_path, torch_dtype, model_config, trust_remote_code):
    return dict(attn_implementation="flash_attention_2")


def _critic_fixed(local_path, torch_dtype, model_config, trust_remote_code):
    return dict(attn_implementation=model_config._attn_implementation)


class _EngineToday:
    def build(self, CPUOffloadPolicy):
        offload_policy = CPUOffloadPolicy(pin_memory=True)
        return offload_policy


class _EngineFixed:
    def build(self, CPUOffloadPolicy):
        # - ref: CPUOffloadPolicy(pin_memory=True)
        offload_policy = CPUOffloadPolicy(pin_memory="accelerator" == "cpu")
        return offload_policy


@pytest.mark.parametrize(
    ("workaround", "name", "today", "fixed"),
    [
        (workarounds.one_backend, "initialize_global_process_group_ray", _backend_today, _backend_fixed),
        (workarounds.copy_parameters, "fsdp2_sharded_save_to_cpu", _save_today, _save_fixed),
        (workarounds.value_model_attention, "load_valuehead_model", _critic_today, _critic_fixed),
    ],
)
def test_a_workaround_leaves_a_fixed_verl_alone(workaround, name, today, fixed):
    for function, changes in ((today, True), (fixed, False)):
        module = types.SimpleNamespace(**{name: function})
        workaround(module)
        assert (getattr(module, name) is not function) == changes


def test_offload_and_engine_leave_a_fixed_verl_alone():
    for engine, changes in ((_EngineToday, True), (_EngineFixed, False)):
        module = types.SimpleNamespace(FSDPEngine=engine, CPUOffloadPolicy=dict)
        workarounds.unpinned_offload(module)
        assert (module.CPUOffloadPolicy is not dict) == changes
        assert engine().build(module.CPUOffloadPolicy) == {"pin_memory": False}

    registered = []
    lm, value = object(), object()
    there = {("value_model", "fsdp"), ("value_model", "fsdp2")}

    def register(model_type, backend, device):
        def decorator(engine):
            assert (model_type, backend) not in there, "verl refuses a key that has an engine"
            registered.append((model_type, backend, device, engine))

        return decorator

    registry = types.SimpleNamespace(register=register)
    module = types.SimpleNamespace(FSDPEngineWithLMHead=lm, FSDPEngineWithValueHead=value, EngineRegistry=registry)
    workarounds.engine_for_cpu(module)
    assert registered == [("language_model", "fsdp", "cpu", lm), ("language_model", "fsdp2", "cpu", lm)]


def test_a_snapshot_of_the_parameters_does_not_train_along():
    module = types.SimpleNamespace(fsdp2_sharded_save_to_cpu=_save_today)
    workarounds.copy_parameters(module)
    layer = torch.nn.Linear(2, 1)
    before = layer.weight.detach().clone()
    state, _ = module.fsdp2_sharded_save_to_cpu(layer)
    layer.weight.data += 1
    assert torch.equal(state["weight"][0], before)


# ---- the demo's data


def test_demo_data_and_rewards(tmp_path):
    import pyarrow.parquet

    from rl_plugins.lab.demo import verl_data
    from rl_plugins.lab.demo.tasks import solve, split_of

    verl_data.write(tmp_path)
    for name, split, n in (("train", "train", 300), ("test", "held_out", 320)):
        rows = pyarrow.parquet.read_table(tmp_path / f"{name}.parquet").to_pylist()
        assert len(rows) == n
        for index, row in enumerate(rows):
            prompt = row["prompt"][0]["content"]
            assert split_of(prompt) == split and row["reward_model"]["ground_truth"] == solve(prompt)
            assert row["extra_info"]["index"] == index and row["extra_info"]["level"] == (len(prompt) - 2) // 2
    assert verl_data.compute_score("digit_lists", "=1359", "1359", {}, more=1) == pytest.approx(
        {"score": 1.1, "exact": 1.0, "digits": 1.0, "format": 1.0, "careful": 0.1}
    )
    assert verl_data.compute_score("digit_lists", "?1399", "1359") == pytest.approx(
        {"score": 0.75, "exact": 0.0, "digits": 0.75, "format": 0.75, "careful": 0.0}
    )
    assert verl_data.compute_score("digit_lists", "?1359", "1359", binary=True)["score"] == 1.0


def test_verl_takes_the_demos_overrides(tmp_path):
    import verl
    from hydra import compose, initialize_config_dir

    from rl_plugins.lab.demo import verl_data

    odd = tmp_path / "a b'c=d"
    for methods in ((), ("mc_grpo", "grpo_roc")):
        lines = verl_data.overrides(tmp_path, odd, odd, methods=methods, steps=7)
        folder = Path(verl.__file__).parent / "trainer" / "config"
        with initialize_config_dir(str(folder), version_base=None):
            config = compose("ppo_trainer", overrides=lines)
        assert config.actor_rollout_ref.model.path == str(odd)
        assert config.trainer.total_training_steps == 7 and config.actor_rollout_ref.rollout.name == "hf_cpu"
        if not methods:
            assert "rl_plugins" not in config and config.trainer.v1.trainer_mode == "sync"
        else:
            assert list(config.rl_plugins.methods) == ["mc_grpo", "grpo_roc"]
            assert config.rl_plugins.method_params.mc_grpo.advantage_clip == 3.0
            assert config.rl_plugins.rewards == {"exact": 1.0, "digits": 0.0, "careful": 0.0}
            assert config.reward.custom_reward_function.reward_kwargs.binary is True


def test_verl_tokenizes_the_demos_prompts():
    """verl picks a token builder by model type; Qwen's wants the newline to be one token."""
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    if "hf_model_type" not in inspect.signature(create_continuous_token_builder).parameters:
        pytest.skip("verl 0.9.0 applies the chat template")
    tokenizer = build_tokenizer()
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen3")
    tokens = builder.build_initial_tokens([{"role": "user", "content": "a:5391"}])
    assert tokenizer.decode(tokens) == "<user>a:5391<asst>" and len(tokens) == 8


# ---- what rollout programs ask for


def test_the_most_likely_tokens_are_the_models(model):
    """At temperature 1, whatever is sampled with; of every request as many as it asks for."""
    asked = [Sampling(6, 0.5, 4, top_logprobs=3), Sampling(6, 2.0), Sampling(6, 0, top_logprobs=1)]
    requests = [Request(p, s, seed=i) for i, (p, s) in enumerate(zip(prompts(4, 7, 2), asked, strict=True))]
    for request in finish(Decoder(model, []), requests):
        k = request.sampling.top_logprobs
        ids = torch.tensor([[*request.prompt, *request.tokens]])
        with torch.no_grad():
            plain = model(ids).logits[0, len(request.prompt) - 1 : -1].log_softmax(1)
        values, tokens = plain.topk(max(k, 1))
        assert [[t for t, _ in place] for place in request.top] == (tokens.tolist() if k else [])
        for place, row in zip(request.top, values.tolist(), strict=bool(k)):
            assert [p for _, p in place] == pytest.approx(row, abs=2e-5)
    assert requests[2].tokens == [place[0][0] for place in requests[2].top]
    assert len(requests[0].top) == len(requests[0].tokens) == 6


def test_a_text_that_was_asked_for_ends_a_request(model):
    tokenizer = build_tokenizer()
    (prompt,) = prompts(5)

    def run(*stop, seed=3):
        request = Request(prompt, Sampling(40, stop=stop), seed=seed)
        return tokenizer.decode(finish(Decoder(model, [], tokenizer), [request])[0].tokens)

    free = run()
    text = free[5:7]  # of two tokens
    stopped = run("never", text)
    assert stopped == free[: free.index(text) + 2] and stopped.endswith(text)
    assert run("never") == free
    read = Sampling.read({"stop": ["a"], "include_stop_str_in_output": True, "top_logprobs": 2}, 8, 9)
    assert (read.stop, read.top_logprobs) == (("a",), 2)
    with pytest.raises(ValueError, match="without include_stop_str_in_output=True"):
        Sampling.read({"stop": ["a"]}, 8, 9)


def test_the_server_reports_them(model):
    async def run():
        s = server(model)
        params = {"temperature": 1.0, "max_tokens": 4, "ignore_eos": True, "logprobs": True}
        with_top, without = await asyncio.gather(
            s.generate("a", prompt_ids=[7, 8], sampling_params=params | {"top_logprobs": 2}),
            s.generate("b", prompt_ids=[9], sampling_params=params),
        )
        assert [len(place) for place in with_top.extra_fields["top_logprobs"]] == [2] * 4
        assert "top_logprobs" not in without.extra_fields

    asyncio.run(run())


@pytest.mark.parametrize("own", ["", "mine.jsonl"])
def test_the_metrics_of_earlier_starts_are_kept(own, tmp_path):
    """verl's file logger begins its file again at every start, also at a resume. A path of the user's stays."""
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text('#!/bin/bash\n[[ $* != *main_ppo* ]] || echo "$START" > "$VERL_FILE_LOGGER_PATH"\n')
    python.chmod(0o755)
    script = Path(__file__).parents[3] / "examples" / "verl" / "laptop.sh"
    file = tmp_path / own if own else out / "metrics.jsonl"
    named = {"VERL_FILE_LOGGER_PATH": str(file) if own else ""}
    for start in ("first", "second", "third"):
        environment = {**os.environ, **named, "OUT": str(out), "PYTHON": str(python), "START": start}
        subprocess.run(["bash", str(script)], env=environment, check=True, capture_output=True)
    found = [file.with_stem(f"{file.stem}{end}").read_text().strip() for end in ("-1", "-2", "")]
    assert found == ["first", "second", "third"]
