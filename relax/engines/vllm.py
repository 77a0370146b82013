"""vLLM as the engine of a rollout replica: one `AsyncLLM`, its engine core in one child process.

The traps of this vLLM that the code answers, each held by a test: log-probs are those of the distribution sampled from
(`processed_logprobs`); the checkpoint's generation_config.json cannot change sampling; weights are loaded in place from
shared memory inside the child; a tied head is refreshed; keys and values never outlive the weights they came from,
neither in the prefix cache nor in a paused sample; a preempted sample draws on as if nothing had happened; and the
child ends with its parent.
"""

import asyncio
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from relax.engines.base import EngineDied, EngineError, EngineInfo, Request, RequestRefused, Result
from relax.engines.checkpoint import model_facts
from relax.engines.environment import prepare_environment
from relax.engines.requests import check_requests
from relax.engines.vllm_device import device_arguments
from relax.engines.vllm_processes import Processes
from relax.engines.vllm_request import sampling_parameters
from relax.engines.vllm_result import result_of, version_label
from relax.weights import errors as weight_errors
from relax.weights.manifest import Manifest, WeightTag

CONTROL_DEADLINE_S = 60.0
"""For calls into the engine core that only wait for its current step."""


class VllmEngine:
    """See `relax.engines.base.Engine` for what the methods promise.

    `checkpoint` is a Hugging Face directory; its weights are never read, only its configuration. `max_model_len` bounds
    prompt + response in tokens; `kv_cache_mb` (MiB) must hold at least one such sequence. `dtype` is "float32" or
    "bfloat16".
    """

    died: asyncio.Future[str]
    worker_extension = "relax.engines.vllm_worker.WeightLoader"

    def __init__(
        self,
        checkpoint: Path | str,
        *,
        max_model_len: int,
        dtype: str = "float32",
        max_num_seqs: int = 64,
        kv_cache_mb: int = 64,
        startup_timeout: float = 300.0,
    ) -> None:
        self._checkpoint = str(checkpoint)
        self._facts = model_facts(checkpoint)
        if max_model_len > self._facts.max_len:
            raise EngineError(
                f"{checkpoint} takes sequences of at most {self._facts.max_len} tokens, asked are {max_model_len}: "
                f"lower --rollout-max-prompt-len or --rollout-max-response-len"
            )
        self._max_model_len = max_model_len
        self._dtype = dtype
        self._max_num_seqs = max_num_seqs
        self._kv_cache_bytes = kv_cache_mb * 2**20
        self._startup_timeout = startup_timeout
        self._llm: Any = None
        self._thread: ThreadPoolExecutor | None = None
        self._processes = Processes(self._process_ended)
        self._tag: WeightTag | None = None
        self._unusable = ""  # why weights in memory are no version, if they are none
        self._tasks: dict[str, asyncio.Task[Result]] = {}
        self._queues: dict[str, Any] = {}
        # Held by whatever must not be interleaved: requests join between loads, never within one.
        self._door = asyncio.Lock()
        self._paused = False
        self._closing = False
        self._children_before: list[Any] = []

    @classmethod
    def from_options(cls, options: Any, replica: int = 0) -> Self:
        """The engine that a run's options ask for; they ask the same of every replica."""
        return cls(
            options.hf_checkpoint,
            max_model_len=options.rollout_max_prompt_len + options.rollout_max_response_len,
            dtype=options.rollout_dtype,
            max_num_seqs=options.rollout_max_num_seqs,
            kv_cache_mb=options.rollout_kv_cache_mb,
            startup_timeout=options.startup_timeout,
        )

    # ---- life ----

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.died = loop.create_future()
        prepare_environment()
        os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(self._startup_timeout))
        self._children_before = multiprocessing.active_children()
        # The child is killed when the *thread* that started it ends, so this one lives as long as the engine.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-parent")
        building = loop.run_in_executor(self._thread, self._build)
        try:
            await asyncio.wait_for(building, self._startup_timeout + 30)
        except TimeoutError:
            raise EngineError(f"vLLM did not start within {self._startup_timeout:.0f} s (--startup-timeout)") from None
        except (RuntimeError, ValueError) as error:
            raise EngineError(
                f"vLLM did not start with {self._checkpoint}: {error} (more may be in this service's output, above)"
            ) from error
        self._processes.watch(self._llm.engine_core.resources.engine_manager.processes)

    def _build(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=self._checkpoint,
            dtype=self._dtype,  # type: ignore[arg-type]
            # Version 0 comes the way of every other; nothing is sampled from what the model starts with.
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            max_model_len=self._max_model_len,
            max_num_seqs=self._max_num_seqs,
            kv_cache_memory_bytes=self._kv_cache_bytes,
            enforce_eager=True,
            worker_extension_cls=self.worker_extension,
            disable_log_stats=True,
            **device_arguments(self._facts, self._max_model_len),
        )
        if self._closing:
            return
        # Kept here alone: whatever else held it would run its finalizer after the interpreter has begun to end.
        self._llm = AsyncLLM.from_engine_args(arguments)
        if self._closing:
            self._llm.shutdown(timeout=0)
            self._llm = None

    def _process_ended(self, reason: str) -> None:
        if not self.died.done():
            self.died.set_result(reason)
        for queue in self._queues.values():
            queue.put(EngineDied(reason))

    async def shutdown(self) -> None:
        if self._closing or self._thread is None:
            return
        self._closing = True
        loop = asyncio.get_running_loop()
        processes = self._processes.let_go()
        for task in self._tasks.values():
            task.cancel()
        if self._llm is None:  # still starting, or it failed to
            for child in multiprocessing.active_children():
                if child not in self._children_before:
                    child.kill()
        else:
            if self._llm.output_handler is not None:
                self._llm.output_handler.cancel()
            # Nothing in the child is worth a grace period, and by itself it takes seconds to end.
            await loop.run_in_executor(self._thread, lambda: self._llm.shutdown(timeout=0))
            self._llm = None
        for process in processes:
            if process.is_alive():
                process.kill()
        if not self.died.done():
            self.died.cancel()
        self._thread.shutdown(wait=False)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            engine="vllm",
            checkpoint=self._checkpoint,
            dtype=self._dtype,
            max_model_len=self._max_model_len,
            max_num_seqs=self._max_num_seqs,
            eos_token_ids=self._facts.eos_token_ids,
            tag=self._tag,
            pids=self._processes.pids,
        )

    @property
    def running(self) -> int:
        return len(self._tasks)

    def tokens(self) -> dict[str, int]:
        # vLLM gives out finished samples only; what it has heard of the others from its core is in here.
        heard = self._llm.output_processor.request_states if self._queues else {}
        states = {name: heard.get(queue.request_id) for name, queue in self._queues.items()}
        return {name: state.detokenizer.num_output_tokens() for name, state in states.items() if state is not None}

    # ---- samples ----

    async def generate(self, request: Request) -> Result:
        (future,) = await self.submit([request])
        return await future

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> list[asyncio.Future[Result]]:
        async with self._door:
            self._check_serving()
            check_requests(requests, self._facts, self._max_model_len, self._tasks)
            hold = together and not self._paused and len(requests) > 1
            if hold:
                await self._control(self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
            futures: list[asyncio.Future[Result]] = []
            try:
                for request in requests:
                    futures.append(await self._add(request))
                await asyncio.sleep(0)  # they have begun: a task cancelled before would end without the abort
                return futures
            except BaseException:
                # All or none: nobody would wait for those that were queued before the one that failed.
                await asyncio.sleep(0)
                for future in futures:
                    future.cancel()
                # They may be asked for again, under the ids that they still hold.
                await asyncio.gather(*futures, return_exceptions=True)
                raise
            finally:
                if hold:
                    await self._control(self._llm.engine_core.resume_scheduler_async())

    async def _add(self, request: Request) -> asyncio.Future[Result]:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            parameters = sampling_parameters(request, self._facts.eos_token_ids)
            queue = await self._llm.add_request(request.id, tokens_input(request.prompt.tolist()), parameters)
        except EngineDeadError:
            raise self._dead() from None
        except (ValueError, VLLMClientError) as error:
            raise RequestRefused(request.id, f"request {request.id}: {error}") from error
        task = asyncio.get_running_loop().create_task(self._collect(request, queue), name=f"request {request.id}")
        self._tasks[request.id] = task
        self._queues[request.id] = queue
        task.add_done_callback(lambda _: self._forget(request.id))
        return task

    async def _collect(self, request: Request, queue: Any) -> Result:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return result_of(request, await queue.get())
        except asyncio.CancelledError:
            if not self._closing and not self.died.done():
                await self._llm.abort(queue.request_id, internal=True)
            raise
        except EngineDeadError:
            raise self._dead() from None

    def _forget(self, request_id: str) -> None:
        self._tasks.pop(request_id, None)
        self._queues.pop(request_id, None)

    async def abort(self, ids: Sequence[str]) -> None:
        queues = [self._queues[i].request_id for i in ids if i in self._queues]
        if queues:
            self._check_alive()
            await self._control(self._llm.abort(queues, internal=True))

    # ---- weights ----

    async def load(self, manifest: Manifest, store: Path | str, *, deadline: float) -> None:
        async with self._door:
            self._check_alive()
            if self._tasks and not self._paused:
                raise EngineError(f"cannot load {manifest.tag}: {len(self._tasks)} samples are running; drain or pause")
            if self._unusable or self._tag is None or self._tag.digest != manifest.tag.digest:
                await self._load(manifest, str(store), deadline)
            await self._control(self._llm.update_weight_version(version_label(manifest.tag)))
            self._tag = manifest.tag
            self._unusable = ""

    async def _load(self, manifest: Manifest, store: str, deadline: float) -> None:
        before = self._unusable
        self._unusable = f"the load of {manifest.tag} did not come to its end"
        call = self._llm.collective_rpc("relax_load", args=(manifest.to_json(), store))
        try:
            answers = await asyncio.wait_for(call, deadline)
        except TimeoutError:
            raise EngineError(f"{manifest.tag} was not loaded within {deadline:.0f} s; restart this engine") from None
        except Exception as error:
            if self.died.done():
                raise self._dead() from None
            raise EngineError(f"vLLM failed while loading {manifest.tag}: {error}") from error
        refusals = [answer for answer in answers if "refused" in answer]
        if refusals:
            # Every rank checks the same bytes before it touches a weight, so they all refuse or none does.
            self._unusable = before
            raise getattr(weight_errors, refusals[0]["refused"])(refusals[0]["message"])
        # Without `reset_running_requests` paused samples would go on with keys and values of the old weights: log-probs
        # that match no version. With it vLLM preempts them; they keep their tokens and the state of their generators,
        # so that what they draw is what they would have drawn.
        if not await self._control(self._llm.reset_prefix_cache(reset_running_requests=True)):
            raise EngineError(f"vLLM kept its prefix cache after loading {manifest.tag}; its log-probs would be wrong")

    async def pause(self) -> None:
        async with self._door:
            self._check_alive()
            # "keep": any other mode ends the samples. `AsyncLLM.pause_generation` would sleep 20 ms more for outputs on
            # their way to callers; here they may come whenever they come, with the version that is set already.
            # The cache is cleared by `load`, and only when it took other weights.
            await self._control(self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
            self._paused = True

    async def resume(self) -> None:
        async with self._door:
            self._check_alive()
            await self._control(self._llm.engine_core.resume_scheduler_async())
            self._paused = False

    # ---- checks ----

    async def _control(self, call: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await asyncio.wait_for(call, CONTROL_DEADLINE_S)
        except TimeoutError:
            raise EngineError(f"vLLM's engine core did not answer within {CONTROL_DEADLINE_S:.0f} s") from None
        except EngineDeadError:
            raise self._dead() from None

    def _dead(self) -> EngineDied:
        return EngineDied(
            self.died.result() if self.died.done() and not self.died.cancelled() else "vLLM's process died"
        )

    def _check_alive(self) -> None:
        if self._llm is None or self._closing:
            raise EngineError("this engine is not running: it was not started, or was shut down")
        if self.died.done():
            raise self._dead()

    def _check_serving(self) -> None:
        self._check_alive()
        if self._unusable:
            raise EngineError(f"this engine serves no weights: {self._unusable}")
        if self._tag is None:
            raise EngineError("this engine has no weights yet: load a version before the first request")
