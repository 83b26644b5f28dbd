"""What the adapter uses of verl, with types: verl itself has none that a checker sees.

`Any` is what is opaque to the adapter: verl's config (omegaconf), handles of Ray actors, columns of any kind. Private
names stand in the table of compat.py, which says why each is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

# ---- rows


class Batch(Protocol):
    """transfer_queue.KVBatchMeta: keys and tags of rows; their columns are in the queue."""

    partition_id: str
    keys: list[str]
    tags: list[dict[str, Any]]
    extra_info: dict[str, Any]

    def __len__(self) -> int: ...
    def reorder(self, indexes: Sequence[int]) -> None: ...


class Columns(Protocol):
    """tensordict.TensorDict: a column is a tensor, ragged or not, or a stack of objects."""

    def __getitem__(self, name: str) -> Any: ...
    def __setitem__(self, name: str, values: Any) -> None: ...
    def __contains__(self, name: object) -> bool: ...
    def keys(self) -> Iterable[str]: ...
    def clone(self, recurse: bool) -> Columns: ...
    def select(self, *names: str) -> Columns: ...
    def to_padded_tensor(self) -> Columns: ...


class Tokenizer(Protocol):
    def __len__(self) -> int: ...

    eos_token_id: int
    pad_token_id: int

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]: ...


class Dataset(Protocol):
    """A map-style dataset of verl: rows as dicts."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> dict[str, Any]: ...


# ---- the trainer and its processes


class ReplayBuffer(Protocol):
    poll_interval: float
    sample: Callable[..., tuple[Batch, dict[str, Any]]]
    _wait_for_next_poll: Callable[[str, float], float]


class WorkerGroup(Protocol):
    workers: Sequence[Any]  # handles of Ray actors

    def set_loss_fn(self, loss_fn: Callable[..., Any]) -> None: ...


class AgentLoopManager(Protocol):
    agent_loop_workers: Sequence[Any]  # handles of Ray actors


class TrainingEngine(Protocol):
    """A training engine, in a worker."""

    optimizer: Any

    def get_data_parallel_group(self) -> Any: ...
    def is_mp_src_rank_with_outputs(self) -> bool: ...
    def infer_batch(self, data: Columns) -> dict[str, Any]: ...


class ActorConfig(Protocol):
    policy_loss: Any
    loss_agg_mode: str
    global_batch_info: dict[str, Any]


# ---- generation


class TokenOutput(Protocol):
    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    stop_reason: str | None
    extra_fields: dict[str, Any]


class ServerClient(Protocol):
    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput: ...


class Output(Protocol):
    """AgentLoopOutput: a row as agent loops give it."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None
    reward_score: float | None
    extra_fields: dict[str, Any]


class Scorer(Protocol):
    """The part of an agent-loop worker that knows the way to the reward function."""

    reward_loop_worker_handles: Sequence[Any] | None

    async def _compute_score(self, outputs: list[Output], kwargs: dict[str, Any]) -> None: ...


# ---- what classes of the adapter derive from; at run time they are verl's own

if TYPE_CHECKING:

    class Trainer:
        """PPOTrainer and the trainers derived from it."""

        config: Any
        tokenizer: Tokenizer
        train_dataset: Dataset
        val_dataloader: Iterable[Mapping[str, Any]]
        replay_buffer: ReplayBuffer
        actor_rollout_wg: WorkerGroup
        critic_wg: WorkerGroup
        timing_raw: dict[str, float]
        agent_loop_manager: AgentLoopManager
        use_critic: bool
        use_reference_policy: bool
        global_steps: int
        total_training_steps: int
        parameter_sync_step: int
        local_trigger_step: int

        def __init__(self, config: Any) -> None: ...
        def fit(self, agent_loop_manager: AgentLoopManager) -> None: ...
        def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Batch: ...
        def get_reward_handles(self) -> Sequence[Any] | None: ...
        def get_llm_client(self) -> Any: ...
        def on_init_end(self) -> None: ...
        def on_validate_begin(self) -> None: ...
        def on_validate_end(self) -> None: ...
        def _save_checkpoint(self) -> None: ...
        def _next_train_batch(self, num_prompts: int | None = None) -> Columns: ...
        def _submit_batch_to_rollout(self, batch: Columns) -> int: ...
        def _get_required_batch_multiple(self, dp_size: int) -> int: ...
        def _balance_batch(self, batch: Batch, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Batch: ...
        def _compute_old_log_prob(self, batch: Batch, metrics: dict[str, Any]) -> Batch: ...
        def _compute_advantage(self, batch: Batch, metrics: dict[str, Any]) -> Batch: ...
        def _update_critic(self, batch: Batch, metrics: dict[str, Any]) -> Batch: ...
        def _update_actor(self, batch: Batch, metrics: dict[str, Any]) -> Batch: ...

    class LLMClient:
        """LLMServerClient."""

        async def generate(self, *args: Any, **kwargs: Any) -> Any: ...

    class ResumingClient(LLMClient):
        """FullyAsyncLLMServerClient: calls `generate` of its base for every attempt."""

    class AgentLoop:
        """SingleTurnAgentLoop."""

        tokenizer: Any
        response_length: int
        rollout_config: Any
        server_manager: ServerClient
        apply_chat_template_kwargs: Mapping[str, Any]

        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any: ...
        async def ct_build_initial_tokens(self, *args: Any, **kwargs: Any) -> list[int]: ...
        async def apply_chat_template(self, *args: Any, **kwargs: Any) -> list[int]: ...

    class AgentLoopWorker:
        """The class behind the actor AgentLoopWorkerTQ."""

        config: Any
        model_config: Any
        reward_loop_worker_handles: Sequence[Any] | None

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        async def _run_prompt(
            self,
            prompt: dict[str, Any],
            sampling_params: dict[str, Any],
            trajectory: dict[str, Any],
            trace: bool = False,
        ) -> None: ...
        async def _run_agent_loop(
            self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Any: ...
        async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None: ...
        async def _compute_score(self, outputs: list[Output], kwargs: dict[str, Any]) -> None: ...

else:
    Trainer = object
