"""The embedded policy: a character-level Qwen3 of 78,272 parameters, warm-started on this machine and kept in a cache.

The warm start is supervised fine-tuning on demonstrations of the tasks, most of them sloppy: with probability 0.8 the
demonstrator writes the mark ``?`` and replaces each digit with probability 0.2, else it writes ``=`` and makes no
mistake. The policy that results knows the tasks (greedy decoding is right on about 88 % of unseen prompts) but samples
badly (33 % at temperature 1), which leaves reinforcement learning something to do within a minute.

Everything runs offline. The warm start sets torch to one thread for its own duration, so a rerun on the same machine
gives the same weights bit for bit. The global random number generators are left as they were.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs
import psutil
import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_plugins.lab.demo import tasks
from rl_plugins.lab.demo.rewards import exact

Progress = Callable[[int, int, float], None]
"""Called after every warm-start step with (steps done, steps in all, loss of the step)."""

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<user>", "<asst>")
CHARACTERS = "0123456789=?+-*/%,.:;!<>()[]# \nabcdefghijklmnopqrstuvwxyz"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<asst>{% generation %}{{ message['content'] }}<eos>{% endgeneration %}"
    "{% else %}<user>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<asst>{% endif %}"
)
MAX_COMPLETION_LENGTH = 14
"""Tokens: one style mark, ten digits and the end of the sequence fit, with two to spare for what goes wrong."""

MANIFEST = "manifest.json"
BUILDING = "demo-policy-building"  # of folders of the cache


@dataclasses.dataclass(frozen=True)
class Fit:
    """Supervised training: AdamW, linear warm-up, cosine decay to a twentieth, gradients clipped at norm 1."""

    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 5e-3
    warmup_steps: int = 20
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class WarmStart(Fit):
    """Settings of the warm start."""

    sloppy: float = 0.8  # share of demonstrations with the mark "?"
    digit_noise: float = 0.2  # chance that such a demonstration replaces a digit by a random one


WARM_START = WarmStart()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of ``CHARACTERS``, any other is ``<unk>``; pads on the left."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<asst>"],
        padding_side="left",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(seed: int = 0) -> Qwen3ForCausalLM:
    """The untrained policy, float32 on the CPU: two layers, hidden size 64, two heads of size 32, tied embeddings."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.06,  # with the usual 0.02 a model this narrow learns far more slowly
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        eos_token_id=SPECIAL_TOKENS.index("<eos>"),
        bos_token_id=SPECIAL_TOKENS.index("<bos>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reach the generators of the GPUs
        return Qwen3ForCausalLM(config)


def demonstration(rng: random.Random, answer: str, settings: WarmStart) -> str:
    """What the demonstrator writes for a prompt whose right answer is ``answer``."""
    if rng.random() >= settings.sloppy:
        return tasks.CAREFUL + answer
    written = (rng.choice("0123456789") if rng.random() < settings.digit_noise else digit for digit in answer)
    return tasks.SLOPPY + "".join(written)


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: WarmStart | None = None,
    progress: Progress | None = None,
) -> None:
    """Train ``model`` in place on demonstrations of prompts of the train split; the loss is on completion tokens only.

    Args:
        model: A model of :func:`build_model`.
        tokenizer: The tokenizer of :func:`build_tokenizer`.
        settings: ``WARM_START`` when None.
        progress: Called after every step.
    """
    settings = WARM_START if settings is None else settings
    rng = random.Random(settings.seed)
    fit(model, lambda: _demonstrations(rng, tokenizer, settings), settings, progress)


def fit(
    model: PreTrainedModel,
    batch: Callable[[], Any],
    settings: Fit,
    progress: Progress | None = None,
    loss_of: Callable[[PreTrainedModel, Any], torch.Tensor] | None = None,
) -> None:
    """Supervised training in place, in one thread.

    Args:
        model: Left in evaluation mode.
        batch: Makes the next batch, see :func:`labeled`.
        settings: Of the optimizer and the schedule.
        progress: Called after every step.
        loss_of: Loss of the model on a batch; None: cross-entropy of the next token.
    """
    loss_of = next_token_loss if loss_of is None else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / settings.warmup_steps)
            * (0.05 + 0.95 * (1 + math.cos(math.pi * step / settings.steps)) / 2)
        ),
    )
    with _one_thread():
        model.train()
        for step in range(settings.steps):
            loss = loss_of(model, batch())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if progress is not None:
                progress(step + 1, settings.steps, loss.item())
    model.eval()


def next_token_loss(model: PreTrainedModel, inputs: Any) -> torch.Tensor:
    """Cross-entropy of every labeled token, given those before it."""
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def policy_path(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where :func:`load_policy` keeps the policy, whether it was built already or not."""
    return cache_folder(cache_dir) / f"demo-policy-{cache_key(WARM_START, __file__, str(tasks.__file__))}"


def load_policy(cache_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Directory of the warm-started policy and its tokenizer, for ``from_pretrained``; built when the cache lacks it.

    The name of the directory is a hash of what determines the weights: the settings, the source of this module and of
    ``tasks``, and the versions of torch, transformers and tokenizers. Several processes may call this at once: each
    that finds no policy builds one apart and moves it into place in a single step, and the first to do so wins. Files
    that do not match the checksums written with them are reported with a warning and built again.

    Args:
        cache_dir: Where to keep policies; else the environment variable ``RL_PLUGINS_CACHE``, else the user's cache.
        progress: Called after every step of the warm start, never when the policy was in the cache.

    Raises:
        OSError: the cache cannot be written.
    """
    return cached(policy_path(cache_dir), functools.partial(_build, progress=progress))


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where policies are kept: `cache_dir`, else the environment variable, else the user's cache."""
    return Path(cache_dir or os.environ.get("RL_PLUGINS_CACHE") or platformdirs.user_cache_dir("rl-plugins"))


def cache_key(settings: Fit, *sources: str) -> str:
    """A hash of what determines weights: settings, source files, and the versions of the libraries."""
    determines = {
        "settings": dataclasses.asdict(settings),
        "sources": [hashlib.sha256(Path(source).read_bytes()).hexdigest() for source in sources],
        "versions": [library.__version__ for library in (torch, transformers, tokenizers)],
    }
    return hashlib.sha256(json.dumps(determines, sort_keys=True).encode()).hexdigest()[:16]


def cached(policy: Path, build: Callable[[Path], None]) -> Path:
    """`policy`, a directory of the cache, once it is whole; `build(directory)` makes it when it is not.

    Raises:
        OSError: the cache cannot be written.
    """
    cache = policy.parent
    damage = _damage(policy)
    if damage is None:
        return policy
    if policy.exists():
        warnings.warn(f"The cached demo policy in {policy} is damaged ({damage}); it is built again.", stacklevel=3)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for left in cache.glob(f"{BUILDING}-*"):  # by processes that were killed
            maker = left.name.split("-")[-2]
            if not maker.isdigit() or not psutil.pid_exists(int(maker)):
                shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{BUILDING}-{os.getpid()}-", dir=cache))
    except OSError as error:
        raise OSError(
            f"The demo policy cannot be cached in {cache} ({error}). Set the environment variable RL_PLUGINS_CACHE, "
            "or pass cache_dir, to a directory that can be written."
        ) from error
    try:
        build(scratch / "policy")
        _move_into_place(scratch / "policy", policy, scratch / "damaged")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return policy


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a policy for :func:`cached`, with checksums."""
    with _no_progress_bar():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    sign(directory)


def sign(directory: Path) -> None:
    """Writes the checksums of a policy's files, so that damage is seen."""
    checksums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}
    (directory / MANIFEST).write_text(json.dumps(checksums, indent=1))


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Mapping[str, Any]],
    samples: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
) -> dict[int, float]:
    """Share of exactly right completions per level.

    Args:
        model: The policy, on any device; its training mode is restored afterwards.
        tokenizer: Its tokenizer, with a chat template and left padding.
        rows: Rows of :func:`rl_plugins.lab.demo.tasks.build_rows` or a data set of them.
        samples: Completions per row.
        temperature: Of the sampling, over the whole vocabulary; 0 is greedy decoding.
        seed: Of the sampling. The global generators are left as they were.
    """
    rows = [row for row in rows for _ in range(samples)]
    chats = [row["prompt"] for row in rows]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    if temperature > 0:
        sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    else:
        sampling = {"do_sample": False}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.default_generator.manual_seed(seed)
            if model.device.type == "cuda":
                torch.cuda.manual_seed(seed)
            output = model.generate(
                **inputs,
                max_new_tokens=MAX_COMPLETION_LENGTH,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                **sampling,
            )
    finally:
        model.train(was_training)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    scores: dict[int, list[float]] = {}
    for row, score in zip(rows, exact(None, texts, answer=[row["answer"] for row in rows]), strict=True):
        scores.setdefault(row["level"], []).append(score)
    return {level: sum(scores[level]) / len(scores[level]) for level in sorted(scores)}


def _demonstrations(rng: random.Random, tokenizer: PreTrainedTokenizerFast, settings: WarmStart) -> Any:
    """One batch of model inputs with labels, padded on the right."""
    texts = []
    for _ in range(settings.batch_size):
        prompt = tasks.random_prompt(rng, rng.choice(tasks.LEVELS))
        completion = demonstration(rng, tasks.solve(prompt), settings)
        # What the chat template makes of the two messages; rendering it for every row would take most of the time.
        texts.append(f"<user>{prompt}<asst>{completion}<eos>")
    return labeled(tokenizer, texts)


def labeled(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Any:
    """Model inputs with labels for rendered conversations, padded on the right; labels are what the assistant wrote."""
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", return_token_type_ids=False)
    ids = batch["input_ids"]
    asked = (ids == tokenizer.convert_tokens_to_ids("<user>")).cumsum(1)
    turn = ids == tokenizer.convert_tokens_to_ids("<asst>")
    written = turn.cumsum(1) - turn.long() == asked  # as many turns began before this token as messages were read
    batch["labels"] = ids.masked_fill(~written | (batch["attention_mask"] == 0), -100)
    return batch


def _build(directory: Path, progress: Progress | None) -> None:
    tokenizer = build_tokenizer()
    model = build_model(WARM_START.seed)
    warm_start(model, tokenizer, progress=progress)
    save(model, tokenizer, directory)


def _damage(policy: Path) -> str | None:
    """What is wrong with a cached policy, None if nothing is."""
    try:
        checksums = json.loads((policy / MANIFEST).read_text())
        for name, checksum in checksums.items():
            if hashlib.sha256((policy / name).read_bytes()).hexdigest() != checksum:
                return f"{name} has changed since it was written"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _move_into_place(built: Path, policy: Path, damaged: Path) -> None:
    # Another process may do the same between any two of these lines; whoever is late finds a good policy in place.
    if policy.exists() and _damage(policy) is not None:
        with suppress(OSError):
            os.rename(policy, damaged)
    try:
        os.rename(built, policy)  # fails where a directory with files in it exists
    except OSError:
        if _damage(policy) is not None:
            raise


@contextmanager
def _one_thread() -> Iterator[None]:
    # The number of threads decides the order of sums, and so the last bits; a model this small is no faster with two.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    # transformers draws a bar per file it writes, in the middle of the caller's own.
    shown = transformers.utils.logging.is_progress_bar_enabled()
    if shown:
        transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
