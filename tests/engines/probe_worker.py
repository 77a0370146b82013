"""The real weight loader plus what tests need to see, or to break, inside the engine's process."""

from relax.engines import vllm_worker
from relax.weights.manifest import Manifest
from relax.weights.store import ChunkStore


class ProbeWorker(vllm_worker.WeightLoader):
    def load_without_refresh(self, manifest_json: bytes, store: str) -> None:
        """What an update would do if nobody refreshed the packed head."""
        refresh = vllm_worker.refresh_packed_embeddings
        vllm_worker.refresh_packed_embeddings = lambda model: None
        try:
            with ChunkStore(store).open(Manifest.from_json(manifest_json)) as lease:
                vllm_worker.load_in_place(self.model_runner.get_model(), lease.items(), self.vllm_config)
        finally:
            vllm_worker.refresh_packed_embeddings = refresh

    def watch_steps(self) -> None:
        """From now on note how many requests are new in each step."""
        self.new_requests: list[int] = []
        execute = self.model_runner.execute_model

        def watched(scheduler_output, *args, **kwargs):
            self.new_requests.append(len(scheduler_output.scheduled_new_reqs))
            return execute(scheduler_output, *args, **kwargs)

        self.model_runner.execute_model = watched

    def steps(self) -> list[int]:
        noted, self.new_requests = self.new_requests, []
        return noted

    def steps_so_far(self) -> int:
        """Steps of the model since this was first asked."""
        if not hasattr(self, "counted"):
            self.counted = 0
            execute = self.model_runner.execute_model

            def counting(scheduler_output, *args, **kwargs):
                self.counted += scheduler_output.total_num_scheduled_tokens > 0
                return execute(scheduler_output, *args, **kwargs)

            self.model_runner.execute_model = counting
        return self.counted
