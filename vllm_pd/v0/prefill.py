# SPDX-License-Identifier: Apache-2.0
"""The prefill engine's half of the binding, for V0's sequence groups: see `vllm_pd.handover.prefill`."""
from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pd.decisions.measured import StepSpeed
from vllm_pd.handover.jobs import PeerJob, PrefillCapacity, PromptInTurn
from vllm_pd.handover.metrics import PDMetrics
from vllm_pd.handover.prefill import PrefillHandover
from vllm_pd.handover.progress import Progress
from vllm_pd.peer.prefill import PrefillSession
from vllm_pd.protocol.rows import BlockRows
from vllm_pd.settings.engine import PDConfig
from vllm_pd.v0.fingerprint import token_bytes

if TYPE_CHECKING:
    from vllm.engine.llm_engine import LLMEngine
    from vllm.sequence import SequenceGroup


class PrefillJobs(PrefillHandover):
    """All jobs that a V0 engine has from peers. `engine` is the owner: a weak proxy. The scheduler holds the blocks of
    computed prompts in `prefill_sending`; writes go with the next step."""

    def __init__(self, config: PDConfig, session: PrefillSession, engine: LLMEngine, metrics: PDMetrics,
                 speed: StepSpeed) -> None:
        self._engine = engine
        super().__init__(config, session, PrefillCapacity(
            BlockRows(engine.cache_config.block_size), engine.model_config.get_vocab_size(),
            engine.parallel_config.world_size, token_bytes(engine.vllm_config),
            bool(engine.cache_config.enable_prefix_caching),
            engine.scheduler_config.max_num_batched_tokens, engine.cache_config.num_gpu_blocks), metrics, speed)

    def drop_aborted(self, progress: Progress) -> None:
        """Between two steps: give up the jobs whose request the engine has aborted by itself. It does so, and goes on,
        where a worker can't make the input of one request (vLLM's InputProcessingError)."""
        for attempt in self.computing:
            if self._jobs[attempt].request.is_finished():
                self.lost(attempt, "the prefill engine could not make its input", progress)

    def _add_request(self, job: PeerJob) -> SequenceGroup:
        from vllm import SamplingParams, TokensPrompt
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        self._engine.add_request(job.request_id, TokensPrompt(prompt_token_ids=job.prefill.token_ids), params,
                                 priority=job.prefill.priority if self._by_priority else 0)  # else it refuses one
        seq_group = self._engine.scheduler[0].waiting[-1]
        assert seq_group.request_id == job.request_id
        seq_group.first_seq.remote_decode = job.prefill.attempt
        return seq_group

    def _abort_request(self, job: PeerJob) -> None:
        self._engine.abort_request(job.request_id)

    def _is_waiting(self, job: PeerJob) -> bool:
        from vllm.sequence import SequenceStatus
        return job.request.first_seq.status is SequenceStatus.WAITING

    def _is_ready(self, prompt: PromptInTurn) -> bool:
        return True  # no client's prompt has a turn

    def _tokens_left(self, prompt: PromptInTurn) -> int:
        return prompt.request.first_seq.data.get_num_uncomputed_tokens()

    def _cached_tokens(self, prompt: PromptInTurn) -> int:
        blocks, seq = self._engine.scheduler[0].block_manager, prompt.request.first_seq
        tokens = blocks.get_num_cached_tokens(seq)
        blocks.remove_seq_from_computed_blocks_tracker(seq)  # it remembers the hit, which may be longer by its turn
        return tokens

    @property
    def _by_priority(self) -> bool:
        return self._engine.scheduler_config.policy == "priority"
